"""One model size at one memory size: the program solved once, the whole search, and both against the simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lazysched.schemas import Plan, Profile, Update
from lazysched.solver import Solution, simulate_plan, solve
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.explore import best_descent
from lazysched.solver.instance import Candidate, Instance
from lazysched.solver.measured import offload_limits
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EVERYTHING, EXECUTABLE, STATE_CHOICES, Scope
from lazysched.solver.plans import Choices, block_plan, make_plan, stage_plan, transferred
from lazysched.solver.window_replay import WindowReplay

GAP, SEED = 0.01, 0
MARGIN = 1e-3
"""Of the gap, which a start is to keep: the objective has more than the step, and is a little apart from it."""
UNLIMITED = Budgets(1e6, 1e6, nvme_gb=1e6)


@dataclass(frozen=True)
class Task:
    """What is solved: a profile, rows a step and budgets in bytes; seconds that solver and search may take.

    Attributes:
        nvme_bytes: of files, which only plans that no runtime executes yet may use.
        everything: whether such plans, with files and segments of blocks, are looked for.
    """

    profile: Profile
    batch_size: int
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int
    solve_limit_s: float
    search_limit_s: float
    everything: bool

    @property
    def scope(self) -> Scope:
        """Tiers and segments that plans may have."""
        return EVERYTHING if self.everything else EXECUTABLE


@dataclass(frozen=True)
class Measured:
    """Figures of one task.

    Attributes:
        solve_s: making a start, building, relaxing and solving the program once; the last as long as allowed where its
            gap was not reached.
        solve_gap: what was reached.
        start_s: what of it went into making its start, by the search's descents.
        search_s: the whole search.
        search_gap: reported by it.
        step_s: of its plan, simulated.
        recipes_s: recipe -> its step, simulated; None where it does not fit.
        errors: program's period over simulated step, less 1, for the program's choices and for the search's plan.
        memory_margin_bytes: least of what program or plan predict beyond the simulator's GPU peak; never negative.
    """

    solve_s: float
    solve_gap: float
    start_s: float
    search_s: float
    search_gap: float
    step_s: float
    recipes_s: dict[str, float | None]
    errors: list[float]
    memory_margin_bytes: float

    @property
    def worst_error(self) -> float:
        """Largest of ``errors`` either way."""
        return max(map(abs, self.errors))

    def gains(self, recipes_s: Mapping[str, float | None]) -> dict[str, float | None]:
        """Recipe -> its step over this plan's, less 1; None where it does not fit."""
        return {name: step_s and _gain(step_s, self.step_s) for name, step_s in recipes_s.items()}

    def gain(self, recipes_s: Mapping[str, float | None]) -> float:
        """Over the best of the recipes that fit; infinite where none does."""
        return min((gain for gain in self.gains(recipes_s).values() if gain is not None), default=math.inf)


def _gain(recipe_s: float, plan_s: float) -> float:
    """Steps that the simulator added up in another order, so that only rounding tells them apart, are equal."""
    return 0.0 if math.isclose(recipe_s, plan_s, rel_tol=1e-12) else recipe_s / plan_s - 1


def measure(task: Task) -> Measured:
    """Search first; then solve the program once, where the search found its best plan, at prefetch depth 1."""
    began_s = time.perf_counter()
    solution = solve(
        task.profile, batch_size=task.batch_size, gpu_memory_bytes=task.gpu_bytes, host_memory_bytes=task.host_bytes,
        nvme_bytes=task.nvme_bytes if task.everything else 0, executable_only=not task.everything,
        time_limit_s=task.search_limit_s, gap=GAP, seed=SEED,
    )  # fmt: skip
    search_s = time.perf_counter() - began_s
    report = solution.plan.solver
    assert report is not None
    once = _solve_once(task, replace(_best_candidate(solution), prefetch_depth=1))
    found = _found_instance(task, solution.plan)
    of_plan = _compared(found, choices_of(found, solution.plan))
    compared = [of_plan] if once.compared is None else [once.compared, of_plan]
    recipes_s = {recipe.name: recipe.timeline and recipe.timeline.step_s for recipe in solution.recipes}
    return Measured(
        once.seconds, once.gap, once.start_s, search_s, report.gap, solution.timeline.step_s, recipes_s,
        [pair[0] for pair in compared], min(pair[1] for pair in compared),
    )  # fmt: skip


@dataclass(frozen=True)
class _Once:
    seconds: float
    gap: float
    start_s: float
    compared: tuple[float, float] | None


