"""Which steps of a run are timed operation by operation: a few in every run, and those of a trace."""

from __future__ import annotations

from lazysched.errors import UsageError
from lazysched.runtime.loop import WARM_UP_STEPS
from lazysched.units import format_slice

TIMED_STEPS = slice(WARM_UP_STEPS, WARM_UP_STEPS + 3)
"""Steps whose operations are timed in every run; the first of them only shows where the next one begins."""


def timed_range(num_done: int, num_steps: int) -> range:
    """Those of ``TIMED_STEPS``, counted from where the run begins or goes on."""
    return range(num_done, num_steps)[TIMED_STEPS]


def traced_range(trace: str | None, trace_steps: slice | None, num_done: int, num_steps: int) -> range:
    """Steps that go into the trace; none where there is no trace.

    Raises:
        UsageError: steps without a trace, or none of them is one of this run.
    """
    if trace is None:
        if trace_steps is not None:
            raise UsageError(f"trace_steps: {format_slice(trace_steps)} without a trace; name its file with --trace")
        return range(0)
    chosen = timed_range(num_done, num_steps) if trace_steps is None else range(num_steps)[trace_steps]
    if not any(step >= num_done for step in chosen):
        steps = f"{num_steps} steps" if num_done == 0 else f"steps {num_done} to {num_steps - 1}"
        raise UsageError(
            f"trace_steps: {format_slice(trace_steps or TIMED_STEPS)} holds none of the run's {steps}, which count "
            f"from 0; give others with --trace-steps"
        )
    return chosen
