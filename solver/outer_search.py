"""The outer search: micro-batch, the size that a block may send to the host, prefetch depth, D2H lag, host memory.

These are searched outside the integer program:

1. every combination of the first two gets a quick lower bound (``bounds``); recipes give the first incumbent;
2. combinations whose bound leaves room are explored, with one depth and lag (``explore``);
3. the best plan is tried with every other depth and lag;
4. combinations get better bounds, the lowest first, until none leaves room;
5. the program of the best plan is solved from that plan;
6. the lowest bound is raised, by relaxing and at last solving the program of that combination, depth and lag, until
   none can beat the best plan by more than the gap, or time is up;
7. the finalists are lowered and simulated; the fastest that keeps its budgets in the simulation wins;
8. single decisions of the winner are changed as long as the simulation says that it gains (``last_round``).

When time is up, what is left is skipped; a plan and a bound, or the reason why there is no plan, are always found.
Where page-locked host memory is limited, whether to use it is part of a combination too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from lazysched.errors import UsageError
from lazysched.schemas import SolverReport
from lazysched.solver.bounds import count_bound_s
from lazysched.solver.explore import (
    PREFETCH_DEPTHS,
    Task,
    bound_all,
    explore_all,
    polished,
    shallowest,
    variations,
)
from lazysched.solver.instance import Candidate
from lazysched.solver.interrupts import INTERRUPTS
from lazysched.solver.judge import Judge, Judged
from lazysched.solver.known import Known
from lazysched.solver.last_resort import any_that_fits
from lazysched.solver.last_round import improved
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.options import EXECUTABLE
from lazysched.solver.plans import Choices, Found
from lazysched.solver.recipe_search import RecipeSearch
from lazysched.solver.solution import Progress, Solution
from lazysched.solver.space import Settings, Space
from lazysched.solver.stopwatch import Stopwatch, never

NUM_FINALISTS = 4
"""Plans that are simulated at most."""
MAX_TIGHTENINGS = 3
"""How often budgets are tightened when the simulation disagrees with the memory rows."""
AFTER_SHARE = 0.25
"""Of the time limit, for other depths and lags of the best plan and for bounds: exploring ends so much earlier."""
EXECUTED_SHARE = 0.4
"""Of the time limit, for plans that are executed where others are looked for too."""
LAST_SHARE = 0.1
"""Of the time limit, for judging and the last round: the other parts end so much earlier."""
OWN_GAP = 0.9
"""Of the gap, to which a program is solved: its own step may be a little above the simulation's."""
MIN_PROOF_S, PROOF_SHARE = 2.0, 0.5
"""Time for the proof: at least the first, otherwise this share of what the search before it took."""


