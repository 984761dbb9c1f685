"""Rows of the host's updates; letters as in ``time_rows``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pulp

from lazysched.solver.decisions import Expression
from lazysched.solver.window_durations import ZERO

if TYPE_CHECKING:
    from lazysched.solver.time_rows import TimeRows


def add_update_rows(rows: TimeRows) -> None:
    """Updates after the norm, or during the backward where nothing waits for it."""
    if rows.waits_for_norm:
        _add_late(rows)
    else:
        _add_early(rows)
    _add_total(rows)


def _add_late(rows: TimeRows) -> None:
    """The upload for the next step waits for its update, and updates wait for the clip factor.

    Uploads of the stages before lie between that and the upload of a stage. What of them is not beside updates follows
    these, and takes longer than what it would have cost them: so all of them are charged. What blocks save may come
    later and is not.
    """
    rows.problem += rows.te >= rows.compute_end(rows.num_windows - 1)
    before: Expression = ZERO
    free: Expression = ZERO + 1
    for w in range(rows.head + 1):
        own = rows.of_gradient(rows.num_windows - 1 - w, lambda c: c.cpu_update_s, gpu=False)
        if w > 0 and rows.trained[w - 1]:
            own += rows.instance.least_lost_s * rows.load[w - 1]
        updated = rows.problem.add_variable(f"cc_{w}", 0)
        rows.problem += updated >= before + own
        free = _free(rows, w, free)
        if rows.trained[w]:
            rows.problem += rows.tx[w] + rows.period >= rows.te + updated - rows.late_s() * free
        rows.updates.append((updated, own))
        before = updated


def _free(rows: TimeRows, window: int, before: Expression) -> Expression:
    """More than 0 up to the first stage that the host updates: nothing until there waits for updates.

    After it the rows of those before say as much: a stage is not used before them, nor does its own upload wait.
    """
    lets_off = rows.problem.add_variable(f"fr_{window}", 0)
    rows.problem += lets_off <= before
    if rows.trained[window]:
        rows.problem += lets_off <= rows.of_gradient(rows.num_windows - 1 - window, lambda c: 1.0, gpu=True)
    return 1 * lets_off


def _add_early(rows: TimeRows) -> None:
    """Updates follow their gradients in the order of the backward; the next step's upload waits for its own."""
    before = ZERO
    for w in range(rows.head, rows.num_windows):
        own = rows.of_gradient(w, lambda c: c.cpu_update_s, gpu=False)
        updated = rows.problem.add_variable(f"cc_{w}", 0)
        rows.problem += updated >= before + own
        if rows.trained[rows.num_windows - 1 - w]:
            rows.problem += updated >= rows.ty[w] + rows.grads[w] + own
            # A stage that the GPU updates waits for none of this.
            free = rows.longest_step_s * rows.of_gradient(w, lambda c: 1.0, gpu=True)
            rows.problem += rows.tx[rows.num_windows - 1 - w] + rows.period >= updated - free
        rows.updates.append((updated, own))
        before = updated


def _add_total(rows: TimeRows) -> None:
    """The host updates all stages in a period, more slowly while there are copies; all copies fall into a period too.

    Be A the updates alone, S and Z the copies of each direction, s and z those beside updates, c <= 1/2 what one second
    of a direction costs at least. Updates take A + c (s + z) and leave room for the other copies: T >= A + c (s + z) +
    max(S - s, Z - z) >= A + c (S + Z).
    """
    windows = rows.windows
    own = pulp.lpSum(rows.of_gradient(w, lambda c: c.cpu_update_s, gpu=False) for w in windows)
    to_gpu = pulp.lpSum(rows.load[w] + rows.again[w] + rows.m * rows.fetch[w] for w in windows)
    to_host = pulp.lpSum(rows.m * rows.save[w] + rows.grads[w] for w in windows)
    rows.problem += rows.period >= own + rows.instance.least_lost_s * (to_gpu + to_host)
    if not all(rows.trained):  # else uploads of the next step follow all of these
        rows.problem += rows.period >= to_gpu
