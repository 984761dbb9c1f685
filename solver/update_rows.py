"""Rows of the host's updates; letters as in ``time_rows``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazysched.solver.decisions import Expression
from lazysched.solver.options import ON_HOST
from lazysched.solver.window_durations import ZERO

if TYPE_CHECKING:
    from lazysched.solver.time_rows import TimeRows


def add_update_rows(rows: TimeRows) -> None:
    """Updates after the norm, or during the backward where nothing waits for it."""
    if rows.waits_for_norm:
        _add_late(rows)
    else:
        _add_early(rows)


def _add_late(rows: TimeRows) -> None:
    """The upload for the next step waits for its update, and updates wait for the clip factor."""
    rows.problem += rows.te >= rows.compute_end(rows.num_windows - 1)
    before: Expression = ZERO
    for w in range(rows.head + 1):
        block = rows.block(w)
        if block is None:
            own = rows.decisions.ends_on(lambda c: c.cpu_update_s, gpu=False, embed=w == 0, head=w != 0)
        else:
            own = rows.decisions.state(block, lambda c: c.cpu_update_s, *ON_HOST)
        if w > 0:  # while it and those before it are updated, the weights of those before are on their way
            own += rows.instance.copy_slowdown * (rows.load[w - 1] + rows.m * rows.save[w - 1])
        updated = rows.problem.add_variable(f"cc_{w}", 0)
        rows.problem += updated >= before + own
        if rows.trained[w]:
            rows.problem += rows.tx[w] + rows.period >= rows.te + updated
        rows.updates.append((updated, own))
        before = updated
    rows.problem += rows.period >= before


def _add_early(rows: TimeRows) -> None:
    """Updates follow their gradients in the order of the backward; the next step's upload waits for its own."""
    before, total = ZERO, ZERO
    for w in range(rows.head, rows.num_windows):
        own = rows.of_gradient(w, lambda c: c.cpu_update_s, gpu=False)
        copied = rows.again[w] + rows.load[w] + rows.grads[w] + rows.m * rows.fetch[w]
        own += rows.instance.copy_slowdown * copied
        updated = rows.problem.add_variable(f"cc_{w}", 0)
        rows.problem += updated >= before + own
        if rows.trained[rows.num_windows - 1 - w]:
            rows.problem += updated >= rows.ty[w] + rows.grads[w] + own
            # A stage that the GPU updates waits for none of this.
            free = rows.longest_step_s() * rows.of_gradient(w, lambda c: 1.0, gpu=True)
            rows.problem += rows.tx[rows.num_windows - 1 - w] + rows.period >= updated - free
        rows.updates.append((updated, own))
        before, total = updated, total + own
    rows.problem += rows.period >= total
