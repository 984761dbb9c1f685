"""Time and quality of the solver on synthetic profiles; nothing here needs a GPU.

    python benchmarks/solver.py --machine "2 shared cores"               everything
    python benchmarks/solver.py --machine "2 shared cores" --case L28    one model size; ``all`` is made anew
    python benchmarks/solver.py --machine "2 shared cores" --case random --instances 10000 --minutes 8

Profiles are those of ``tests/solver/synthetic.py``: Qwen2-like models of 28 to 128 blocks on a fast GPU (H200-like)
with loose, middle and tight memory, 32 rows of 1024 tokens a step. Per model size, over the three memory sizes:
``solve_s`` is the median of one solve of the program, its start included, which takes ``start_s``; ``gap`` and
``search_s`` are the worst of the whole search, ``gain_over_best_recipe`` the least, ``simulator_error`` the largest.
Shares are fractions of 1. These are of plans that the runtime executes; figures that begin with ``full_`` are of the
program with segments of blocks and files, to which all recipes belong. Gains of either are over all recipes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rows import RESULTS, make_row, save_rows
from solver_peers import SETS, Checked, Selection, beside_square_root_rule, check_instances, select_checkpoints
from solver_placement import GAP, Measured, Task, measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.solver.synthetic import FAST, SHAPE_3B, SHAPE_7B, Shape, curve, large_profile

GB = 10**9
SOLVE_LIMIT_S, SEARCH_LIMIT_S = 20.0, 50.0
"""One solve stops there without its gap; the search may go on for its last part when its limit is over."""
MEMORIES = ("loose", "middle", "tight")
SCOPES = ("", "full_")
"""What the runtime executes, and everything."""
NVME_GB, NVME_READ_BYTES_PER_S, NVME_WRITE_BYTES_PER_S = 2000, 6e9, 5e9
"""Files of the machine, after data sheets of PCIe 4 drives."""


@dataclass(frozen=True)
class Case:
    """A model, rows a step, and GPU budgets in GB, loose to tight."""

    shape: Shape
    num_blocks: int
    gpu_gb: tuple[int, ...]
    batch_size: int = 32
    host_gb: int = 1000


CASES = {
    "L28": Case(SHAPE_7B, 28, (139, 80, 24)),
    "L36": Case(SHAPE_3B, 36, (80, 40, 20)),
    "L64": Case(Shape(5120, 17408, 1024, 151_936, tied=False), 64, (139, 80, 24)),
    "L80": Case(Shape(8192, 28672, 1024, 128_256, tied=False), 80, (139, 80, 40)),
    "L128": Case(Shape(8192, 22016, 1024, 128_256, tied=False), 128, (139, 80, 40)),
}
SMOKE = Case(SHAPE_3B, 3, (30, 20, 16), batch_size=2)
PEERS, RANDOM = "checkpoint_selection", "random"
Figure = tuple[str, float | None, str]


def main() -> None:
    """Measure what was asked for, save its rows and show tables."""
    options = _arguments()
    console = Console(width=150)
    if options.smoke:
        _show_case(console, "smoke", _measure_case(SMOKE, 5, 5))
        _show_instances(console, check_instances(4, 1))
        _show_selection(console, "dynamic program", select_checkpoints(4, "two options"))
        _show_selection(console, "square-root rule", [beside_square_root_rule(4, "two options")])
        return
    for name in [options.case] if options.case else [*CASES, PEERS, RANDOM]:
        figures = _figures(name, options, console)
        _save(name, figures, options)
    _save("all", _worst(options.machine), options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="name of the machine that solves, shown beside each figure")
    parser.add_argument("--case", choices=[*CASES, PEERS, RANDOM], help="only this one")
    parser.add_argument("--instances", type=int, default=10_000, help="random instances, if the time suffices")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for the random instances")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, nothing saved")
    options = parser.parse_args()
    if not options.smoke and not options.machine:
        parser.error("--machine: missing; name the machine that solves")
    return options


def _figures(name: str, options: argparse.Namespace, console: Console) -> list[Figure]:
    """Measure one case, show it, and give what is to be saved."""
    if name == PEERS:
        pairs = [(kind, length) for kind in SETS for length in (28, 64)]
        found = [s for kind, length in pairs for s in select_checkpoints(length, kind)]
        _show_selection(console, "dynamic program", found)
        beside_rule = [beside_square_root_rule(length, kind) for kind, length in pairs]
        _show_selection(console, "square-root rule", beside_rule)
        return _selection_figures("dynamic_program", found) + _selection_figures("square_root_rule", beside_rule)
    if name == RANDOM:
        checked = check_instances(options.instances, options.minutes)
        _show_instances(console, checked)
        return [
            ("instances_solved", checked.solved, ""), ("instances_that_fit_nowhere", checked.infeasible, ""),
            ("broken_promises", len(checked.broken), ""),
        ]  # fmt: skip
    measured = _measure_case(CASES[name], SOLVE_LIMIT_S, SEARCH_LIMIT_S)
    _show_case(console, name, measured)
    return _case_figures(measured)


def _measure_case(case: Case, solve_limit_s: float, search_limit_s: float) -> dict[str, dict[str, Measured]]:
    """Scope -> memory -> figures."""
    plain = large_profile(case.shape, FAST, case.num_blocks)
    files = {"nvme_read": curve(NVME_READ_BYTES_PER_S), "nvme_write": curve(NVME_WRITE_BYTES_PER_S)}
    profile = plain.model_copy(update={"links": {**plain.links, **files}})
    return {
        scope: {
            memory: measure(
                Task(
                    profile, case.batch_size, gpu_gb * GB, case.host_gb * GB, NVME_GB * GB, solve_limit_s,
                    search_limit_s, everything=bool(scope),
                )
            )
            for memory, gpu_gb in zip(MEMORIES, case.gpu_gb, strict=True)
        }
        for scope in SCOPES
    }  # fmt: skip


def _case_figures(measured: dict[str, dict[str, Measured]]) -> list[Figure]:
    recipes_s = {memory: m.recipes_s for memory, m in measured[SCOPES[-1]].items()}
    figures: list[Figure] = []
    for scope, by_memory in measured.items():
        every = list(by_memory.values())
        figures += [
            (f"{scope}solve_s", statistics.median(m.solve_s for m in every), "s"),
            (f"{scope}start_s", statistics.median(m.start_s for m in every), "s"),
            (f"{scope}solve_gap", _finite(max(m.solve_gap for m in every)), ""),
            (f"{scope}gap", max(m.search_gap for m in every), ""),
            (f"{scope}search_s", max(m.search_s for m in every), "s"),
            (
                f"{scope}gain_over_best_recipe",
                _finite(min(m.gain(recipes_s[memory]) for memory, m in by_memory.items())),
                "",
            ),
            (f"{scope}simulator_error", max(m.worst_error for m in every), ""),
            (f"{scope}least_memory_margin", min(m.memory_margin_bytes for m in every), "bytes"),
        ]
        for memory, m in by_memory.items():
            figures += [
                (f"{scope}{memory}_solve_s", m.solve_s, "s"),
                (f"{scope}{memory}_start_s", m.start_s, "s"),
                (f"{scope}{memory}_solve_gap", _finite(m.solve_gap), ""),
                (f"{scope}{memory}_search_s", m.search_s, "s"), (f"{scope}{memory}_gap", m.search_gap, ""),
                (f"{scope}{memory}_step_s", m.step_s, "s"),
                (f"{scope}{memory}_simulator_error", m.worst_error, ""),
            ]  # fmt: skip
            gains = m.gains(recipes_s[memory])
            figures += [(f"{scope}{memory}_gain_over {recipe}", gain, "") for recipe, gain in gains.items()]
    return figures


def _selection_figures(peer: str, found: list[Selection]) -> list[Figure]:
    return [
        (f"worst_over_{peer}, {kind}", max(s.ours_s / s.peer_s - 1 for s in found if s.options == kind), "")
        for kind in SETS
    ]


def _worst(machine: str) -> list[Figure]:
    """Over all model sizes whose rows are saved by the same machine; null until every one is."""
    rows = json.loads((RESULTS / "solver.json").read_text(encoding="utf-8"))

    def saved(metric: str) -> list[float]:
        own = [r["value"] for r in rows if r["case"] in CASES and r["metric"] == metric and r["machine"] == machine]
        return own if len(own) == len(CASES) and None not in own else []

    figures: list[Figure] = []
    for scope in SCOPES:
        figures += [
            (f"{scope}worst_gain_over_best_recipe", min(saved(f"{scope}gain_over_best_recipe"), default=None), ""),
            (f"{scope}worst_simulator_error", max(saved(f"{scope}simulator_error"), default=None), ""),
            (f"{scope}least_memory_margin", min(saved(f"{scope}least_memory_margin"), default=None), "bytes"),
        ]
    return figures


def _save(case: str, figures: list[Figure], options: argparse.Namespace) -> None:
    command = "python benchmarks/solver.py" + (f" --case {case}" if case != "all" else "")
    if case == RANDOM:
        command += f" --instances {options.instances} --minutes {options.minutes:g}"
    save_rows("solver", [make_row(case, name, value, unit, options.machine, command) for name, value, unit in figures])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- tables


def _show_case(console: Console, name: str, measured: dict[str, dict[str, Measured]]) -> None:
    for scope, by_memory in measured.items():
        _show_solves(console, f"{name}, {'segments and files too' if scope else 'what is executed'}", by_memory)
        recipes_s = {memory: m.recipes_s for memory, m in measured[SCOPES[-1]].items()}
        _show_gains(console, by_memory, recipes_s)


def _show_solves(console: Console, title: str, measured: dict[str, Measured]) -> None:
    table = Table(title=f"{title}: one solve to {GAP:.0%}, and the search", title_justify="left")
    for column in (
        "memory", "one solve", "its gap", "search", "its gap", "step", "program over simulator", "memory margin",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for memory, m in measured.items():
        table.add_row(
            memory, f"{m.solve_s:.1f} s", f"{m.solve_gap:.2%}", f"{m.search_s:.1f} s", f"{m.search_gap:.2%}",
            f"{m.step_s:.3f} s", " ".join(f"{error:+.2%}" for error in m.errors),
            f"{m.memory_margin_bytes / 1e6:.1f} MB",
        )  # fmt: skip
    console.print(table)


def _show_gains(console: Console, measured: dict[str, Measured], recipes_s: dict[str, dict[str, float | None]]) -> None:
    gains = {memory: m.gains(recipes_s[memory]) for memory, m in measured.items()}
    table = Table(title="gain over each recipe", title_justify="left")
    table.add_column("recipe")
    for memory in gains:
        table.add_column(memory, justify="right")
    for recipe in next(iter(gains.values())):
        found = [of_memory.get(recipe) for of_memory in gains.values()]
        table.add_row(recipe, *("does not fit" if gain is None else f"{gain:+.2%}" for gain in found))
    console.print(table)


def _show_instances(console: Console, checked: Checked) -> None:
    console.print(
        f"random instances: {checked.solved} solved, {checked.infeasible} without any plan that fits, "
        f"{len(checked.broken)} broken promises"
    )
    for line in checked.broken:
        console.print(line, markup=False)


def _show_selection(console: Console, peer: str, found: list[Selection]) -> None:
    table = Table(title="checkpoint selection: seconds recomputed", title_justify="left")
    for column in ("options", "blocks", "memory", "lazysched", peer):
        table.add_column(column, justify="right")
    for s in found:
        table.add_row(s.options, str(s.num_blocks), f"{s.kept_bytes / GB:.2f} GB", f"{s.ours_s:.5f}", f"{s.peer_s:.5f}")
    console.print(table)


if __name__ == "__main__":
    main()
