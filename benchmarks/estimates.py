"""Estimated step times beside measured ones: what ``solve --hardware h200`` says of the cases of ``step.json``.

    python benchmarks/estimates.py --machine "2 shared cores"
    python benchmarks/estimates.py --profile 7b.json --shape 7b     # variant by variant, nothing is saved

Nothing here needs a GPU: a case is estimated, solved for the budgets that it was measured with, and held against the
step that was measured. 7B and 14B at 8 k tokens and more are what the estimate's constants were read off; 3B is not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rows import make_row, save_rows
from step import CASES, SHAPES, Case

from lazysched.profiles.estimate import estimate
from lazysched.profiles.library_files import load_hardware
from lazysched.profiles.shapes import ModelShape, shape_of
from lazysched.schemas import Profile
from lazysched.solver import solve

OLD = {"3b_32x1k_20gb"}
"""Cases whose steps were measured before blocks were compiled."""
MEASURED = Path(__file__).parent / "results" / "step.json"


def main() -> None:
    """Compare every case that was measured and save the rows, or one profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="name of the machine that solves, shown beside each figure")
    parser.add_argument("--profile", type=Path, help="a profile of one H200 to compare with instead")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b", help="of the model in --profile")
    arguments = parser.parse_args()
    if arguments.profile is not None:
        compare_profile(Profile.load(arguments.profile), arguments.shape)
        return
    if arguments.machine is None:
        parser.error("--machine is needed to save rows")
    measured = {row["case"]: row["value"] for row in json.loads(MEASURED.read_text()) if row["metric"] == "step_s"}
    rows: list[dict[str, object]] = []
    for case in CASES:
        if case.name in measured.keys() - OLD and not case.resident:
            rows += compare_case(case, measured[case.name], arguments.machine)
    print(save_rows("estimates", rows))


def _shape(name: str) -> ModelShape:
    return shape_of({"model_type": "qwen2", **SHAPES[name]}, "bfloat16")


def compare_case(case: Case, measured_s: float, machine: str) -> list[dict[str, object]]:
    """Rows of one case."""
    profile = estimate(
        load_hardware("h200"), _shape(case.shape), seq_len=case.seq_len, micro_batches=case.micro_batches,
        loss_chunk_tokens=case.chunk_tokens,
    )  # fmt: skip
    step_s = solve(profile, batch_size=case.batch_size, gpu_memory_bytes=case.gpu_bytes).timeline.step_s
    ratio = step_s / measured_s
    print(f"{case.name:18} estimated {step_s:.3f} s, measured {measured_s:.3f} s: {ratio:.3f}", flush=True)
    figures = [
        ("estimated_step_s", step_s, "s"), ("measured_step_s", measured_s, "s"),
        ("estimated_over_measured", ratio, "1"),
    ]  # fmt: skip
    command = "python benchmarks/estimates.py"
    return [make_row(case.name, name, value, unit, machine, command) for name, value, unit in figures]


def compare_profile(measured: Profile, shape_name: str) -> None:
    """Print the estimate of every variant over its measurement."""
    sizes = sorted(next(iter(measured.variants.values())))
    estimated = estimate(
        load_hardware("h200"), _shape(shape_name), seq_len=measured.seq_len, micro_batches=sizes,
        loss_chunk_tokens=measured.loss_chunk_tokens,
    )  # fmt: skip
    assert estimated.stages == measured.stages, "the profile is of another shape"
    for structure, by_size in measured.variants.items():
        for size, variants in by_size.items():
            known = {variant.name: variant for variant in estimated.variants[structure][size]}
            for variant in variants:
                if variant.name in known:
                    ours = known[variant.name]
                    forward, backward = (
                        getattr(ours, kind).seconds / getattr(variant, kind).seconds for kind in ("forward", "backward")
                    )
                    saved = "" if not variant.saved_bytes else f", saved {ours.saved_bytes / variant.saved_bytes:.3f}"
                    print(f"{structure} {size} {variant.name}: forward {forward:.3f}, backward {backward:.3f}{saved}")


if __name__ == "__main__":
    main()