def _solve_once(task: Task, candidate: Candidate) -> _Once:
    instance = Instance(task.profile, candidate, "hybrid8", Update(), (), task.scope)
    nvme_gb = task.nvme_bytes / 1e9 if task.everything else 0.0
    budgets = Budgets(instance.usable_gpu_gb(task.gpu_bytes), task.host_bytes / 1e9, nvme_gb=nvme_gb)
    began_s = time.perf_counter()
    start, start_s, program = _start(task, instance, budgets)
    if task.everything:
        program = PlacementProgram(instance, budgets)
    outcome = program.solve(gap=GAP, time_limit_s=task.solve_limit_s, seed=SEED, start=start)
    seconds = time.perf_counter() - began_s
    if not outcome.has_solution:
        return _Once(seconds, math.inf, start_s, None)
    gap = (outcome.objective - outcome.bound) / outcome.objective
    return _Once(seconds, gap, start_s, _compared(instance, program.choices()))


def _start(task: Task, instance: Instance, budgets: Budgets) -> tuple[Choices | None, float, PlacementProgram]:
    """As in the search: the best of descents among what is executed, from the relaxation there.

    Its seconds and the program of what is executed come with it.
    """
    began_s = time.perf_counter()
    executed = Instance(task.profile, replace(instance.candidate, segments=(1,)), "hybrid8", Update())
    program = PlacementProgram(executed, budgets)
    relaxed_s = program.lower_bound_s(task.solve_limit_s)
    found = best_descent(program, budgets, relaxed_s * (1 + GAP - MARGIN)) if relaxed_s < math.inf else None
    start = found and transferred(found.choices, executed, instance)
    return start, time.perf_counter() - began_s, program


def _compared(instance: Instance, choices: Choices) -> tuple[float, float]:
    """(relative error of the program's period, predicted GPU peak less the simulator's in bytes) for given choices."""
    timeline = simulate_plan(make_plan(instance, choices, budget_bytes={}), instance.profile, steps=4)
    predicted_gb = float(WindowReplay(instance).memory(ChoiceBatch.of([choices])).gpu_gb[0])
    predicted_bytes = predicted_gb * 1e9 - instance.usable_gpu_gb(0) * 1e9
    error = _period_s(instance, choices) / timeline.step_s - 1
    return error, round(predicted_bytes) - timeline.peak_bytes["gpu"]


def _period_s(instance: Instance, choices: Choices) -> float:
    """The program's period with all decisions given."""
    program = PlacementProgram(instance, UNLIMITED)
    values = program.decisions.start_values(choices)
    for variable in program.problem.variables():
        if variable.name in values:
            variable.lowBound = variable.upBound = values[variable.name]
    outcome = program.solve(gap=0.0, time_limit_s=60, seed=SEED)
    assert outcome.has_solution, outcome
    return float(program.period.value())


def _best_candidate(solution: Solution) -> Candidate:
    found = [(tried.step_s, k) for k, tried in enumerate(solution.tried) if tried.step_s is not None]
    return solution.tried[min(found)[1]].candidate


def _found_instance(task: Task, plan: Plan) -> Instance:
    """The instance of which ``plan`` is a choice, with the smallest size that may leave for the host."""
    segments = tuple(sorted({1, *(choice.segment for choice in plan.stages.values())}))
    for limit in offload_limits(task.profile, plan.micro_batch):
        candidate = Candidate(
            plan.micro_batch, plan.accumulation, plan.prefetch_depth, plan.d2h_lag, limit, plan.host_memory, segments
        )
        instance = Instance(task.profile, candidate, "hybrid8", plan.update, (), task.scope)
        if all(None not in _options(instance, plan, i) for i in range(instance.num_blocks)):
            return instance
    raise AssertionError("a plan with options that no instance has")


def _options(instance: Instance, plan: Plan, block: int) -> list[int | None]:
    """Place of the block's save option among the instance's, None where it has none such."""
    own = plan.stages[instance.block_stages[block].id]
    fields = ("save", "saved_tiers", "input_tier", "segment")
    made = [block_plan("gpu", option) for option in instance.saves[block]]
    places = [k for k, other in enumerate(made) if all(getattr(other, f) == getattr(own, f) for f in fields)]
    return [places[0] if places else None]


def choices_of(instance: Instance, plan: Plan) -> Choices:
    """The choices that :func:`make_plan` made ``plan`` of."""
    saves, states = [], []
    for i, stage in enumerate(instance.block_stages):
        (place,) = _options(instance, plan, i)
        assert place is not None
        saves.append(place)
        own = plan.stages[stage.id]
        states.append(next(s for s in STATE_CHOICES if _same(stage_plan(s, own.save), own)))
    pair = plan.stages["embed"], plan.stages["head"]
    vocabulary = next(
        k for k, option in enumerate(instance.vocabulary_options)
        if _same(stage_plan(option.embed, ""), pair[0]) and _same(stage_plan(option.head, ""), pair[1])
    )  # fmt: skip
    return Choices(tuple(states), tuple(saves), vocabulary)


def _same(made: object, own: object) -> bool:
    return all(getattr(made, field) == getattr(own, field) for field in ("weights", "state"))
