"""Documents: round trips, and one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazysched.errors import UsageError
from lazysched.schemas import Curve, Plan, Profile, SaveVariant, Stage, StagePlan, Timing
from lazysched.units import format_bytes, format_seconds, format_slice, parse_bytes, parse_slice
from tests.packaging.test_cli import PLAN, PROFILE


@pytest.mark.parametrize("name", ["profile.json", "profile.yaml"])
def test_a_profile_reads_back_as_it_was(tmp_path: Path, name: str) -> None:
    PROFILE.save(tmp_path / name)
    assert Profile.load(tmp_path / name) == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_plan_reads_back_as_it_was(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_a_plan_without_newer_fields_means_what_it_did(tmp_path: Path) -> None:
    data = json.loads(PLAN.model_dump_json())
    del data["fp32_state_elements"], data["update"]["check_finite"], data["host_memory"], data["pins"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert PLAN.update.waits_for_norm
    assert StagePlan(weights="gpu", state="gpu").state_format == "fp32"


def edited(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.model_dump_json()) | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 9}, "version: 9 is not supported"),
        ({"micro_batch": 0}, "micro_batch: is 0: .*greater than or equal to 1"),
        ({"batch_size": 12345}, r"plan\.json: batch_size must be micro_batch \* accumulation \* world_size"),
        ({"spelling": 1}, "spelling: unknown key"),
        ({"host_memory": "mapped"}, "host_memory: is 'mapped': .*'pinned' or 'pageable'"),
        ({"fp32_state_elements": -1}, "fp32_state_elements: is -1: .*greater than or equal to 0"),
        ({"update": {"check_finite": False}}, "update: check_finite false needs clip_norm null"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Plan.load(edited(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_document_of_another_kind_is_recognised(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "a.json")
    PLAN.save(tmp_path / "b.json")
    with pytest.raises(UsageError, match="is a profile, not a plan"):
        Plan.load(tmp_path / "a.json")
    with pytest.raises(UsageError, match="is a plan, not a profile"):
        Profile.load(tmp_path / "b.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_what_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json"):
        Plan.load(path)


def test_a_link_stays_a_link_and_a_folder_is_no_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("")
    link.symlink_to(real)
    PLAN.save(link)
    assert link.is_symlink()
    assert Plan.load(real) == PLAN
    with pytest.raises(UsageError, match="is no file"):
        PLAN.save(tmp_path)


def test_gpu_state_needs_gpu_weights() -> None:
    stages = PLAN.stages | {"embed": StagePlan(weights="host", state="gpu")}
    with pytest.raises(UsageError, match="state on gpu needs weights on gpu"):
        Plan.check(json.loads(PLAN.model_dump_json()) | {"stages": {k: v.model_dump() for k, v in stages.items()}}, "x")


def test_a_null_figure_needs_its_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Timing(median_s=None)
    assert Timing(median_s=None, reason="no GPU").reason == "no GPU"


def test_noisy_figures_are_told() -> None:
    assert PROFILE.doubts() == []
    noisy = Timing(median_s=1.0, spread_s=0.5, repeats=3)
    quiet = noisy.model_copy(update={"spread_s": 0.1})
    variant = SaveVariant(
        name="all", saved={}, forward=noisy, backward=quiet, working_forward_bytes=0, working_backward_bytes=0
    )
    (line,) = PROFILE.model_copy(update={"variants": {"block": {1: [variant]}}}).doubts()
    assert line.startswith("1 of ")


def test_a_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    curve = Curve(points=[(10, 100.0), (20, 200.0)])
    assert [curve.rate_bytes_per_s(size) for size in (1, 10, 15, 20, 99)] == [100.0, 100.0, 150.0, 200.0, 200.0]
    assert curve.seconds(20) == pytest.approx(0.1)
    assert curve.seconds(0) == 0.0


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("0", 0), ("512 kB", 512_000), ("7b", 7)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "1 XB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory: "):
        parse_bytes(text, "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("3:5", [3, 4]),
        (":2", [0, 1]),
        ("8:", [8, 9]),
        ("-2:", [8, 9]),
        ("0:9:4", [0, 4, 8]),
        ("12:", []),
        (":", [*range(10)]),
    ],
)
def test_ranges(text: str, steps: list[int]) -> None:
    chosen = parse_slice(text)
    assert [*range(10)[chosen]] == steps
    assert parse_slice(format_slice(chosen)) == chosen


@pytest.mark.parametrize("text", ["3", "", "a:b", "1:2:3:4", "1.5:2", "3:1:0", "5:1:-1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--trace-steps: "):
        parse_slice(text, "--trace-steps")


def test_figures_for_people() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 24e9, -3e6)] == ["0 B", "999 B", "1.5 kB", "24 GB", "-3 MB"]
    assert [format_seconds(time) for time in (2.0, 0.0304, 1.5e-5)] == ["2 s", "30.4 ms", "15 µs"]


def test_files_from_before_parameters_could_be_frozen_train_everything() -> None:
    described = {"id": "block.0", "structure": "B", "params": {"w": (2, 3), "b": (3,)}, "weight_bytes": 512}
    for stage in (Stage.model_validate(described), Stage.model_validate({**described, "trainable": True})):
        assert (stage.trainable, stage.num_trained, stage.is_trained) == (True, 9, True)
    part = Stage.model_validate({**described, "trainable": ["b"]})
    assert Stage.model_validate_json(part.model_dump_json()) == part
    assert (part.trained_params, part.num_trained, part.num_params) == ({"b": (3,)}, 3, 9)
    with pytest.raises(ValueError, match="'c' is none of the stage's parameters"):
        Stage.model_validate({**described, "trainable": ["c"]})