class Search:
    """The search for one call of ``solve``; see the module's docstring for its parts.

    Args:
        settings: what was asked.
        report: called whenever a faster plan is found or a bound raised.
    """

    def __init__(self, settings: Settings, report: Callable[[Progress], None] | None = None) -> None:
        self.settings, self.report = settings, report
        self.whole_watch = Stopwatch(settings.time_limit_s)
        self.watch = Stopwatch(settings.time_limit_s * (1 - LAST_SHARE))
        self.space = Space(settings)
        self.judge = Judge(self.space)
        self.known = Known(settings.gap, report)
        self.explored: set[Candidate] = set()
        self.bounded: set[Candidate] = set()
        """Combinations that need no further look; with other budgets all is looked at anew."""
        self.tight: set[Candidate] = set()
        """Those that fit with fewest slots, if at all."""
        self.recipes = RecipeSearch(self.space, self.watch)
        self.proven_s: float | None = None
        """Bound with whole budgets, once these were tightened."""

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
            self.recipes.compared.clear()
            self._what_is_executed()
            self.search_options()
            if not self.known.found:
                self._first_that_fits()
            self._solve_best()
            self._prove()
            winner = self._winner()
            if winner is not None:
                return self._solution(improved(self.judge, winner, self.whole_watch.has_time))
            self.proven_s = self.proven_s or self.known.bound_s
            self.known.found.clear()
        raise AssertionError("memory rows and simulation disagree beyond tightening")

    def _incumbent(self) -> Solution | None:
        """What an interrupted search has found; nothing is simulated for it where a plan that fits was simulated."""
        winner, _ = self.judge.fastest([*self.judge.all_simulated(), *self._finalists()], has_time=never)
        if winner is None:
            return None
        self._bound_the_rest()
        return self._solution(winner, interrupted=True)

    # ---- parts

    def _what_is_executed(self) -> None:
        """Among plans that no runtime executes yet, a search of those that one does comes first: it is much shorter."""
        settings = self.settings
        if settings.scope == EXECUTABLE.without_files():
            return
        limit_s = EXECUTED_SHARE * self.watch.remaining_s
        first = Search(replace(settings, scope=EXECUTABLE.without_files(), time_limit_s=limit_s), self.report)
        first.space.withheld_bytes = self.space.withheld_bytes
        try:
            if first.space.combinations():
                first.search_options()
        finally:  # after Ctrl-C too
            for found in first.known.found.values():
                self._keep_own(found, first.space)
        for rule, best in first.recipes.compared.items():
            transferred = best and self.space.transferred(best, first.space.instance(best.candidate))
            self.recipes.compared[rule] = transferred

    def search_options(self) -> None:
        """All parts but the last resort and the proof."""
        self._bound_all()
        if self.known.bound_s < math.inf:
            self.recipes.run(lambda found: self._keep_own(found, self.space), lambda: bool(self.known.found))
        self._explore(AFTER_SHARE * self.watch.limit_s, self.tight)
        self._vary()
        self._explore(AFTER_SHARE / 2 * self.watch.limit_s, set())
        self._raise_bounds()
        self._explore(0.0, set())

    def _bound_all(self) -> None:
        """Quick bounds of all combinations, which hold for every prefetch depth and D2H lag."""
        self.known.bounds.clear()
        self.explored.clear()
        self.bounded.clear()
        self.tight.clear()
        for first in self.space.combinations():
            if self.known.bounds and not self.watch.has_time():
                break
            instance = self.space.instance(shallowest(first))
            counted_s = count_bound_s(instance, self.space.budgets(instance), max(PREFETCH_DEPTHS))
            self.known.bounds[first] = max(counted_s, instance.compute_bound_s)  # HiGHS may have given up
        self._bound_the_rest()
        if not self.known.bounds:
            fixed = ", ".join(pin.text for pin in self.settings.pins)
            raise UsageError(
                f"pin: {fixed}: no stage can be all that; a variant's name is in the profile, tiers differ"
            )

    def _bound_the_rest(self) -> None:
        """Combinations that the search did not come to get the bound of their compute."""
        for candidate in self.space.combinations():
            self.known.bounds.setdefault(candidate, self.space.instance(candidate).compute_bound_s)

    def _explore(self, reserve_s: float, without: set[Candidate]) -> None:
        """Look for plans of the combinations, the most promising first, as long as their bounds leave room.

        ``reserve_s`` before the time is up it ends.
        """
        while self.watch.remaining_s > reserve_s and (chosen := self.known.next_round(self.explored | without)):
            tasks = [self._task(candidate, self.watch.remaining_s - reserve_s) for candidate in chosen]
            for candidate, explored in zip(chosen, explore_all(tasks), strict=False):
                if explored.fits or candidate in self.tight:
                    self.explored.add(candidate)
                else:
                    self.tight.add(candidate)
                self.known.raise_bound(candidate, explored.bound_s)
                if explored.found is not None:
                    self.known.keep(explored.found)

    def _raise_bounds(self) -> None:
        """Better bounds of the combinations, the lowest first, as long as they leave room."""
        while self.watch.has_time() and (chosen := self.known.next_round(self.bounded)):
            tasks = [self._task(candidate, self.watch.remaining_s) for candidate in chosen]
            for candidate, bounded in zip(chosen, bound_all(tasks), strict=False):
                self.bounded.add(candidate)
                self.known.raise_bound(candidate, bounded.bound_s)

    def _task(self, candidate: Candidate, time_limit_s: float) -> Task:
        """A look at a combination, with fewest slots where it does not fit otherwise."""
        settings = self.settings
        instance = self.space.instance(shallowest(candidate) if candidate in self.tight else candidate)
        budgets = self.space.budgets(instance)
        return Task(instance, budgets, self.known.best_s, settings.gap, time_limit_s, settings.seed)

    def _vary(self) -> None:
        """Try the best plans of each kind of host memory with every other prefetch depth and D2H lag."""
        for memory in self.settings.host_memories:
            found = [f for f in self.known.found.values() if f.candidate.host_memory == memory]
            if not found:
                continue
            best = min(found, key=lambda f: f.step_s)
            for candidate in variations(best.candidate):
                if self.watch.has_time():
                    self._improve(candidate, best.choices)

    def _solve_best(self) -> None:
        """Solve the mixed-integer program of the best plan's combination, depth and lag, from that plan.

        From here on every depth and lag has a bound of its own.
        """
        for candidate, bound_s in list(self.known.bounds.items()):
            self.known.bounds |= dict.fromkeys(variations(candidate), bound_s)
        best = self.known.fastest()[0]
        if self.watch.has_time() and self.known.may_improve(best.candidate):
            share_s = min(self._share_s(), max(self.watch.remaining_s / 2, MIN_PROOF_S))
            self._solve_program(best.candidate, self._program(best.candidate), share_s)

    def _share_s(self) -> float:
        """Time for one part of the proof."""
        if self.settings.proves_to_the_end:
            return self.watch.remaining_s
        return min(max(MIN_PROOF_S, PROOF_SHARE * self.watch.elapsed_s), self.watch.remaining_s)

    def _improve(self, candidate: Candidate, start: Choices) -> None:
        instance = self.space.instance(candidate)
        found = polished(instance, self.space.budgets(instance), start, self.settings.seed, self.watch.has_time)
        if found is not None:
            self.known.keep(found)

    def _prove(self) -> None:
        """Raise the lowest bound, again and again, until it proves the incumbent good enough or time is up."""
        until_s = self.watch.elapsed_s + self._share_s()
        programs: dict[Candidate, PlacementProgram] = {}
        solved: set[Candidate] = set()
        while self.watch.elapsed_s < until_s:
            open_ = self.known.open(solved)
            if not open_:
                break
            candidate = open_[0]
            if candidate in programs:
                self._solve_program(candidate, programs[candidate], (until_s - self.watch.elapsed_s) / 2)
                solved.add(candidate)
            else:
                programs[candidate] = self._program(candidate)
                self.known.raise_bound(candidate, programs[candidate].lower_bound_s(self.watch.remaining_s))

    def _program(self, candidate: Candidate) -> PlacementProgram:
        instance = self.space.instance(candidate)
        return PlacementProgram(instance, self.space.budgets(instance))

    def _solve_program(self, candidate: Candidate, program: PlacementProgram, time_limit_s: float) -> None:
        """Solve a combination's program from its best plan; descent goes on from what is found."""
        own = self.known.found.get(candidate)
        outcome = program.solve(
            gap=OWN_GAP * self.settings.gap,
            time_limit_s=time_limit_s,
            seed=self.settings.seed,
            start=own.choices if own else None,
        )
        self.known.raise_bound(candidate, outcome.bound)
        if outcome.has_solution:
            self._improve(candidate, program.choices())

    def _first_that_fits(self) -> None:
        """The last resort: any plan that fits at all, or the explanation why there is none."""
        found = any_that_fits(self.space)
        # Its bytes were counted: it is kept even where the replay's memory rows, which count more, call it too large.
        self.known.keep(found)
        if self.watch.has_time():
            self._improve(found.candidate, found.choices)

    def _winner(self) -> Judged | None:
        """The fastest finalist; None when all exceed a budget, which is then tightened by the excess."""
        best, excess = self.judge.fastest(self._finalists(), self.whole_watch.has_time)
        for budget, size in excess.items():
            self.space.withheld_bytes[budget] += size
        return best

    def _finalists(self) -> list[Found]:
        """What is simulated as long as there is time, the most promising first.

        The recipes' plans are among them: the quick replay ranks plans, the simulation may rank them otherwise.
        """
        finalists = self.known.fastest()[:NUM_FINALISTS]
        return list(dict.fromkeys([*finalists, *self.recipes.found()]))

    # ---- helpers

    def _keep_own(self, found: Found, space: Space) -> None:
        """Keep what was found in ``space``, if it is among the options here."""
        own = self.space.transferred(found, space.instance(found.candidate))
        if own is not None:
            self.known.keep(own)

    def _solution(self, winner: Judged, interrupted: bool = False) -> Solution:
        plan, timeline = winner.plan, winner.timeline
        report = self._report(timeline.step_s, interrupted)
        plan = plan.model_copy(
            update={"predicted": timeline.prediction(), "solver": report, "profile": self.settings.profile}
        )
        return Solution(plan, timeline, self.recipes.shown(self.judge), self.known.tried(), interrupted)

    def _report(self, objective_s: float, interrupted: bool) -> SolverReport:
        bound_s = min(objective_s, self.known.bound_s if self.proven_s is None else self.proven_s)
        gap = (objective_s - bound_s) / objective_s
        return SolverReport(
            status="optimal" if gap <= self.settings.gap and not interrupted else "feasible",
            objective_s=objective_s,
            bound_s=bound_s,
            gap=gap,
            seed=self.settings.seed,
            time_s=self.whole_watch.elapsed_s,
            versions={name: version(name) for name in ("highspy", "pulp")},
        )
