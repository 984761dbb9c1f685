"""Hardware files: the library, the schema, and the file that is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.profiles import hardware as measuring
from lazysched.profiles.estimate import estimate
from lazysched.profiles.hardware import measure_hardware
from lazysched.profiles.library_files import library_names, load_hardware
from lazysched.profiles.shapes import shape_of
from lazysched.schemas import Curve, Figure, Hardware, Profile
from lazysched.solver import solve

EXPECTED = {
    "rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "h100-pcie", "h100-sxm", "h200", "gh200", "l40s",
}  # fmt: skip


def test_the_library_holds_every_machine() -> None:
    assert set(library_names()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_figure_names_its_source(name: str) -> None:
    for field, figure in load_hardware(name).figures.items():
        assert figure.note, field
        assert (figure.value is None) == (figure.source is None), field


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_figures_are_physical(name: str) -> None:
    """What is reached stays below what the vendor has, and two directions share what one has."""
    figures = {key: figure.value for key, figure in load_hardware(name).figures.items()}
    for reached, peak in (
        ("matmul_flop_per_s", "peak_matmul_flop_per_s"),
        ("gpu_copy_bytes_per_s", "gpu_bandwidth_bytes_per_s"),
        ("h2d_both_bytes_per_s", "h2d_bytes_per_s"),
        ("d2h_both_bytes_per_s", "d2h_bytes_per_s"),
    ):
        low, high = figures[reached], figures[peak]
        assert low is None or (high is not None and low <= high), reached


def test_only_the_machine_that_was_measured_says_so() -> None:
    measured = {name for name in EXPECTED for f in load_hardware(name).figures.values() if f.source == "measured"}
    assert measured == {"h200"}


def test_names_are_taken_in_any_case_and_paths_too(tmp_path: Path) -> None:
    load_hardware("h200").save(tmp_path / "mine.yaml")
    assert load_hardware("H200") == load_hardware(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(("name", "nearest"), [("rtx409", "rtx4090"), ("a100", "a100-40"), ("H100-SMX", "h100-sxm")])
def test_an_unknown_name_lists_the_nearest_first(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"is not in the library; use {nearest}, ") as error:
        load_hardware(name)
    assert all(known in str(error.value) for known in EXPECTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul_flop_per_s": {"value": 1e12}}, "matmul_flop_per_s: a figure needs its source"),
        ({"matmul_flop_per_s": {"value": 1e12, "source": "datasheet"}}, "needs a note: which document"),
        ({"matmul_flop_per_s": {"value": 1e12, "source": "guessed"}}, "matmul_flop_per_s.source"),
        ({"matmul_flop_per_s": {"value": 0, "source": "measured"}}, "matmul_flop_per_s.value"),
        ({"matmul_flop_per_s": {"value": float("nan"), "source": "measured"}}, "matmul_flop_per_s.value"),
        ({"price_usd_per_hour": {"value": None}}, "price_usd_per_hour: a figure that is null needs a note"),
        ({"price_usd_per_hour": {"value": None, "source": "measured", "note": "?"}}, "and no source"),
        ({"speed": 1}, "speed: unknown key"),
    ],
)
def test_a_figure_without_source_is_refused(change: dict[str, Any], message: str) -> None:
    data = load_hardware("h200").model_dump() | change
    with pytest.raises(UsageError, match=message):
        Hardware.check(data, "mine.yaml")


def test_files_of_another_kind_are_told_apart(tmp_path: Path) -> None:
    load_hardware("h200").save(tmp_path / "machine.yaml")
    with pytest.raises(UsageError, match="is a hardware file, not a profile"):
        Profile.load(tmp_path / "machine.yaml")
    shape = shape_of({"model_type": "llama", "num_hidden_layers": 1}, "bfloat16")
    estimate(load_hardware("h200"), shape, micro_batches=[1]).save(tmp_path / "profile.json")
    with pytest.raises(UsageError, match="is a profile, not a hardware file"):
        Hardware.load(tmp_path / "profile.json")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    """This machine, measured once with small matrices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measuring.MATMUL_SIZES, "cpu", 64)
        patch.setattr(measuring, "UPDATED_SHAPE", (128, 128))
        return measure_hardware(device="cpu", storage_dir=str(tmp_path_factory.mktemp("disk")), repeats=1)


def test_this_machine_is_measured_and_what_it_lacks_has_a_reason(here: Hardware) -> None:
    assert (here.device, here.compute_dtype) == ("cpu", "float32")
    lacking = {name for name, figure in here.figures.items() if figure.value is None}
    assert lacking == {
        "h2d_both_bytes_per_s", "d2h_both_bytes_per_s", "gpu_bandwidth_bytes_per_s", "peak_matmul_flop_per_s",
        "context_bytes", "price_usd_per_hour",
    }  # fmt: skip
    assert {figure.source for figure in here.figures.values()} == {"measured", None}
    assert "never overlap" in here.h2d_both_bytes_per_s.note
    repeated = {name for name, figure in here.figures.items() if figure.spread is not None}
    assert repeated == {
        "h2d_bytes_per_s", "d2h_bytes_per_s", "nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "gpu_copy_bytes_per_s",
        "host_copy_bytes_per_s", "matmul_flop_per_s", "cpu_update_hybrid8_per_s", "cpu_update_fp32_per_s",
        "gpu_update_hybrid8_per_s", "gpu_update_fp32_per_s",
    }  # fmt: skip


def test_a_curve_keeps_the_spread_of_its_largest_request() -> None:
    curve = Curve.of({10: [1.0, 3.0], 40: [2.0, 3.0, 4.0, 5.0, 6.0]})
    assert curve.points == [(10, 5.0), (40, 10.0)]
    assert curve.spread == 0.5
    assert Curve.of({10: [2.0]}) == Curve(points=[(10, 5.0)], spread=0.0)


def test_the_file_of_this_machine_plans(here: Hardware, tmp_path: Path) -> None:
    here.save(tmp_path / "mine.yaml")
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    shape = shape_of(config | {"intermediate_size": 128, "vocab_size": 100}, here.compute_dtype)
    profile = estimate(load_hardware(str(tmp_path / "mine.yaml")), shape, seq_len=32, micro_batches=[1])
    assert profile.hardware_id == here.hardware_id
    assert solve(profile, batch_size=2).plan.hardware_id == here.hardware_id


def test_without_a_folder_storage_is_null_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measuring.MATMUL_SIZES, "cpu", 64)
    monkeypatch.setattr(measuring, "UPDATED_SHAPE", (128, 128))
    found = measure_hardware(device="cpu", repeats=1)
    for figure in (found.nvme_bytes, found.nvme_read_bytes_per_s, found.nvme_write_bytes_per_s):
        assert figure == Figure(value=None, note="no --storage folder given")


def test_wrong_arguments_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="device: 'tpu'"):
        measure_hardware(device="tpu")
    with pytest.raises(UsageError, match="storage: absent"):
        measure_hardware(device="cpu", storage_dir="absent")
    with pytest.raises(UsageError, match="without a GPU nothing is page-locked"):
        measure_hardware(device="cpu", pin_limit_bytes=10**9)
