"""Shapes by the table against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from lazysched.errors import UsageError
from lazysched.profiles.shapes import FAMILIES, load_shape, shape_of
from lazysched.runtime.architecture import Architecture
from lazysched.schemas import Dtype
from tests.runtime.test_architectures import CONFIGS, SMALL

SIX_LAYERS = {**SMALL, "num_hidden_layers": 6}
MORE: dict[str, PretrainedConfig] = {
    "gemma": GemmaConfig(**SMALL, head_dim=16),
    "cohere with norms": CohereConfig(**SMALL, use_qk_norm=True, attention_bias=True),
    "qwen2, last layers slide": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3 with biases": Qwen3Config(**SMALL, head_dim=24, attention_bias=True),
    "gemma3, default pattern": Gemma3TextConfig(**SIX_LAYERS, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "smollm3, sliding": SmolLM3Config(**SMALL, use_sliding_window=True, sliding_window=5, attention_bias=True),
    "llama, odd sizes": LlamaConfig(**SMALL | {"hidden_size": 40, "intermediate_size": 50, "vocab_size": 97}),
    "mistral, own heads": MistralConfig(**SMALL, head_dim=10),
}
KNOWN = {name: config for name, config in (CONFIGS | MORE).items() if config.model_type in FAMILIES}


def test_every_family_is_held_against_its_model() -> None:
    assert {config.model_type for config in KNOWN.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", KNOWN)
def test_stages_are_those_of_the_model(name: str, dtype: Dtype) -> None:
    config = KNOWN[name]
    stages = Architecture(config).stages(dtype)
    shape = shape_of(json.loads(config.to_json_string(use_diff=False)), dtype)
    assert shape.stages == stages
    assert [list(ours.params) for ours in shape.stages] == [list(theirs.params) for theirs in stages]
    assert set(shape.blocks) == {stage.structure for stage in stages if stage.is_block}


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_config_leaves_out_has_the_default_of_transformers(name: str) -> None:
    """Files that ``save_pretrained`` writes may hold only what differs from the defaults."""
    config = KNOWN[name]
    stages = Architecture(config).stages("bfloat16")
    assert shape_of(config.to_diff_dict() | {"model_type": config.model_type}, "bfloat16").stages == stages


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_of_sizes_are_those_of_transformers(model_type: str) -> None:
    config = next(type(config) for config in KNOWN.values() if config.model_type == model_type)()
    stages = Architecture(config).stages("bfloat16")
    assert shape_of({"model_type": model_type}, "bfloat16").stages == stages


def test_the_id_tells_shapes_apart_and_says_that_it_is_an_estimate() -> None:
    ids = {shape_of(config.to_dict(), "bfloat16").model_id for config in KNOWN.values()}
    assert all("-estimate-" in model_id for model_id in ids)
    assert shape_of(KNOWN["llama"].to_dict(), "bfloat16").model_id.startswith("LlamaForCausalLM-0.0372M-")
    assert len({shape_of(KNOWN[name].to_dict(), "bfloat16").model_id for name in ("llama", "llama, odd sizes")}) == 2


def test_windows_are_known_by_block() -> None:
    blocks = shape_of(KNOWN["gemma2"].to_dict(), "bfloat16").blocks
    assert [block.window for block in blocks.values()] == [5, None]
    assert shape_of(KNOWN["mistral, sliding"].to_dict(), "bfloat16").blocks["MistralDecoderLayer"].window == 5
    assert shape_of(KNOWN["qwen2"].to_dict(), "bfloat16").blocks["Qwen2DecoderLayer"].window is None


LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_neox"}, r"model_type: 'gpt_neox' cannot be estimated; known are cohere, gemma, "),
        ({}, "model_type: None"),
        ([], "model_type: None"),
        ({"model_type": ["llama"]}, "model_type: "),
        (LLAMA | {"hidden_size": -4}, "hidden_size: -4 is no positive number"),
        (LLAMA | {"num_hidden_layers": 1.5}, "num_hidden_layers: 1.5"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size: 'many'"),
        (LLAMA | {"num_attention_heads": True}, "num_attention_heads: True"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads: 0"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads: 3 heads of keys cannot be shared evenly"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is neither true nor false"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout is 0.1; set dropout to 0"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types: does not fit 26 layers"),
        ({"model_type": "gemma3_text", "layer_types": 7}, "layer_types: does not fit 26 layers"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(config: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        shape_of(config, "bfloat16")
    assert "\n" not in str(error.value)


def test_a_folder_or_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_shape(tmp_path, "bfloat16") == load_shape(tmp_path / "config.json", "bfloat16")


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for path, message in (
        (tmp_path, "no such file"),
        (tmp_path / "broken.json", "not valid JSON"),
        (tmp_path / "model.gguf", "needs a config.json"),
        (Path("Qwen/Qwen2-7B"), "needs a config.json"),
    ):
        with pytest.raises(UsageError, match=message):
            load_shape(path, "bfloat16")


def test_other_architectures_that_run_are_not_claimed() -> None:
    with pytest.raises(UsageError, match="cannot be estimated"):
        shape_of(GPTNeoXConfig().to_dict(), "bfloat16")
