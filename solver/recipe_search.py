"""The recipes' part of a search: the best plan of each rule, as long as there is time, and what is shown of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from lazysched.solver import recipes
from lazysched.solver.explore import D2H_LAGS, PREFETCH_DEPTHS
from lazysched.solver.instance import Instance
from lazysched.solver.judge import Judge
from lazysched.solver.plans import Found
from lazysched.solver.recipe_rules import Rule, rules_within
from lazysched.solver.recipes import Recipe
from lazysched.solver.space import Space
from lazysched.solver.stopwatch import Stopwatch

RECIPES_SHARE = 0.5
"""Of the time limit, after which no further recipe is tried if one has a plan."""


class RecipeSearch:
    """Tries every rule in ``space``.

    Attributes:
        compared: rule -> its best plan, None where none fits; rules that the time does not suffice for are not in it.
    """

    def __init__(self, space: Space, watch: Stopwatch) -> None:
        self.space, self.watch = space, watch
        self.compared: dict[Rule, Found | None] = {}

    def run(self, keep: Callable[[Found], None], has_plan: Callable[[], bool]) -> None:
        """Try what is not in ``compared`` yet; ``keep`` gets what is found, ``has_plan`` says if there is any plan."""
        share_until_s = self.watch.elapsed_s + RECIPES_SHARE * self.watch.remaining_s

        def goes_on(best: Found | None) -> bool:
            until_s = share_until_s if best or has_plan() else math.inf
            return self.watch.has_time() and self.watch.elapsed_s < until_s

        for rule in rules_within(self.space.settings.scope):
            if rule in self.compared:
                continue
            if not goes_on(None):
                break
            instances = [instance for instance in self._instances(rule) if instance.has_options]
            found = recipes.best_of_rule(rule, instances, self.space.budgets, goes_on)
            if found is not None or goes_on(None):
                self.compared[rule] = found
            if found is not None:
                keep(found)

    def _instances(self, rule: Rule) -> list[Instance]:
        settings = self.space.settings
        candidates = recipes.candidates_of_rule(
            rule, self.space.accumulations, self.space.limits, settings.host_memories, PREFETCH_DEPTHS, D2H_LAGS,
            len(settings.profile.stages) - 2,
        )  # fmt: skip
        return [self.space.instance(candidate) for candidate in candidates]

    def found(self) -> list[Found]:
        """The best plans of all rules that have one, the fastest by the quick replay first."""
        return sorted((found for found in self.compared.values() if found is not None), key=lambda found: found.step_s)

    def shown(self, judge: Judge) -> list[Recipe]:
        """What is told of each; not of those whose plan there was no time to simulate."""
        rules = [rule for rule in rules_within(self.space.settings.scope) if rule in self.compared]
        pairs = [(rule.name, self.compared[rule]) for rule in rules]
        return [_recipe(name, found, judge) for name, found in pairs if found is None or judge.has_simulated(found)]


def _recipe(name: str, found: Found | None, judge: Judge) -> Recipe:
    if found is None:
        return Recipe(name, None, None)
    judged = judge.simulated(found)
    return Recipe(name, judged.plan, judged.timeline)
