"""Given choices in the program and in the simulator."""

from __future__ import annotations

import random

from lazysched.lower import lower
from lazysched.schemas import Profile
from lazysched.solver import Timeline, simulate
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets
from lazysched.solver.milp import PlacementProgram
from lazysched.solver.plans import Choices, make_plan

PLENTY = Budgets(1e3, 1e3, nvme_gb=1e3)


def replayed(profile: Profile, instance: Instance, choices: Choices) -> Timeline:
    """The simulation of the choices' plan."""
    plan = make_plan(instance, choices, budget_bytes={})
    program = lower(plan, profile.stages)
    return simulate(program, profile, micro_batch=plan.micro_batch, steps=6)


def drawn(instance: Instance, generator: random.Random) -> Choices:
    """Any choices."""
    return Choices(
        states=tuple(generator.choice(own) for own in instance.states),
        saves=tuple(generator.randrange(len(options)) for options in instance.saves),
        vocabulary=generator.randrange(len(instance.vocabulary_options)),
    )


def fixed_period(instance: Instance, choices: Choices, budgets: Budgets) -> float | None:
    """T of the program with all decisions given; None when that does not fit."""
    program = PlacementProgram(instance, budgets)
    values = program.decisions.start_values(choices)
    for variable in program.problem.variables():
        if variable.name in values:
            variable.lowBound = variable.upBound = values[variable.name]
    outcome = program.solve(gap=0.0, time_limit_s=20, seed=0)
    return float(program.period.value()) if outcome.has_solution else None
