"""Discrete-event replay of a program: when each operation of consecutive steps runs, for given durations.

An engine works on one operation at a time, in the order of ``Program.ops``, step after step. The first in its queue
starts when all its predecessors have ended, in its own step or the one before. Of all that runs, whatever ends first
ends next. An update on the host shares memory with copies: it slows down while they run, and its end moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from lazysched.schemas import Engine, Program
from lazysched.timeline import Interval

COPY_ENGINES: tuple[Engine, ...] = ("h2d", "d2h")
"""Engines that read or write the host's memory at a rate that the host's update feels."""


def replay_in_line(program: Program, duration_s: Mapping[str, float], steps: int) -> list[Interval]:
    """Every operation after the one before it, as where all engines are one thread."""
    intervals, now_s = [], 0.0
    for step in range(steps):
        for op in program.ops.values():
            end_s = now_s + duration_s[op.id]
            intervals.append(Interval(op.id, op.engine, now_s, end_s, step))
            now_s = end_s
    return intervals


def replay(
    program: Program, duration_s: Mapping[str, float], steps: int, slowdown: Mapping[str, float]
) -> list[Interval]:
    """When each operation of ``steps`` steps runs, in order of step and priority.

    Args:
        program: one step, with edges that wrap into the next.
        duration_s: operation id -> seconds that it takes alone.
        steps: how many.
        slowdown: operation id -> seconds that it loses for each second in which one engine of ``COPY_ENGINES`` runs.

    Raises:
        ValueError: the order of the engines contradicts the edges.
    """
    return _Replay(program, duration_s, steps, slowdown).run()


class _Running:
    """What an engine works on, and how much of it is left."""

    def __init__(self, index: int, start_s: float, left_s: float, slowdown: float) -> None:
        self.index, self.start_s, self.left_s, self.slowdown = index, start_s, left_s, slowdown


class _Replay:
    """Queues of all engines and what runs; an operation of a step is an index: step * number of operations + place."""

    def __init__(
        self, program: Program, duration_s: Mapping[str, float], steps: int, slowdown: Mapping[str, float]
    ) -> None:
        self.ops = list(program.ops.values())
        place = {op.id: index for index, op in enumerate(self.ops)}
        self.duration_s = [duration_s[op.id] for op in self.ops]
        self.slowdown = [slowdown.get(op.id, 0.0) for op in self.ops]
        count, total = len(self.ops), len(self.ops) * steps
        self.num_waited_for = [0] * total
        self.followers: list[list[int]] = [[] for _ in range(total)]
        for before, after, distance in program.edges:
            for step in range(steps - distance):
                follower = (step + distance) * count + place[after]
                self.followers[step * count + place[before]].append(follower)
                self.num_waited_for[follower] += 1
        self.queues: dict[Engine, list[int]] = {}
        for index in range(total - 1, -1, -1):  # the next one stands last
            self.queues.setdefault(self.ops[index % count].engine, []).append(index)
        self.running: dict[Engine, _Running] = {}
        self.now_s = 0.0
        self.intervals: list[Interval | None] = [None] * total

    def run(self) -> list[Interval]:
        while True:
            self._start_what_can()
            if not self.running:
                break
            self._end_next()
        done = [interval for interval in self.intervals if interval is not None]
        if len(done) < len(self.intervals):
            stuck = self.ops[self.intervals.index(None) % len(self.ops)].id
            raise ValueError(f"the order of the engines contradicts the edges: {stuck} never starts")
        return done

    def _start_what_can(self) -> None:
        for engine, queue in self.queues.items():
            if engine not in self.running and queue and not self.num_waited_for[queue[-1]]:
                index = queue.pop()
                place = index % len(self.ops)
                self.running[engine] = _Running(index, self.now_s, self.duration_s[place], self.slowdown[place])

    def _end_next(self) -> None:
        """Go on to the next end, and end what ends there."""
        num_copying = sum(engine in self.running for engine in COPY_ENGINES)
        stretches = {engine: 1 + op.slowdown * num_copying for engine, op in self.running.items()}
        engine = min(self.running, key=lambda engine: self.running[engine].left_s * stretches[engine])
        passed_s = self.running[engine].left_s * stretches[engine]
        self.now_s += passed_s
        for other, op in self.running.items():
            op.left_s = max(0.0, op.left_s - passed_s / stretches[other])
        ended = self.running.pop(engine)
        step, place = divmod(ended.index, len(self.ops))
        self.intervals[ended.index] = Interval(self.ops[place].id, engine, ended.start_s, self.now_s, step)
        for follower in self.followers[ended.index]:
            self.num_waited_for[follower] -= 1
