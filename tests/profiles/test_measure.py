"""Profiles of tiny models: complete, true to the runtime, and good enough to train from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, PretrainedConfig

from lazysched.errors import RunError, UsageError
from lazysched.profiles import links, measure, updates
from lazysched.profiles.measure import profile
from lazysched.runtime import graphs
from lazysched.runtime.flat import aligned
from lazysched.runtime.model import Model
from lazysched.runtime.session import Session
from lazysched.runtime.stage_updates import AdamWSettings
from lazysched.schemas import Profile, SaveVariant, variant_key
from tests.lowering.plans import plans
from tests.runtime.tiny import CPU, SEQ_LEN, llama, uneven_batch, variants_of

MICRO_BATCHES = (1, 2)
CHUNK_TOKENS = 12
COPY_SIZES = (1 << 12, 1 << 16)


def gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=4, vocab_size=97, sliding_window=4, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip


def run(
    config: PretrainedConfig, folder: Path, device: str = "cpu", compiled: bool | None = False, packing: bool = False
) -> Profile:
    config.save_pretrained(folder)
    parts: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        for room, name, value in (
            (links, "SIZES", COPY_SIZES), (links, "PAGEABLE_SIZES", COPY_SIZES),
            (links, "LAP_BYTES", 1 << 16), (updates, "WALKED_BYTES", 1 << 18),
        ):  # fmt: skip
            patch.setattr(room, name, value)
        measured = profile(
            str(folder / "config.json"), device=device, seq_len=SEQ_LEN, micro_batches=MICRO_BATCHES,
            loss_chunk_tokens=CHUNK_TOKENS, repeats=2, compiled=compiled, packing=packing,
            report=lambda *part: parts.append(part),
        )  # fmt: skip
    shares = [done for _, done in parts]
    assert shares == sorted(set(shares))
    assert (shares[0], shares[-1]) == (0, pytest.approx(0.85))
    assert [part for part, _ in parts][-2:] == ["page-locking and updates", "copies"]
    return measured


@pytest.fixture(scope="module")
def tiny_profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return run(llama(tied=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def untied_profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return run(llama(tied=False), tmp_path_factory.mktemp("untied"))


def embedded_variants(of: Profile, micro_batch: int) -> dict[str, SaveVariant]:
    """A plan's variants out of a profile."""
    return {
        variant_key(structure, variant.name): variant
        for structure, sizes in of.variants.items()
        for variant in sizes[micro_batch]
    }


def test_every_structure_variant_and_micro_batch_has_medians(tiny_profile: Profile) -> None:
    assert {
        structure: {size: [variant.name for variant in found] for size, found in sizes.items()}
        for structure, sizes in tiny_profile.variants.items()
    } == {
        "embed": {1: ["all"], 2: ["all"]},
        "LlamaDecoderLayer": {1: ["all", "input"], 2: ["all", "input"]},
        "head": {1: ["all"], 2: ["all"]},
    }
    for sizes in tiny_profile.variants.values():
        for variant in (variant for found in sizes.values() for variant in found):
            assert variant.forward.seconds > 0
            assert variant.backward.seconds > 0
            assert variant.forward.repeats == variant.backward.repeats == 2
    assert [stage.id for stage in tiny_profile.stages] == ["embed", "block.0", "block.1", "block.2", "head"]
    assert not tiny_profile.estimated


@pytest.mark.parametrize("config", [llama(tied=True), gemma3()], ids=["llama", "gemma3"])
def test_saved_bytes_are_those_that_the_runtime_keeps(config: PretrainedConfig, tmp_path: Path) -> None:
    found = run(config, tmp_path)
    structures = {stage.structure for stage in found.stages if stage.is_block}
    assert len(structures) == (1 if config.model_type == "llama" else 2)
    for micro_batch in MICRO_BATCHES:
        model = Model(config, "float32", CPU, micro_batch=micro_batch, seq_len=SEQ_LEN)
        kept = variants_of(model, micro_batch, SEQ_LEN)
        variants = embedded_variants(found, micro_batch)
        assert set(variants) == set(kept)
        assert {key: variant.saved for key, variant in variants.items()} == {
            key: variant.saved for key, variant in kept.items()
        }


