"""Bad input to ``lazysched solve``: one line that names what is wrong, exit code 2, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazysched.cli import main
from lazysched.errors import UsageError
from lazysched.schemas import Profile
from lazysched.solver import solve
from lazysched.solver.batches import MAX_PASSES
from lazysched.solver.input_checks import MAX_BLOCKS
from tests.solver.synthetic import tiny_profile

Document = dict[str, Any]
HUGE = 10**400
"""No float holds it."""


def variant(profile: Document, structure: str = "block") -> Document:
    found: Document = profile["variants"][structure]["1"][0]
    return found


def block(profile: Document) -> Document:
    found: Document = profile["stages"][1]
    return found


def points(*values: tuple[float, float]) -> Callable[[Document], None]:
    return lambda profile: profile["links"]["h2d"].update(points=[list(point) for point in values])


def many_blocks(profile: Document) -> None:
    embed, first, *_, head = profile["stages"]
    profile["stages"] = [embed, *({**first, "id": f"block.{i}"} for i in range(10_000)), head]


def micro_batch(size: int) -> Callable[[Document], None]:
    def change(profile: Document) -> None:
        for by_size in profile["variants"].values():
            by_size[str(size)] = by_size.pop("1")

    return change


SPOILED: dict[str, tuple[Callable[[Document], Any], str]] = {
    "trained otherwise": (lambda p: p.update(trainable=["block.0"]), "trainable: block.0 is not what its stages train"),
    "trained nowhere": (lambda p: p.update(trainable=["zzz"]), "trainable: 'zzz' is in no parameter's name"),
    "no expression": (lambda p: p.update(trainable=["("]), "trainable: '(' is no regular expression"),
    "negative size": (lambda p: block(p).update(weight_bytes=-4), "stages.1.weight_bytes: is -4"),
    "negative saved size": (lambda p: variant(p)["saved"].update(input=-1), "variants.block.1.0.saved.input: is -1"),
    "negative context": (lambda p: p.update(context_bytes=-1), "context_bytes: is -1"),
    "negative free memory": (lambda p: p["free_bytes"].update(gpu=-5), "free_bytes.gpu: -5 is out of range"),
    "negative pin limit": (lambda p: p.update(pin_limit_bytes=-5), "pin_limit_bytes: -5 is out of range"),
    "zero bandwidth": (points((1, 0)), "links.h2d: points must have ascending sizes and positive rates"),
    "negative request": (points((-5, 1e9), (1, 1e9)), "links.h2d.points: -5 is out of range"),
    "unordered points": (points((2, 1e9), (1, 1e9)), "links.h2d: points must have ascending sizes"),
    "no points": (points(), "links.h2d: a curve without points needs a reason"),
    "next to no bandwidth": (points((1, 5e-324)), "links.h2d.points: 5e-324 is out of range"),
    "zero update rate": (lambda p: p["update"]["cpu"]["hybrid8"].update(per_s=0), "update.cpu.hybrid8.per_s: is 0"),
    "next to no update": (lambda p: p["update"]["gpu"]["hybrid8"].update(per_s=1e-300), "update.gpu.hybrid8: 1e-300"),
    "no links": (lambda p: p["links"].clear(), "links.h2d: not measured (missing)"),
    "no updates": (lambda p: p["update"].clear(), "update.cpu.hybrid8: not measured (missing)"),
    "missing block": (lambda p: p["stages"].pop(2), "stages.2: 'block.2' where 'block.1' should be"),
    "block twice": (lambda p: p["stages"].insert(1, block(p)), "stages.2: 'block.0' where 'block.1' should be"),
    "blocks out of order": (lambda p: p["stages"].insert(1, p["stages"].pop(2)), "stages.1: 'block.1' where 'block.0'"),
    "odd id": (lambda p: block(p).update(id="block.x"), "stages.1: 'block.x' where 'block.0' should be"),
    "no blocks": (lambda p: p.update(stages=p["stages"][::4]), "stages.1: 'head' where 'block.0' should be"),
    "no stages": (lambda p: p.update(stages=[]), "stages.0: 'nothing' where 'embed' should be"),
    "no head": (lambda p: p["stages"].pop(), "stages.3: 'block.2' where 'head' should be"),
    "no embedding": (lambda p: p["stages"].pop(0), "stages.0: 'block.0' where 'embed' should be"),
    "too many blocks": (many_blocks, f"stages: 10000 blocks are too many, {MAX_BLOCKS} at most"),
    "NaN time": (lambda p: variant(p)["forward"].update(median_s=float("nan")), "forward.median_s: is nan"),
    "infinite time": (lambda p: variant(p)["backward"].update(median_s=float("inf")), "backward.median_s: is inf"),
    "NaN size": (lambda p: block(p).update(weight_bytes=float("nan")), "stages.1.weight_bytes: is nan"),
    "infinite rate": (points((1, float("inf"))), "links.h2d.points.0.1: is inf"),
    "absurd time": (lambda p: variant(p)["forward"].update(median_s=1e300), "variants.block.1.all.forward: 1e+300"),
    "negative time": (lambda p: variant(p)["forward"].update(median_s=-1), "forward.median_s: is -1"),
    "absurd weights": (lambda p: block(p).update(weight_bytes=HUGE), "stages.block.0.weight_bytes: 1e400 or more"),
    "absurd saved size": (lambda p: variant(p)["saved"].update(rest=HUGE), "block.1.all.saved.rest: 1e400 or more"),
    "absurd memory": (lambda p: p["free_bytes"].update(gpu=HUGE), "free_bytes.gpu: 1e400 or more"),
    "absurd row": (lambda p: p.update(seq_len=10**18), "seq_len: 1000000000000000000 is out of range"),
    "no parameters": (lambda p: block(p).update(params={}, weight_bytes=0), "stages.block.0.params: no parameters"),
    "empty parameter": (lambda p: block(p).update(params={"w": [0, 4]}), "stages.block.0.params.w: [0, 4] is no shape"),
    "negative shape": (lambda p: block(p).update(params={"w": [-3, 4]}), "stages.block.0.params.w: [-3, 4]"),
    "too few bytes": (lambda p: block(p).update(weight_bytes=8), "stages.block.0.weight_bytes: 8 is not from 4000000"),
    "micro-batch 0": (micro_batch(0), "is '0': Input should be greater than or equal to 1"),
    "micro-batch 1e30": (micro_batch(10**30), "micro-batch: 1e30 or more is out of range"),
    "no variants": (lambda p: p["variants"].pop("block"), "variants.block: missing"),
    "a variant twice": (lambda p: p["variants"]["block"]["1"].append(variant(p)), "variants.block.1.all: there twice"),
    "no block input": (lambda p: variant(p)["saved"].pop("input"), "variants.block.1.all.saved.input: missing or 0"),
    "shares nothing": (lambda p: p["stages"][-1].update(shares="x"), "stages.head.shares: 'x'"),
    "a block that shares": (lambda p: block(p).update(shares="embed"), "stages.block.0.shares: 'embed'"),
}


@pytest.fixture
def document() -> Document:
    found: Document = json.loads(tiny_profile(3).model_dump_json())
    return found


def run(document: Document, folder: Path, *options: str) -> int:
    path = folder / "profile.json"
    path.write_text(json.dumps(document))
    arguments = options if "--batch-size" in options else ("--batch-size", "1", *options)
    return main(["solve", str(path), "-o", str(folder / "plan.json"), *arguments])


def check_refused(code: int, folder: Path, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert expected in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (folder / "plan.json").exists()


def test_what_is_spoiled_here_is_fine_otherwise(document: Document, tmp_path: Path) -> None:
    assert run(document, tmp_path) == 0


@pytest.mark.parametrize("name", SPOILED)
def test_profiles(name: str, document: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, expected = SPOILED[name]
    spoil(document)
    check_refused(run(document, tmp_path), tmp_path, expected, capsys)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gap", "1"], "gap: 1: use a share from 0 up to but not including 1"),
        (["--gap", "-0.1"], "--gap"),
        (["--gap", "nan"], "--gap"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--time-limit", "0"], "time_limit_s: 0: "),
        (["--time-limit", "nan"], "--time-limit"),
        (["--seed", "99999999999"], "seed: 99999999999: use a number from 0 to 2147483647"),
        (["--gpu-memory", "0"], "gpu_memory: 0 bytes is no budget"),
        (["--gpu-memory", "-3GB"], "--gpu-memory: '-3GB' is not a size"),
        (["--host-memory", "5000000000TB"], "host_memory: 1e21 or more bytes is no budget"),
        (["--host-memory", "9" * 400 + "GB"], "--host-memory"),
        (["--max-grad-norm", "nan"], "--max-grad-norm"),
        (["--batch-size", "0"], "--batch-size"),
        (["--batch-size", "1000000000"], f"batch_size: 1000000000 is 1000000000 micro-batches of 1 rows, a step of "
         f"this model has {MAX_PASSES // 5} at most; use at most {MAX_PASSES // 5} or profile a larger --micro-batch"),
        (["--batch-size", "1" + "0" * 30], "--batch-size: '1000000000000000000000000000000' is no number of rows"),
    ],
)  # fmt: skip
def test_options(
    options: list[str], expected: str, document: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(run(document, tmp_path, *options), tmp_path, expected, capsys)


@pytest.mark.parametrize(("limit", "statuses"), [("0.01", {"feasible", "optimal"}), ("inf", {"optimal"})])
def test_odd_time_limits_that_are_fine(limit: str, statuses: set[str], document: Document, tmp_path: Path) -> None:
    assert run(document, tmp_path, "--time-limit", limit) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["solver"]["status"] in statuses
    assert (plan["solver"]["status"] == "optimal") == (plan["solver"]["gap"] <= 0.01)


def test_the_python_function_refuses_the_same() -> None:
    profile = tiny_profile(3)
    stages = [*profile.stages[:2], *profile.stages[3:]]
    with pytest.raises(UsageError, match=r"stages\.2: 'block\.2' where 'block\.1' should be"):
        solve(Profile.model_validate({**profile.model_dump(), "stages": stages}), batch_size=1)
    for name in ("time_limit_s", "gap", "max_grad_norm"):
        with pytest.raises(UsageError, match=f"{name}: nan"):
            solve(profile, **{"batch_size": 1, name: float("nan")})
