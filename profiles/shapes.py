"""Stages of a model from its config.json alone, by a small table: no torch, no transformers, no weights.

``lazysched profile`` builds the model itself instead and takes any architecture; tests hold the two together. What is
not written in a config.json has the default that transformers gives it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazysched.errors import UNREADABLE_JSON, UsageError
from lazysched.flat_store import flat_bytes
from lazysched.schemas import BYTES_PER_ELEMENT, Dtype, Stage

Config = Mapping[str, Any]
Params = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BlockShape:
    """Sizes of one decoder block, in values per token.

    Attributes:
        hidden: of its input and output.
        attention: all query heads together.
        key_value: all key heads together.
        ffn: inside of the feed-forward part, which has a gate.
        num_heads: query heads.
        num_norms: norms over ``hidden``.
        keeps_queries_twice: whether a forward that keeps everything has queries and keys from before their norm, or
            from a fused projection, beside those that attention sees.
        window: tokens that a query sees at most; None: all before it.
    """

    hidden: int
    attention: int
    key_value: int
    ffn: int
    num_heads: int
    num_norms: int
    keeps_queries_twice: bool
    window: int | None


@dataclass(frozen=True)
class ModelShape:
    """What an estimate needs of a model.

    Attributes:
        model_id: names class, size and shapes. It is not that of a profile, which also hashes all settings as
            transformers completes them, whose configuration classes import torch.
        stages: ``embed``, blocks, ``head``.
        blocks: structure -> sizes.
        vocabulary: rows of the output matrix.
        longest: most tokens of a row; None where the configuration has no limit.
    """

    model_id: str
    stages: list[Stage]
    blocks: dict[str, BlockShape]
    vocabulary: int
    longest: int | None


@dataclass(frozen=True)
class _Family:
    """One row of the table.

    Attributes:
        model: class of the causal language model.
        block: class of a decoder block.
        defaults: settings that a config.json may leave out.
        norms: names of the norms over the hidden size, in order.
        qkv_bias, out_bias: whether projections have biases, or the setting that says so.
        mlp_bias: likewise for the feed-forward part.
        qk_norm: ``head``: one weight per value of a head; ``heads``: one for each head; ``all``: over all heads.
        layer_kind: (settings, layer) -> what tells blocks of one model apart.
        window: whether a block sees a window: by ``layer_types`` or in ``all`` blocks.
        fused: whether queries, keys and values come from one matrix, and so gate and input of the feed-forward part.
    """

    model: str
    block: str
    defaults: Config
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: str | None = None
    layer_kind: Callable[[Config, int], str] = lambda _config, _layer: "full_attention"
    window: str | None = None
    fused: bool = False


def _alternating(period: int) -> Callable[[Config, int], str]:
    """Every ``period``-th block sees everything, the others a window."""

    def kind(config: Config, layer: int) -> str:
        pattern = int(config.get("sliding_window_pattern") or period)
        return _listed(config, layer) or ("sliding_attention" if (layer + 1) % pattern else "full_attention")

    return kind


def _listed(config: Config, layer: int) -> str | None:
    types = config.get("layer_types")
    return None if types is None else str(types[layer])


def _qwen_kind(config: Config, layer: int) -> str:
    slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
    default = "sliding_attention" if slides and layer >= config["max_window_layers"] else "full_attention"
    return _listed(config, layer) or default


def _smollm3_kind(config: Config, layer: int) -> str:
    rope = config.get("no_rope_layers")
    has_rope = bool(rope[layer]) if rope is not None else bool((layer + 1) % config["no_rope_layer_interval"])
    slides = config.get("use_sliding_window") and config.get("sliding_window") is not None and not has_rope
    kind = _listed(config, layer) or ("sliding_attention" if slides else "full_attention")
    return f"{kind}{'' if has_rope else ' without rope'}"


def _sizes(hidden: int, ffn: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    named = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip
    return named | more


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_GEMMA2 = _sizes(
    2304, 9216, 26, 8, 256000, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True, sliding_window=4096
)
FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", "LlamaDecoderLayer", _sizes(4096, 11008, 32, 32, 32000), mlp_bias="mlp_bias"),
    "mistral": _Family(
        "MistralForCausalLM", "MistralDecoderLayer",
        _sizes(4096, 14336, 32, 32, 32000, num_key_value_heads=8, sliding_window=4096),
        qkv_bias=False, out_bias=False, window="all",
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM", "Qwen2DecoderLayer",
        _sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
        qkv_bias=True, out_bias=False, layer_kind=_qwen_kind, window="layer_types",
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM", "Qwen3DecoderLayer",
        _sizes(
            4096, 22016, 32, 32, 151936, num_key_value_heads=32, head_dim=128, sliding_window=4096,
            max_window_layers=28,
        ),
        qk_norm="head", layer_kind=_qwen_kind, window="layer_types",
    ),
    "gemma": _Family(
        "GemmaForCausalLM", "GemmaDecoderLayer",
        _sizes(3072, 24576, 28, 16, 256000, num_key_value_heads=16, head_dim=256, tie_word_embeddings=True),
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM", "Gemma2DecoderLayer", _GEMMA2, norms=_GEMMA_NORMS, layer_kind=_alternating(2),
        window="layer_types",
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM", "Gemma3DecoderLayer", _GEMMA2 | {"vocab_size": 262208}, norms=_GEMMA_NORMS,
        qk_norm="head", layer_kind=_alternating(6), window="layer_types",
    ),
    "phi3": _Family(
        "Phi3ForCausalLM", "Phi3DecoderLayer", _sizes(3072, 8192, 32, 32, 32064), qkv_bias=False, out_bias=False,
        window="all", fused=True,
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM", "Olmo2DecoderLayer", _sizes(4096, 11008, 32, 32, 50304),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="all",
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM", "SmolLM3DecoderLayer",
        _sizes(
            2048, 11008, 36, 16, 128256, num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4
        ),
        mlp_bias="mlp_bias", layer_kind=_smollm3_kind, window="layer_types",
    ),
    "granite": _Family(
        "GraniteForCausalLM", "GraniteDecoderLayer", _sizes(4096, 11008, 32, 32, 32000), mlp_bias="mlp_bias"
    ),
    "cohere": _Family(
        "CohereForCausalLM", "CohereDecoderLayer", _sizes(8192, 22528, 40, 64, 256000, tie_word_embeddings=True),
        norms=("input_layernorm",), qk_norm="heads",
    ),
}  # fmt: skip
"""``model_type`` -> how its stages follow from the settings."""


@dataclass(frozen=True)
class _Model:
    """Settings of one model, checked."""

    family: _Family
    config: Config
    origin: str
    hidden: int = field(init=False)
    ffn: int = field(init=False)
    num_heads: int = field(init=False)
    num_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "hidden", self.size("hidden_size"))
        set_field(self, "ffn", self.size("intermediate_size"))
        set_field(self, "num_heads", self.size("num_attention_heads"))
        given = self.config.get("num_key_value_heads")
        set_field(self, "num_kv_heads", self.num_heads if given is None else self.size("num_key_value_heads"))
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.origin}: num_key_value_heads: {self.num_kv_heads} heads of keys cannot be shared evenly by "
                f"{self.num_heads} of queries; mend the config.json"
            )
        given = self.config.get("head_dim")
        set_field(self, "head_dim", self.hidden // self.num_heads if given is None else self.size("head_dim"))

    def size(self, name: str) -> int:
        """A setting that must be a positive number.

        Raises:
            UsageError: it is not.
        """
        value = self.config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{self.origin}: {name}: {value!r} is no positive number; mend the config.json")
        return value

    def flag(self, choice: bool | str) -> bool:
        """A fact of the family, or the setting that it names."""
        return bool(self.config.get(choice, False)) if isinstance(choice, str) else choice

    @property
    def has_qk_norm(self) -> bool:
        return self.family.qk_norm is not None and (self.family.qk_norm != "heads" or self.flag("use_qk_norm"))


def load_shape(path: str | Path, compute_dtype: Dtype) -> ModelShape:
    """Read a config.json, or the one in a folder.

    Raises:
        UsageError: there is none, it is damaged, or its ``model_type`` is not in the table.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if file.suffix != ".json":
        raise UsageError(f"model: {path}: an estimate needs a config.json or a folder that has one; name it")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"model: {file}: no such file; name a config.json, or a folder that has one") from None
    except UNREADABLE_JSON as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"model: {file}: not valid JSON ({reason}); download it again") from None
    return shape_of(config, compute_dtype, f"model: {file}")