def test_packed_rows(tiny_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pack = [], Model.pack

    def counted(model: Model, micro_batch: int, positions: torch.Tensor) -> None:
        made.append(micro_batch)
        pack(model, micro_batch, positions)

    monkeypatch.setattr(Model, "pack", counted)
    config = llama(tied=True)
    found = run(config, tmp_path, packing=True)
    assert found.packing
    assert not tiny_profile.packing
    assert tiny_profile.argument_bytes == {}
    for micro_batch in MICRO_BATCHES:
        model = Model(config, "float32", CPU, micro_batch=micro_batch, seq_len=SEQ_LEN, packing=True)
        assert found.argument_bytes[micro_batch] == model.argument_bytes > 0
        kept = variants_of(model, micro_batch, SEQ_LEN)
        assert {key: variant.saved for key, variant in embedded_variants(found, micro_batch).items()} == {
            key: variant.saved for key, variant in kept.items()
        }
    # Once as each model is made, then in each forward of the embedding that is measured.
    assert len(made) >= 4 * len(MICRO_BATCHES)


def test_working_bytes_hold_what_must_be_there(tiny_profile: Profile) -> None:
    hidden, vocabulary, rows = 32, 97, 2
    block = {variant.name: variant for variant in tiny_profile.variants["LlamaDecoderLayer"][rows]}
    block_params = tiny_profile.stages[1].num_params
    hidden_bytes = 4 * rows * SEQ_LEN * hidden
    for variant in block.values():
        assert variant.saved["input"] == aligned(hidden_bytes)
        assert variant.working_backward_bytes >= 4 * block_params
    # Recomputing makes the intermediates anew within the backward.
    difference = block["input"].working_backward_bytes - block["all"].working_backward_bytes
    assert difference > 0
    assert block["input"].working_forward_bytes >= hidden_bytes
    head, embed = tiny_profile.variants["head"][rows][0], tiny_profile.variants["embed"][rows][0]
    assert head.working_forward_bytes >= 4 * CHUNK_TOKENS * vocabulary
    assert head.working_backward_bytes >= 4 * vocabulary * hidden + hidden_bytes
    assert embed.working_backward_bytes == 4 * vocabulary * hidden
    assert embed.working_forward_bytes == hidden_bytes


def test_links_rates_and_memory(tiny_profile: Profile) -> None:
    for name in ("h2d", "d2h", "host", "gpu"):
        assert [size for size, _ in tiny_profile.links[name].points] == list(COPY_SIZES)
    for name in ("h2d_both", "d2h_both"):
        assert tiny_profile.links[name].reason == "engines run in line on a CPU: copies never overlap"
    for name in links.PAGEABLE:
        assert tiny_profile.links[name].reason == (
            "no GPU: no memory is page-locked, all copies are between ordinary buffers"
        )
    assert tiny_profile.pin_limit_bytes is None
    assert "page-locked" not in tiny_profile.notes
    for name in ("nvme_read", "nvme_write"):
        assert tiny_profile.links[name].reason == "no --storage folder given"
    rates = [rate for by_format in tiny_profile.update.values() for rate in by_format.values()]
    assert [rate.repeats for rate in rates] == [2] * 4
    free = tiny_profile.free_bytes
    assert free["gpu"] == free["host"]
    assert free["nvme"] is None
    assert "half" in tiny_profile.notes["memory"]
    assert (tiny_profile.context_bytes, tiny_profile.fragmentation_bytes) == (0, dict.fromkeys(MICRO_BATCHES, 0))


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_profile_survives_its_file(tiny_profile: Profile, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"profile{suffix}"
    tiny_profile.save(path)
    assert Profile.load(path) == tiny_profile


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), tied=st.booleans(), micro_batch=st.sampled_from(MICRO_BATCHES))
def test_a_plan_of_the_profiles_variants_trains(
    data: st.DataObject, tied: bool, micro_batch: int, tiny_profile: Profile, untied_profile: Profile
) -> None:
    found, config = (tiny_profile if tied else untied_profile), llama(tied)
    plan = data.draw(
        plans(
            found.stages, embedded_variants(found, micro_batch), micro_batch=micro_batch, accumulation=2,
            seq_len=SEQ_LEN, loss_chunk_tokens=CHUNK_TOKENS,
        )
    ).model_copy(update={"model_id": found.model_id, "hardware_id": found.hardware_id})  # fmt: skip
    batch = uneven_batch(2 * micro_batch, SEQ_LEN, config.vocab_size, seed=0)
    with Session(plan, config, CPU, settings=AdamWSettings(), max_grad_norm=1.0, host_limit_bytes=10**9) as session:
        session.initialise(seed=0)
        before = session.executor.step(batch, 1e-2).loss  # refuses a plan whose saved bytes are not what it keeps
        assert session.executor.step(batch, 1e-2).loss < before


