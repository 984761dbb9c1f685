"""``solve``: from a profile to the fastest plan that fits.

Micro-batch, the size that a block may send to the host, prefetch depth and D2H lag are searched outside the integer
program, as is whether host memory is page-locked where that is limited:

1. every combination of the first two gets a quick lower bound (``bounds``); recipes give the first incumbent;
2. combinations whose bound leaves room are explored, with one depth and lag (``explore``);
3. the best plan is tried with every other depth and lag;
4. the program of the best plan is solved from that plan;
5. the lowest bound is raised, by relaxing and at last solving the program of that combination, depth and lag, until
   none can beat the best plan by more than the gap, or time is up;
6. the finalists are lowered and simulated; the fastest that keeps its budgets in the simulation is the plan.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, get_args

from lazysched.errors import UsageError
from lazysched.lower import lower
from lazysched.schemas import HostMemory, Plan, Profile, SolverReport, StateFormat, Tier, Update
from lazysched.solver import infeasible, recipes, remedies
from lazysched.solver.batches import accumulations
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.explore import (
    FIRST_DEPTH,
    FIRST_LAG,
    PREFETCH_DEPTHS,
    Task,
    explore_all,
    polished,
    shallowest,
    variations,
)
from lazysched.solver.input_checks import check_arguments, check_file_links, check_model
from lazysched.solver.instance import (
    Candidate,
    Instance,
    check_profile,
    host_memories,
    offload_limits,
)
from lazysched.solver.interrupts import INTERRUPTS
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EVERYTHING, EXECUTABLE, Scope
from lazysched.solver.pins import Pin, parse_pins
from lazysched.solver.plans import Choices, make_plan
from lazysched.solver.recipes import Found, Recipe
from lazysched.solver.simulate import Timeline, simulate
from lazysched.solver.window_replay import ChoiceBatch, WindowReplay

ROUND = 4
"""Combinations that are explored against the same incumbent, so that the number of cores changes no plan."""
NUM_FINALISTS = 4
"""Plans that are simulated at most."""
UNPLANNED_BYTES: dict[Tier, int] = {"gpu": 5 * 10**8, "host": 8 * 10**9}
"""Left out of what was free when that is the budget: beside a plan's buffers the driver takes some of the GPU for what
is page-locked and loaded later, and the process some of the host for libraries, compiler workers and data."""
SIMULATED_STEPS = 4
MAX_TIGHTENINGS = 3
"""How often budgets are tightened when the simulation disagrees with the memory rows."""
Budget = Literal["gpu", "host", "nvme", "pinned"]
"""What limits a plan: memory of the tiers, and how much of the host's can be page-locked."""
MIN_PROOF_S, PROOF_SHARE = 2.0, 0.5
"""Time for the proof: at least the first, otherwise this share of what the search before it took."""


@dataclass(frozen=True)
class Tried:
    """One combination of the outer search.

    Attributes:
        candidate: micro-batch, accumulation, prefetch depth, D2H lag, size that may be sent to the host and kind of
            its memory.
        bound_s: no plan of it is faster; infinite when none fits.
        step_s: of its best plan found, by the window replay; None when it was left out.
    """

    candidate: Candidate
    bound_s: float
    step_s: float | None = None


@dataclass(frozen=True)
class Solution:
    """What ``solve`` found.

    Attributes:
        plan: the schedule, with prediction and solver report.
        timeline: its simulation.
        recipes: fixed recipes on the same budgets, simulated.
        tried: all combinations of the outer search, best bound first.
        interrupted: whether Ctrl-C ended the search, so that the plan is the best of a part of it.
    """

    plan: Plan
    timeline: Timeline
    recipes: list[Recipe]
    tried: list[Tried]
    interrupted: bool = False