def shape_of(config: Any, compute_dtype: Dtype, origin: str = "model") -> ModelShape:
    """Stages of the model that ``config``, the content of a config.json, describes.

    Raises:
        UsageError: its ``model_type`` is not in the table, or a setting is missing or wrong.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UsageError(
            f"{origin}: model_type: {model_type!r} cannot be estimated; known are {', '.join(sorted(FAMILIES))}: "
            f"profile other models on the machine"
        )
    _refuse_dropout(config, origin)
    settings = {**family.defaults, **{name: value for name, value in config.items() if value is not None}}
    return _shape(_Model(family, settings, origin), compute_dtype)


def _refuse_dropout(config: Config, origin: str) -> None:
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        if config.get(name):
            raise UsageError(f"{origin}: {name} is {config[name]}; set dropout to 0 in config.json")


def _shape(model: _Model, compute_dtype: Dtype) -> ModelShape:
    family, config, vocabulary = model.family, model.config, model.size("vocab_size")
    num_layers, element = model.size("num_hidden_layers"), BYTES_PER_ELEMENT[compute_dtype]
    try:
        kinds = [family.layer_kind(config, layer) for layer in range(num_layers)]
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        reason = f"layer_types: does not fit {num_layers} layers"
        raise UsageError(f"{model.origin}: {reason}; mend the config.json") from None
    distinct = enumerate(dict.fromkeys(kinds))
    names = {kind: family.block + (f"/{number}" if number else "") for number, kind in distinct}
    tied = config["tie_word_embeddings"]
    if not isinstance(tied, bool):
        raise UsageError(
            f"{model.origin}: tie_word_embeddings: {tied!r} is neither true nor false; mend the config.json"
        )
    head: Params = {"model.norm.weight": (model.hidden,)}
    if not tied:
        head["lm_head.weight"] = (vocabulary, model.hidden)
    blocks = [(names[kind], _block_params(model, f"model.layers.{layer}.")) for layer, kind in enumerate(kinds)]
    stages = [
        _stage("embed", "embed", {"model.embed_tokens.weight": (vocabulary, model.hidden)}, element),
        *(_stage(f"block.{layer}", structure, params, element) for layer, (structure, params) in enumerate(blocks)),
        _stage("head", "head", head, element, "embed" if tied else None),
    ]
    longest = config.get("max_position_embeddings")
    return ModelShape(
        model_id=_model_id(family, stages), stages=stages,
        blocks={names[kind]: _block_shape(model, kind) for kind in names}, vocabulary=vocabulary,
        longest=longest if isinstance(longest, int) else None,
    )  # fmt: skip


def _stage(stage_id: str, structure: str, params: Params, element_bytes: int, shares: str | None = None) -> Stage:
    size = flat_bytes(params, element_bytes)
    return Stage(id=stage_id, structure=structure, params=params, weight_bytes=size, shares=shares)


def _block_params(model: _Model, prefix: str) -> Params:
    """Parameters of a block in the order in which its modules hold them."""
    family, hidden, ffn, dim = model.family, model.hidden, model.ffn, model.head_dim
    queries, keys = model.num_heads * dim, model.num_kv_heads * dim
    params: Params = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        params[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            params[f"{prefix}{name}.bias"] = (rows,)

    qkv_bias, out_bias, mlp_bias = (model.flag(f) for f in (family.qkv_bias, family.out_bias, family.mlp_bias))
    if family.fused:
        linear("self_attn.o_proj", hidden, queries, out_bias)
        linear("self_attn.qkv_proj", queries + 2 * keys, hidden, qkv_bias)
        linear("mlp.gate_up_proj", 2 * ffn, hidden, mlp_bias)
    else:
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            linear(f"self_attn.{name}_proj", rows, hidden, qkv_bias)
        linear("self_attn.o_proj", hidden, queries, out_bias)
        if model.has_qk_norm:
            for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads)):
                shapes = {"head": (dim,), "heads": (heads, dim), "all": (heads * dim,)}
                params[f"{prefix}self_attn.{name}_norm.weight"] = shapes[str(family.qk_norm)]
        for name in ("gate", "up"):
            linear(f"mlp.{name}_proj", ffn, hidden, mlp_bias)
    linear("mlp.down_proj", hidden, ffn, mlp_bias)
    return params | {f"{prefix}{norm}.weight": (hidden,) for norm in family.norms}


def _block_shape(model: _Model, kind: str) -> BlockShape:
    slides = model.family.window == "all" or kind.startswith("sliding")
    window = model.config.get("sliding_window") if model.family.window and slides else None
    return BlockShape(
        hidden=model.hidden,
        attention=model.num_heads * model.head_dim,
        key_value=model.num_kv_heads * model.head_dim,
        ffn=model.ffn,
        num_heads=model.num_heads,
        num_norms=len(model.family.norms),
        keeps_queries_twice=model.has_qk_norm or model.family.fused,
        window=window if isinstance(window, int) and window > 0 else None,
    )


def _model_id(family: _Family, stages: list[Stage]) -> str:
    facts = [[stage.structure, list(stage.params.items()), stage.shares] for stage in stages]
    size = sum(stage.num_params for stage in stages)
    label = f"{size / 1e9:.2f}B" if size >= 5e8 else f"{size / 1e6:.3g}M"
    return f"{family.model}-{label}-estimate-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"