def test_what_cannot_be_compiled_is_measured_uncompiled_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such operator")

    monkeypatch.setattr(graphs, "compile_graph", fail)
    found = run(llama(tied=True), tmp_path, compiled=True)
    blocks = [v for variants in found.variants["LlamaDecoderLayer"].values() for v in variants]
    assert {v.name for v in blocks} == {"all", "input"}
    assert not any(v.compiled for v in [*blocks, *found.variants["head"][1]])
    said = " / ".join(found.doubts())
    assert "blocks run uncompiled: block.0: it cannot be compiled (ValueError: no such operator)" in said
    assert "the loss runs uncompiled" in said


def test_compiled_all_variants_are_measured_once_and_interpolated_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(graphs, "compile_graph", graphs.interpret_graph)
    found = run(llama(tied=True), tmp_path, compiled=True)
    small, large = (found.variants["LlamaDecoderLayer"][size] for size in MICRO_BATCHES)
    assert [v.name for v in small] == [v.name for v in large]
    assert {v.budget for v in large[-1:]} == {0.0}
    assert all(v.forward.repeats == 2 for v in [*large, small[0], small[-1]])
    assert all(v.forward.reason == "interpolated from micro-batch 2" for v in small[1:-1])
    for variant, twice in zip(small, large, strict=True):
        assert twice.saved["input"] == 2 * variant.saved["input"]
        assert variant.saved_bytes <= twice.saved_bytes <= 2 * variant.saved_bytes
    assert found.variants["head"][1][0].compiled


def test_micro_batches_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = measure.measure_stages

    def limited(model: Model, micro_batch: int, *rest: int) -> object:
        if micro_batch > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, micro_batch, *rest)

    monkeypatch.setattr(measure, "measure_stages", limited)
    limit = 1
    found = run(llama(tied=True), tmp_path)
    assert {tuple(sizes) for sizes in found.variants.values()} == {(1,)}
    assert "left out" in found.notes["micro_batch.2"]
    limit = 0
    with pytest.raises(RunError, match=r"micro_batches: \[1, 2\] rows of 16 tokens do not fit"):
        run(llama(tied=True), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu'"), ({"dtype": "float16"}, "dtype: 'float16'"),
        ({"seq_len": 0}, "seq_len: 0"), ({"micro_batches": []}, "micro_batches: none"),
        ({"micro_batches": [1, -2]}, "micro_batches: -2"), ({"loss_chunk_tokens": 0}, "loss_chunk_tokens: 0"),
        ({"repeats": 0}, "repeats: 0"), ({"pin_limit_bytes": -1}, "pin_limit: -1 bytes is no limit; use 0 or more"),
        ({"pin_limit_bytes": 10**9}, "pin_limit: 1 GB: without a GPU nothing is page-locked; omit it"),
        ({"storage_dir": "nowhere"}, "storage: nowhere"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"device": "cpu"}
    with pytest.raises(UsageError, match=message):
        profile("config.json", **(base | arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="device: cuda is not available"):
        profile("config.json", device="cuda")


def test_importing_the_package_loads_no_torch(tmp_path: Path) -> None:
    code = "import lazysched.profiles, sys; assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_everything_is_measured(tmp_path: Path) -> None:
    found = run(llama(tied=True), tmp_path, device="cuda", compiled=None)
    assert (found.device, found.compute_dtype) == ("cuda", "bfloat16")
    for name in ("h2d", "d2h", "h2d_both", "d2h_both", "host", "gpu"):
        assert found.links[name].points, name
    for name in links.PAGEABLE:
        assert [size for size, _ in found.links[name].points] == list(COPY_SIZES)
    assert found.pin_limit_bytes is None
    assert "more was not tried" in found.notes["page-locked"]
    assert found.context_bytes > 0
    for variant in found.variants["LlamaDecoderLayer"][2]:
        assert variant.forward.seconds > 0
        assert variant.working_backward_bytes >= variant.saved["input"]  # the input's gradient