def solve(
    profile: Profile,
    *,
    batch_size: int,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    nvme_bytes: int = 0,
    executable_only: bool = True,
    pins: Sequence[str] = (),
    max_grad_norm: float | None = 1.0,
    check_finite: bool = True,
    optimizer_state: StateFormat = "hybrid8",
    time_limit_s: float = 30.0,
    gap: float = 0.01,
    seed: int = 0,
) -> Solution:
    """Find the fastest plan for ``batch_size`` rows a step within the memory budgets.

    Where the profile's ``pin_limit_bytes`` is below the host's budget, a plan page-locks no more than that, or nothing.

    Args:
        profile: measurements of model and machine.
        batch_size: rows of one step; micro-batches of the profile that divide it are considered.
        gpu_memory_bytes: budget, driver context included; None: what was free, beside a GPU less 0.5 GB.
        host_memory_bytes: likewise for the host; None: what was free, beside a GPU less 8 GB.
        nvme_bytes: budget of files; 0 keeps everything out of them.
        executable_only: with False also plans that no runtime executes yet, to look at.
        pins: decisions fixed by hand, as ``block[0:4].weights=gpu``; see ``lazysched.solver.pins``.
        max_grad_norm: global gradient norm to clip to; None gives clipping up.
        check_finite: skip steps whose gradient is not finite; False, which needs no clipping, lets updates start during
            the backward.
        optimizer_state: ``hybrid8`` has 8-bit moments, ``fp32`` is the exact reference.
        time_limit_s: wall-clock seconds for the search.
        gap: a plan within this share of the lower bound is good enough.
        seed: of the search and of HiGHS; the same seed gives the same plan unless a wall-clock limit cut in.

    Raises:
        UsageError: an argument is out of range, or the profile lacks a figure that is needed.
        InfeasibleError: no plan fits; says which budget binds and by how many bytes.
        TimeLimitError: nothing was found in time.
        KeyboardInterrupt: Ctrl-C came before any plan was found; after that it ends the search, and a second one all.
    """
    scope = _scope(profile, nvme_bytes, EXECUTABLE if executable_only else EVERYTHING)
    given: dict[Tier, int | None] = {"gpu": gpu_memory_bytes, "host": host_memory_bytes, "nvme": nvme_bytes or None}
    check_arguments(time_limit_s, gap, seed, given)
    if optimizer_state not in get_args(StateFormat):
        raise UsageError(f"optimizer_state: {optimizer_state!r} is not known; use {' or '.join(get_args(StateFormat))}")
    check_model(profile)
    budget_bytes: dict[Tier, int] = {
        "gpu": _budget(profile, "gpu", gpu_memory_bytes),
        "host": _budget(profile, "host", host_memory_bytes),
        "nvme": nvme_bytes,
    }
    memories = host_memories(profile, budget_bytes["host"])
    check_profile(profile, optimizer_state, memories)
    update = _update(max_grad_norm, check_finite)
    settings = _Settings(
        profile, batch_size, budget_bytes, memories, update, optimizer_state, parse_pins(pins, profile.stages),
        scope, time_limit_s, gap, seed,
    )  # fmt: skip
    return _Search(settings).run()


@dataclass(frozen=True)
class _Settings:
    profile: Profile
    batch_size: int
    budget_bytes: dict[Tier, int]
    host_memories: tuple[HostMemory, ...]
    update: Update
    state_format: StateFormat
    pins: tuple[Pin, ...]
    scope: Scope
    time_limit_s: float
    gap: float
    seed: int


def _scope(profile: Profile, nvme_bytes: int, scope: Scope) -> Scope:
    """Where things may be within a budget of files."""
    if not nvme_bytes:
        return scope.without_files()
    if not scope.has_files:
        raise UsageError(
            f"nvme_bytes: {nvme_bytes}: the runtime does not execute files yet; use 0, or executable_only=False for a "
            f"plan to look at"
        )
    check_file_links(profile)
    return scope


def _update(max_grad_norm: float | None, check_finite: bool) -> Update:
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise UsageError(f"max_grad_norm: {max_grad_norm} is not a positive number; give 0 to clip nothing")
    if max_grad_norm is not None and not check_finite:
        raise UsageError(
            f"check_finite: clipping to max_grad_norm {max_grad_norm} waits for the gradient norm, so that giving the "
            f"check up gains nothing; give up both with --max-grad-norm 0 --no-finite-check"
        )
    return Update(clip_norm=max_grad_norm, check_finite=check_finite)


