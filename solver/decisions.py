"""The binary decisions of the mixed-integer program and linear expressions over them.

Legend (letters of the event formulation; i is a block, o a save option, s a state choice, k a vocabulary option):
    x[i][o]  block i saves with option o             (binary, one per block; one for all blocks of a segment)
    y[i][s]  weights and optimizer state of block i  (binary, one per block)
    v[k]     joint choice for embedding and head     (binary, one in all)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pulp

from lazysched.solver.instance import Instance
from lazysched.solver.options import SaveOption, StageCosts, StateChoice, VocabularyOption
from lazysched.solver.plans import Choices

Expression: TypeAlias = Any
"""A ``pulp.LpAffineExpression`` or a single variable; PuLP has no types."""


class Decisions:
    """Variables x, y, v with the rows that make each a choice of exactly one."""

    def __init__(self, problem: pulp.LpProblem, instance: Instance) -> None:
        self.instance = instance
        self.x: list[list[pulp.LpVariable]] = []
        for i, options in enumerate(instance.saves):
            own = [
                self.x[i - 1][o] if option.place else _binary(problem, f"x_{i}_{o}") for o, option in enumerate(options)
            ]
            self.x.append(own)
        self.y: list[dict[StateChoice, pulp.LpVariable]] = [
            {s: _binary(problem, f"y_{i}_{s}") for s in states} for i, states in enumerate(instance.states)
        ]
        self.v = [_binary(problem, f"v_{k}") for k in range(len(instance.vocabulary_options))]
        for i in range(instance.num_blocks):
            problem += pulp.lpSum(self.x[i]) == 1
            problem += pulp.lpSum(self.y[i].values()) == 1
        problem += pulp.lpSum(self.v) == 1

    def save(self, block: int, coefficient: Callable[[SaveOption], float]) -> Expression:
        """Sum over the block's save options."""
        return _weighted(zip(self.x[block], map(coefficient, self.instance.saves[block]), strict=True))

    def state(self, block: int, coefficient: Callable[[StageCosts], float], *choices: StateChoice) -> Expression:
        """``coefficient`` of the block if its state choice is one of ``choices``."""
        factor = coefficient(self.instance.blocks[block])
        return _weighted((self.y[block][choice], factor) for choice in choices if choice in self.y[block])

    def by_state(self, block: int, coefficient: Callable[[StageCosts, StateChoice], float]) -> Expression:
        """``coefficient`` of the block and its state choice."""
        costs = self.instance.blocks[block]
        return _weighted((var, coefficient(costs, choice)) for choice, var in self.y[block].items())

    def vocabulary(self, coefficient: Callable[[VocabularyOption], float]) -> Expression:
        """Sum over the joint options of embedding and head."""
        return _weighted(zip(self.v, map(coefficient, self.instance.vocabulary_options), strict=True))

    def ends_on(self, coefficient: Callable[[StageCosts], float], *, gpu: bool, embed: bool, head: bool) -> Expression:
        """``coefficient`` of the embedding and/or head if the GPU (or else the host) updates it."""

        def factor(option: VocabularyOption) -> float:
            total = coefficient(self.instance.embed) if embed and (option.embed == "gpu") == gpu else 0.0
            return total + (coefficient(self.instance.head) if head and (option.head == "gpu") == gpu else 0.0)

        return self.vocabulary(factor)

    def ends_by_state(
        self, coefficient: Callable[[StageCosts, StateChoice], float], *, embed: bool, head: bool
    ) -> Expression:
        """``coefficient`` of the embedding and/or head and its state choice."""

        def factor(option: VocabularyOption) -> float:
            total = coefficient(self.instance.embed, option.embed) if embed else 0.0
            return total + (coefficient(self.instance.head, option.head) if head else 0.0)

        return self.vocabulary(factor)

    def choices(self) -> Choices:
        """The choices of the solution just found."""
        return Choices(
            states=tuple(next(s for s, var in block.items() if _chosen(var)) for block in self.y),
            saves=tuple(next(o for o, var in enumerate(block) if _chosen(var)) for block in self.x),
            vocabulary=next(k for k, var in enumerate(self.v) if _chosen(var)),
        )

    def start_values(self, choices: Choices) -> dict[str, float]:
        """Variable name -> value that expresses ``choices``."""
        values = {var.name: float(k == choices.vocabulary) for k, var in enumerate(self.v)}
        for i, (state, save) in enumerate(zip(choices.states, choices.saves, strict=True)):
            values |= {var.name: float(s == state) for s, var in self.y[i].items()}
            values |= {var.name: float(o == save) for o, var in enumerate(self.x[i])}  # of a segment each block says so
        return values


def _binary(problem: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return problem.add_variable(name, cat=pulp.LpBinary)


def _weighted(terms: Iterable[tuple[pulp.LpVariable, float]]) -> Expression:
    return pulp.LpAffineExpression([(var, factor) for var, factor in terms if factor])


def _chosen(variable: pulp.LpVariable) -> bool:
    value = variable.value()
    return value is not None and value > 0.5
