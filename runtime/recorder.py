"""Times the operations of chosen steps while they run, on their engines, without holding any of them up.

Work on a stream lies between two timed events, work of the CPU between two readings of the host's clock. Events are
read when the run has drained; one of them, on a stream of its own that has nothing else to do, ties the GPU's clock to
the host's before the first chosen step. The two clocks drift apart by some microseconds a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

import torch

from lazysched.schemas import Op, Plan, Program, Recording, TimedOp, Timing
from lazysched.timeline import Interval, both_ways

Work = Callable[[], None]
Timed = Callable[[Op, Work], Work]
"""(operation, its work) -> work that is timed."""
ANCHOR_TRIES = 5


class Recorder:
    """Collects intervals.

    Args:
        steps: those to time, counted from 0.
        device: of the tier ``gpu``; on a CPU the host's clock times every engine.
    """

    def __init__(self, steps: Collection[int], device: torch.device) -> None:
        self._steps = frozenset(steps)
        self._on_gpu = device.type == "cuda"
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._on_streams: list[tuple[Op, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._on_host: list[tuple[Op, int, float, float]] = []

    def of(self, step: int) -> Timed | None:
        """What wraps the work of ``step``; None where it is not to be timed, and then nothing is done for it."""
        if step not in self._steps:
            return None
        if self._on_gpu and self._anchor is None:
            self._anchor = _anchor()
        return partial(self._timed, step)

    def _timed(self, step: int, op: Op, work: Work) -> Work:
        on_stream = self._on_gpu and op.engine != "cpu"
        return partial(self._run_on_stream if on_stream else self._run_on_host, step, op, work)

    def _run_on_stream(self, step: int, op: Op, work: Work) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        self._on_streams.append((op, step, start, end))

    def _run_on_host(self, step: int, op: Op, work: Work) -> None:
        start_s = time.perf_counter()
        work()
        self._on_host.append((op, step, start_s, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        """Every timed operation in order of step and priority, in seconds of the host's clock.

        Call it when the executor has drained.
        """
        found = [(op, step, start_s, end_s) for op, step, start_s, end_s in self._on_host]
        if self._anchor is not None:
            event, host_s = self._anchor
            found += [(op, step, _since(event, start) + host_s, _since(event, end) + host_s)
                      for op, step, start, end in self._on_streams]  # fmt: skip
        found.sort(key=lambda row: (row[1], row[0].priority))
        return [Interval(op.id, op.engine, start_s, end_s, step) for op, step, start_s, end_s in found]


def _anchor() -> tuple[torch.cuda.Event, float]:
    """An event and when the host saw it happen: of some tries the one that took least.

    Behind other work in the GPU's queues an event may happen late, but the host sees it at once.
    """
    stream = torch.cuda.Stream()
    tries: list[tuple[float, torch.cuda.Event, float]] = []
    for _ in range(ANCHOR_TRIES):
        event = torch.cuda.Event(enable_timing=True)
        before_s = time.perf_counter()
        event.record(stream)
        event.synchronize()
        after_s = time.perf_counter()
        tries.append((after_s - before_s, event, after_s))
    _, event, host_s = min(tries, key=lambda row: row[0])
    return event, host_s


def _since(anchor: torch.cuda.Event, event: torch.cuda.Event) -> float:
    """Seconds from ``anchor`` to ``event``."""
    return float(anchor.elapsed_time(event)) / 1e3


def make_recording(plan: Plan, hardware_id: str, program: Program, intervals: Iterable[Interval]) -> Recording:
    """Durations by what the operations did.

    Args:
        plan: of the run.
        hardware_id: of the machine that ran.
        program: whose operations the intervals are of.
        intervals: of every step that counts.
    """
    durations_s: dict[tuple[tuple[str, ...], int, int], list[float]] = {}
    steps: set[int] = set()
    for interval in intervals:
        op = program.ops[interval.op]
        steps.add(interval.step)
        if op.cost:
            durations_s.setdefault((op.cost, op.num_bytes, op.num_params), []).append(interval.duration_s)
    return Recording(
        model_id=plan.model_id, hardware_id=hardware_id, compute_dtype=plan.compute_dtype, seq_len=plan.seq_len,
        micro_batch=plan.micro_batch, loss_chunk_tokens=plan.loss_chunk_tokens, both_ways=both_ways(program),
        full_determinism=plan.full_determinism, packing=plan.packing, trainable=plan.trainable, steps=sorted(steps),
        durations=[
            TimedOp(cost=cost, num_bytes=num_bytes, num_params=num_params, duration=Timing.of(values))
            for (cost, num_bytes, num_params), values in durations_s.items()
        ],
    )  # fmt: skip
