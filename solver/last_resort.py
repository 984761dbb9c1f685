"""The last resort of a search that has found nothing: any plan that fits at all, or why there is none."""

from __future__ import annotations

from lazysched.solver import infeasible, remedies
from lazysched.solver.choice_batch import ChoiceBatch
from lazysched.solver.plans import Found
from lazysched.solver.space import Space
from lazysched.solver.stopwatch import Stopwatch
from lazysched.solver.window_replay import WindowReplay

LEAST_S = 5.0
"""To find a plan, or say why there is none, it may take as long again as the search, or so long."""
EXPLAINING_SHARE = 0.5
"""Of that time, which is left for the explanation however long the look for a plan took."""


def any_that_fits(space: Space) -> Found:
    """A plan whose bytes, counted one by one, fit.

    Raises:
        InfeasibleError: there is none; it says what would help.
        TimeLimitError: none was found in time.
    """
    settings = space.settings
    limit_s = max(settings.time_limit_s, LEAST_S)
    watch = Stopwatch(limit_s)
    question = infeasible.Question(
        settings.profile, settings.batch_size, settings.budget_bytes, settings.state_format,
        settings.scope, space.make_instance, settings.seed, settings.pins, watch,
    )  # fmt: skip
    sought = infeasible.fitting(question)
    if sought.nearest is None:
        left_s = max(watch.remaining_s, EXPLAINING_SHARE * limit_s)
        raise remedies.explain(question.within(left_s), sought.proven)
    candidate, choices = sought.nearest.instance.candidate, sought.nearest.choices
    evaluation = WindowReplay(sought.nearest.instance).evaluate(ChoiceBatch.of([choices]))
    return Found(candidate, choices, float(evaluation.step_s[0]))
