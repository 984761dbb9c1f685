"""Dependencies of a serial list of operations, from the buffers that they read and write.

An operation depends on the last writer of whatever it touches and, where it writes, on all readers since. The list is
walked twice, as two consecutive steps, which also yields the edges that wrap from one step into the next. Engines work
in order, so of several predecessors on one engine only the latest is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazysched.schemas import Op

_Event = tuple[int, int]  # (step, position in the list)


class _BufferHistory:
    """The last writer of one buffer and its readers since then."""

    def __init__(self) -> None:
        self.writer: _Event | None = None
        self.readers: list[_Event] = []


def dependency_edges(ops: Sequence[Op]) -> list[tuple[str, str, int]]:
    """Edges (before, after, step distance) that keep ``ops`` right when every engine only keeps its own order."""
    histories: dict[str, _BufferHistory] = {}
    edges: list[tuple[str, str, int]] = []
    for step in (0, 1):
        for position, op in enumerate(ops):
            before = _predecessors(op, (step, position), histories)
            if step == 1:
                latest = _latest_per_engine(before, ops)
                edges += [(ops[index].id, op.id, 1 - at) for at, index in sorted(latest)]
    return edges


def _predecessors(op: Op, now: _Event, histories: dict[str, _BufferHistory]) -> set[_Event]:
    """Events that ``op`` must wait for; its own accesses are entered into the histories."""
    before: set[_Event] = set()
    for buffer in op.reads:
        history = histories.setdefault(buffer, _BufferHistory())
        if history.writer is not None:
            before.add(history.writer)
        history.readers.append(now)
    for buffer in op.writes:
        history = histories.setdefault(buffer, _BufferHistory())
        before.update(history.readers)
        if history.writer is not None:
            before.add(history.writer)
        history.writer, history.readers = now, []
    return before - {now}


def _latest_per_engine(events: set[_Event], ops: Sequence[Op]) -> list[_Event]:
    latest: dict[str, _Event] = {}
    for event in events:
        engine = ops[event[1]].engine
        latest[engine] = max(event, latest.get(engine, event))
    return list(latest.values())