def _budget(profile: Profile, tier: Tier, given: int | None) -> int:
    budget = profile.free_bytes.get(tier) if given is None else given
    if budget is None:
        raise UsageError(f"profile: free_bytes.{tier}: null; give --{tier}-memory")
    if given is None and profile.device == "cuda":
        budget = max(budget - UNPLANNED_BYTES[tier], budget // 2)
    if budget <= 0:
        raise UsageError(f"{tier}_memory: {budget} bytes is no budget; use a positive size")
    return budget


class _Search:
    """The outer search; see the module's docstring for its four parts."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.profile = settings.profile
        self.started_s = time.monotonic()
        self.accumulations = accumulations(settings.profile, settings.batch_size)
        self.limits = {size: offload_limits(settings.profile, size) for size in self.accumulations}
        self.instances: dict[Candidate, Instance] = {}
        self.found: dict[Candidate, Found] = {}
        self.bounds: dict[Candidate, float] = {}
        self.withheld_bytes: dict[Budget, int] = {"gpu": 0, "host": 0, "nvme": 0, "pinned": 0}
        self.simulated: dict[Found, tuple[Plan, Timeline]] = {}
        self.compared: list[tuple[str, Found | None]] = []

    def run(self) -> Solution:
        """All parts; the best plan so far when Ctrl-C ends them early."""
        try:
            with INTERRUPTS.handled():
                return self._search()
        except KeyboardInterrupt:
            solution = self._incumbent()
            if solution is None:
                raise
            return solution

    def _search(self) -> Solution:
        """Tightens the budgets when the simulation of the winner exceeds them."""
        for _ in range(MAX_TIGHTENINGS + 1):
            self._recipes()
            self._bound_all()
            self._explore()
            self._vary()
            if not self.found:
                self._first_that_fits()
            self._solve_best()
            self._prove()
            winner = self._judge()
            if winner is not None:
                return self._solution(*winner)
            self.found.clear()
        raise AssertionError("memory rows and simulation disagree beyond tightening")

    def _incumbent(self) -> Solution | None:
        """What an interrupted search has found; combinations that it did not come to get the bound of their compute."""
        winner = self._judge()
        if winner is None:
            return None
        for candidate in self._combinations():
            self.bounds.setdefault(candidate, self._instance(candidate).compute_bound_s)
        return self._solution(*winner, interrupted=True)

    # ---- parts

    def _recipes(self) -> None:
        self.compared = []
        for rule in recipes.RULES:
            candidates = recipes.candidates_of_rule(
                rule, self.accumulations, self.limits, self.settings.host_memories, PREFETCH_DEPTHS
            )
            instances = [instance for instance in map(self._instance, candidates) if instance.has_options]
            found = recipes.best_of_rule(rule, instances, self._budgets)
            self.compared.append((rule.name, found))
            if found is not None:
                self._keep(found)

    def _bound_all(self) -> None:
        """Quick bounds of all combinations, which hold for every prefetch depth and D2H lag."""
        self.bounds.clear()
        for first in self._combinations():
            instance = self._instance(shallowest(first))
            self.bounds[first] = count_bound_s(instance, self._budgets(instance), max(PREFETCH_DEPTHS))
        if not self.bounds:
            fixed = ", ".join(pin.text for pin in self.settings.pins)
            raise UsageError(
                f"pin: {fixed}: no stage can be all that; a variant's name is in the profile, tiers differ"
            )

    def _explore(self) -> None:
        """Look for plans of the combinations, the most promising first, as long as their bounds leave room."""
        waiting = sorted(self.bounds, key=lambda candidate: self.bounds[candidate])
        while self._remaining_s() > 0:
            chosen = [candidate for candidate in waiting if self._may_improve(candidate)][:ROUND]
            if not chosen:
                break
            waiting = [candidate for candidate in waiting if candidate not in chosen]
            for explored in explore_all([self._task(candidate) for candidate in chosen]):
                self._raise_bound(explored.candidate, explored.bound_s)
                if explored.found is not None:
                    self._keep(explored.found)

    def _task(self, candidate: Candidate) -> Task:
        settings, instance = self.settings, self._instance(candidate)
        budgets = self._budgets(instance)
        return Task(instance, budgets, self._best_s(), settings.gap, max(self._remaining_s(), 0.1), settings.seed)

    def _vary(self) -> None:
        """Try the best plans of each kind of host memory with every other prefetch depth and D2H lag."""
        for memory in self.settings.host_memories:
            found = [f for f in self.found.values() if f.candidate.host_memory == memory]
            if not found or self._remaining_s() <= 0:
                continue
            best = min(found, key=lambda f: f.step_s)
            for candidate in variations(best.candidate):
                self._improve(candidate, best.choices)

    def _solve_best(self) -> None:
        """Solve the mixed-integer program of the best plan's combination, depth and lag, from that plan.

        From here on every depth and lag has a bound of its own.
        """
        for candidate, bound_s in list(self.bounds.items()):
            self.bounds |= dict.fromkeys(variations(candidate), bound_s)
        best = min(self.found.values(), key=_step_s)
        if self._may_improve(best.candidate):
            self._solve_program(best.candidate, self._program(best.candidate), self._share_s())

    def _share_s(self) -> float:
        """Time for one part of the proof."""
        return min(max(MIN_PROOF_S, PROOF_SHARE * self._elapsed_s()), max(self._remaining_s(), 0.1))

    def _improve(self, candidate: Candidate, start: Choices) -> None:
        instance = self._instance(candidate)
        found = polished(instance, self._budgets(instance), start, self.settings.seed)
        if found is not None:
            self._keep(found)

    def _prove(self) -> None:
        """Raise the lowest bound, again and again, until it proves the incumbent good enough or time is up."""
        until_s = self._elapsed_s() + self._share_s()
        programs: dict[Candidate, PlacementProgram] = {}
        solved: set[Candidate] = set()
        while self._elapsed_s() < until_s:
            open_ = [c for c in self.bounds if self._may_improve(c) and c not in solved]
            if not open_:
                break
            candidate = min(open_, key=lambda c: self.bounds[c])
            if candidate in programs:
                self._solve_program(candidate, programs[candidate], max((until_s - self._elapsed_s()) / 2, 0.1))
                solved.add(candidate)
            else:
                programs[candidate] = self._program(candidate)
                self._raise_bound(candidate, programs[candidate].lower_bound_s(self._remaining_s()))

    def _program(self, candidate: Candidate) -> PlacementProgram:
        instance = self._instance(candidate)
        return PlacementProgram(instance, self._budgets(instance))

    def _solve_program(self, candidate: Candidate, program: PlacementProgram, time_limit_s: float) -> None:
        """Solve a combination's program from its best plan; descent goes on from what is found."""
        own = self.found.get(candidate)
        outcome = program.solve(
            gap=self.settings.gap,
            time_limit_s=time_limit_s,
            seed=self.settings.seed,
            start=own.choices if own else None,
        )
        self._raise_bound(candidate, outcome.bound)
        if outcome.has_solution:
            self._improve(candidate, program.choices())

    def _raise_bound(self, candidate: Candidate, bound_s: float) -> None:
        self.bounds[candidate] = max(self.bounds[candidate], bound_s)

    def _first_that_fits(self) -> None:
        """The last resort: any plan that fits at all, or the explanation why there is none."""
        settings = self.settings
        question = infeasible.Question(
            self.profile, settings.batch_size, settings.budget_bytes, settings.state_format, settings.scope,
            self._make_instance, settings.seed,
        )  # fmt: skip
        fitting = infeasible.fitting(question)
        if fitting is None:
            raise remedies.explain(question)
        candidate, choices = fitting.instance.candidate, fitting.choices
        evaluation = WindowReplay(fitting.instance).evaluate(ChoiceBatch.of([choices]))
        # Its bytes were counted: it is kept even where the replay's memory rows, which count more, call it too large.
        self._keep(Found(candidate, choices, float(evaluation.step_s[0])))
        if self._remaining_s() > 0:
            self._improve(candidate, choices)

    def _judge(self) -> tuple[Found, Plan, Timeline] | None:
        """Simulate the finalists; None when all exceed a budget, which is then tightened by the excess.

        The recipes' plans are among them: the quick replay ranks plans, the simulation may rank them otherwise.
        """
        best: tuple[Found, Plan, Timeline] | None = None
        excess: Mapping[Budget, int] = {}
        by_recipe = [found for _, found in self.compared if found is not None]
        finalists = sorted(self.found.values(), key=lambda f: f.step_s)[:NUM_FINALISTS]
        for found in [*finalists, *(found for found in by_recipe if found not in finalists)]:
            plan, timeline = self._simulate(found)
            over = self._over_budget(timeline)
            if any(over.values()):
                excess = excess or over
            elif best is None or timeline.step_s < best[2].step_s:
                best = (found, plan, timeline)
        for budget, size in excess.items():
            self.withheld_bytes[budget] += size
        return best

    # ---- helpers

    def _combinations(self) -> list[Candidate]:
        """Every point of the outer search that what is fixed by hand allows, with the first depth and lag."""
        listed = [
            Candidate(size, accumulation, FIRST_DEPTH, FIRST_LAG, limit, memory)
            for size, accumulation in self.accumulations.items()
            for limit, memory in itertools.product(self.limits[size], self.settings.host_memories)
        ]
        return [candidate for candidate in listed if self._instance(candidate).has_options]

    def _instance(self, candidate: Candidate) -> Instance:
        if candidate not in self.instances:
            self.instances[candidate] = self._make_instance(candidate, self.settings.state_format, self.settings.scope)
        return self.instances[candidate]

    def _make_instance(self, candidate: Candidate, state_format: StateFormat, scope: Scope) -> Instance:
        return Instance(self.profile, candidate, state_format, self.settings.update, self.settings.pins, scope)

    def _budgets(self, instance: Instance) -> Budgets:
        budget, withheld = self.settings.budget_bytes, self.withheld_bytes
        gpu_gb = instance.usable_gpu_gb(budget["gpu"] - withheld["gpu"])
        return Budgets(
            gpu_gb,
            (budget["host"] - withheld["host"]) / 1e9,
            (self._pin_limit_bytes(instance.candidate) - withheld["pinned"]) / 1e9,
            (budget["nvme"] - withheld["nvme"]) / 1e9,
        )

    def _pin_limit_bytes(self, candidate: Candidate) -> float:
        """Most bytes that copies may read and write on the host; infinite where they need not be page-locked."""
        limit_bytes = self.profile.pin_limit_bytes
        return math.inf if limit_bytes is None or candidate.host_memory == "pageable" else limit_bytes

    def _keep(self, found: Found) -> None:
        known = self.found.get(found.candidate)
        if known is None or found.step_s < known.step_s:
            self.found[found.candidate] = found

    def _best_s(self) -> float:
        return min((f.step_s for f in self.found.values()), default=math.inf)

    def _may_improve(self, candidate: Candidate) -> bool:
        """Whether the candidate's bound allows a plan that beats the incumbent by more than the gap."""
        return self.bounds[candidate] < self._best_s() * (1 - self.settings.gap)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def _remaining_s(self) -> float:
        return self.settings.time_limit_s - self._elapsed_s()

    def _simulate(self, found: Found) -> tuple[Plan, Timeline]:
        if found not in self.simulated:
            self.simulated[found] = self._lowered_and_simulated(found)
        return self.simulated[found]

    def _lowered_and_simulated(self, found: Found) -> tuple[Plan, Timeline]:
        plan = make_plan(self._instance(found.candidate), found.choices, budget_bytes=self.settings.budget_bytes)
        program = lower(plan, self.profile.stages)
        return plan, simulate(program, self.profile, micro_batch=plan.micro_batch, steps=SIMULATED_STEPS)

    def _over_budget(self, timeline: Timeline) -> dict[Budget, int]:
        budget, limit_bytes = self.settings.budget_bytes, self.profile.pin_limit_bytes
        pinned_bytes = 0 if limit_bytes is None else timeline.pinned_bytes - limit_bytes
        over: dict[Budget, int] = {
            "gpu": timeline.peak_bytes["gpu"] - budget["gpu"],
            "host": timeline.peak_bytes["host"] - budget["host"],
            "nvme": timeline.peak_bytes["nvme"] - budget["nvme"],
            "pinned": pinned_bytes,
        }
        return {name: max(0, size) for name, size in over.items()}

    def _solution(self, found: Found, plan: Plan, timeline: Timeline, interrupted: bool = False) -> Solution:
        objective_s = timeline.step_s
        bound_s = min([objective_s, *self.bounds.values()])
        gap = (objective_s - bound_s) / objective_s
        report = SolverReport(
            status="optimal" if gap <= self.settings.gap and not interrupted else "feasible",
            objective_s=objective_s,
            bound_s=bound_s,
            gap=gap,
            seed=self.settings.seed,
            time_s=self._elapsed_s(),
            versions={name: version(name) for name in ("highspy", "pulp")},
        )
        shown = [Recipe(name, *(self._simulate(r) if r is not None else (None, None))) for name, r in self.compared]
        tried = [
            Tried(c, bound, self.found[c].step_s if c in self.found else None)
            for c, bound in sorted(self.bounds.items(), key=lambda item: item[1])
        ]
        plan = plan.model_copy(update={"predicted": timeline.prediction(), "solver": report, "profile": self.profile})
        return Solution(plan, timeline, shown, tried, interrupted)


def _step_s(found: Found) -> float:
    return found.step_s
