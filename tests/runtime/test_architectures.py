"""Every supported architecture: loss and gradients of the streamed stages against transformers' own model.

Both compute in fp32, in another order. The yardstick is the same model in float64: the streamed gradients may be at
most ``ERROR_RATIO`` times as far from it as those of transformers in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)  # fmt: skip

from lazysched.errors import UsageError
from lazysched.runtime.architecture import Architecture
from lazysched.runtime.batch import Batch
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Plan, SaveVariant, StagePlan
from tests.runtime.tiny import CPU, uneven_batch, variants_of

ERROR_RATIO = 4.0
"""Two fp32 evaluations of one formula differ in the order of their sums; their errors are of one size, not equal."""
SEQ_LEN, MICRO_BATCH, VOCABULARY = 16, 2, 96
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
Gradients = Callable[[PreTrainedModel, Batch], tuple[float, dict[str, torch.Tensor]]]
"""Loss and gradients of a model."""
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral, sliding": MistralConfig(**SMALL, sliding_window=5),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=8),
    "phi3": Phi3Config(**SMALL),
    "olmo2": Olmo2Config(**SMALL),
    "smollm3": SmolLM3Config(**SMALL),
    "granite": GraniteConfig(**SMALL, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "cohere": CohereConfig(**SMALL),
    "gpt-neox": GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
}


def model_of(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()  # type: ignore[no-any-return]


def plan_of(model: Model, variants: dict[str, SaveVariant], save: str = "all") -> Plan:
    """Streamed weights; every other block keeps what ``save`` names on the host, the rest is recomputed."""
    end = StagePlan(weights="host", state="host")
    kept = StagePlan(weights="host", state="host", save=save, saved_tiers={"intermediates": "host"}, input_tier="host")
    recomputed = StagePlan(weights="host", state="host", save="input")
    choices = [end, *[kept, recomputed] * ((len(model.stages) - 2) // 2), end]
    return Plan(
        model_id=model.model_id, hardware_id="any", compute_dtype="float32", batch_size=2 * MICRO_BATCH,
        seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulation=2, loss_chunk_tokens=10,
        stages={stage.id: choice for stage, choice in zip(model.stages, choices, strict=True)},
        variants=variants, budget_bytes={},
    )  # fmt: skip


def gradients_of_transformers(model: PreTrainedModel, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    labels = torch.full_like(batch.targets, -100)
    labels[:, 1:] = batch.targets[:, :-1]
    loss = model(input_ids=batch.input_ids, labels=labels, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst_error(
    config: PretrainedConfig,
    plan: Plan,
    batch: Batch | None = None,
    gradients: Gradients = gradients_of_transformers,
    device: torch.device = CPU,
) -> float:
    """Largest error of a streamed gradient over that of transformers' own in fp32; losses are held together too."""
    batch = batch or uneven_batch(plan.batch_size, SEQ_LEN, config.vocab_size, seed=3)
    source = model_of(config, torch.float32)
    loss, theirs = gradients(source, batch)
    exact_loss, exact = gradients(model_of(config, torch.float64), batch)
    settings, worst = AdamWSettings(), 0.0
    with Session(plan, config, device, settings=settings, max_grad_norm=1.0, host_limit_bytes=10**9) as session:
        weights = dict(source.named_parameters())
        session.load(lambda key, target: target.copy_(weights[key].detach()))
        result = session.executor.step(batch, 0.0)
        session.executor.drain()
        assert result.loss == pytest.approx(exact_loss, rel=1e-6)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        for stage in session.model.stages:
            for key, ours in session.gradients(stage).items():
                yardstick = max((theirs[key] - exact[key]).norm(), 1e-7 * exact[key].norm())
                worst = max(worst, float((ours.cpu() - exact[key]).norm() / yardstick))
        assert session.executor.evaluate(batch).loss == pytest.approx(result.loss, rel=1e-6)
    return worst


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers(name: str) -> None:
    model = Model(CONFIGS[name], "float32", CPU, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    plan = plan_of(model, variants_of(model, MICRO_BATCH, SEQ_LEN))
    assert worst_error(CONFIGS[name], plan) <= ERROR_RATIO


@pytest.mark.parametrize(("name", "count"), [("llama", 1), ("gemma3", 2), ("gemma2", 2), ("smollm3", 2)])
def test_blocks_of_different_structure_get_different_templates(name: str, count: int) -> None:
    assert len(set(Architecture(CONFIGS[name]).structures)) == count


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_layer=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), r"'transformer\.wpe\.weight'|final norm"),
        (GPT2Config(n_layer=2), "set dropout to 0"),
        (T5Config(), "cannot be built"),
        (PhiConfig(**SMALL, tie_word_embeddings=True), "with a bias"),
        (LlamaConfig(**SMALL, attention_dropout=0.1), "attention_dropout is 0.1"),
    ],
)
def test_what_is_not_supported_is_named(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Architecture(config)


def test_fingerprint_tells_architectures_apart_and_not_weights() -> None:
    ids = {Architecture(config).model_id for config in CONFIGS.values()}
    assert len(ids) == len(CONFIGS)
    assert Architecture(CONFIGS["llama"]).model_id == Architecture(LlamaConfig(**SMALL)).model_id
