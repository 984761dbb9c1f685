"""Replay of a program: an independent prediction of its time and memory.

``solver.replay`` says when each operation runs; its duration comes from the profile by its cost key. Nothing of the
mixed-integer program is used here, so that the one can be held against the other.

On a CPU all engines are one thread (``InlineEngines`` of the runtime): operations run one after the other, and whatever
is not compute is exposed.

A copy between host and GPU takes the curve measured with both directions busy where the program keeps both busy
(``lazysched.timeline.both_ways``); otherwise the curve of its direction alone. An update on the host goes at the rate
measured alone while nothing is copied, at the one measured beside copies while both directions are busy, and half way
between while one is.

Where files are used, steps can take turns at two lengths and more for ever, and the first few are no guide. Then more
are simulated (``STEADY_STEPS``, ``MAX_STEPS`` where these are not steady), and the step time, and what is exposed of
it, are means over the period in which their lengths repeat; where none shows, over the last ``MAX_PERIOD`` steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazysched.errors import UsageError
from lazysched.layout import mapping_bytes
from lazysched.lower import lower
from lazysched.schemas import Curve, Engine, Op, Plan, Prediction, Profile, Program, Rate, SaveVariant, Tier
from lazysched.solver.pins import parse_pins
from lazysched.solver.replay import replay, replay_in_line
from lazysched.timeline import (
    FILE_ENGINES,
    Interval,
    both_ways,
    compute_end_s,
    exposed_of_step,
    intervals_by_step,
    moved_bytes,
)

if TYPE_CHECKING:
    import pandas as pd


SIMULATED_STEPS = 4
"""Consecutive steps, of which the last is looked at."""
STEADY_STEPS, MAX_STEPS, MAX_PERIOD = 8, 40, 8
"""Where files are used: steps at first, steps where these are not steady, and steps after which lengths may repeat."""
SAME = 1e-6
"""Share of a step by which two equal ones may differ."""


@dataclass(frozen=True)
class Timeline:
    """What a replay saw; per-step figures are those of its last step, or means over the period in which steps repeat.

    Attributes:
        step_s: steady time of one step: mean distance between the ends of the last steps on ``compute``.
        exposed_s: engine -> time in which ``compute`` waited for it in a step.
        moved_bytes: engine -> bytes moved per step.
        peak_bytes: tier -> most bytes at once; for ``gpu`` context and fragmentation are in it.
        pinned_bytes: what has to be page-locked of the host's.
        intervals: every operation of every step, in order of step and priority.
    """

    step_s: float
    exposed_s: dict[Engine, float]
    moved_bytes: dict[Engine, int]
    peak_bytes: dict[Tier, int]
    pinned_bytes: int
    intervals: list[Interval]

    def to_frame(self) -> pd.DataFrame:
        """One row per operation and step: ``op engine start_s end_s step``, as a Gantt chart wants them."""
        import pandas as pd

        return pd.DataFrame(self.intervals, columns=list(Interval._fields))

    def prediction(self) -> Prediction:
        """The summary that a plan carries."""
        return Prediction(
            step_s=self.step_s, exposed_s=self.exposed_s, moved_bytes=self.moved_bytes, peak_bytes=self.peak_bytes
        )


def simulate_plan(plan: Plan, profile: Profile | None = None, *, steps: int = SIMULATED_STEPS) -> Timeline:
    """Lower ``plan`` and replay it.

    Args:
        plan: the decisions.
        profile: of the machine to be; None: the one that the plan was solved from.
        steps: at least 2; the last two are compared. Where files are used, more are simulated if it takes more.

    Raises:
        UsageError: there is no profile, it is of another model, shape, dtype or of other parameters trained, or it has
            no figure for what the plan does; or the plan has pins that are none.
    """
    measured = profile or plan.profile
    if measured is None:
        raise UsageError("plan: profile: null, as in a plan written by hand; name one with --profile")
    if measured.model_id != plan.model_id:
        raise UsageError(
            f"profile: model_id: measured with {measured.model_id}, the plan is for {plan.model_id}; name another"
        )
    _check_same_shape(measured, plan)
    program = lower(plan, measured.stages)
    parse_pins(plan.pins, measured.stages)  # none of them is used here, but nonsense should not wait for ``explain``
    return simulate(program, measured, micro_batch=plan.micro_batch, steps=steps)


def _check_same_shape(measured: Profile, plan: Plan) -> None:
    """Refuse a profile whose times are those of other tensors than the plan has."""
    if set(measured.trainable) != set(plan.trainable):
        theirs, ours = (", ".join(names) or "everything" for names in (measured.trainable, plan.trainable))
        raise UsageError(f"profile: trainable: measured with {theirs} trained, the plan trains {ours}; name another")
    for field in ("seq_len", "compute_dtype", "loss_chunk_tokens", "packing"):
        found, needed = getattr(measured, field), getattr(plan, field)
        if found != needed:
            raise UsageError(f"profile: {field}: measured with {found}, the plan is for {needed}; name another")


def simulate(program: Program, profile: Profile, *, micro_batch: int, steps: int = SIMULATED_STEPS) -> Timeline:
    """Replay ``steps`` consecutive steps of ``program`` with the durations of ``profile``.

    Args:
        program: one step, with edges that wrap into the next.
        profile: where durations come from.
        micro_batch: rows that go through a stage at once; selects the variants.
        steps: at least 2; the last two are compared. Where files are used, more are simulated if it takes more.

    Raises:
        UsageError: the profile has no figure for an operation of the program.
    """
    if steps < 2:
        raise UsageError(f"steps: {steps} is too few to see a steady step; use at least 2")
    durations = _Durations(program, profile, micro_batch)
    duration_s = {op.id: durations.seconds(op) for op in program.ops.values()}
    in_line = profile.device == "cpu"

    def intervals_of(count: int) -> list[Interval]:
        if in_line:
            return replay_in_line(program, duration_s, count)
        return replay(program, duration_s, count, durations.slowdowns())

    if not in_line and any(op.engine in FILE_ENGINES for op in program.ops.values()):
        intervals, period = _steady(intervals_of, steps)
    else:
        intervals, period = intervals_of(steps), 1
    by_step = intervals_by_step(intervals)
    last = max(by_step)
    exposed = [
        exposed_of_step(program, by_step[k], by_step[k - 1], in_line=in_line)
        for k in range(last - period + 1, last + 1)
    ]
    engines: dict[Engine, None] = dict.fromkeys(engine for one in exposed for engine in one)
    return Timeline(
        step_s=(compute_end_s(by_step[last]) - compute_end_s(by_step[last - period])) / period,
        exposed_s={engine: sum(one.get(engine, 0.0) for one in exposed) / period for engine in engines},
        moved_bytes=moved_bytes(program.ops.values()),
        peak_bytes=peak_bytes(program, profile, micro_batch),
        pinned_bytes=pinned_bytes(program),
        intervals=intervals,
    )


def _steady(intervals_of: Callable[[int], list[Interval]], steps: int) -> tuple[list[Interval], int]:
    """Intervals of enough steps, and after how many of the last ones their lengths repeat."""
    few = max(steps, STEADY_STEPS)
    intervals = intervals_of(few)
    if period_of(_lengths_s(intervals), 1) == 1:
        return intervals, 1
    intervals = intervals_of(max(steps, MAX_STEPS))
    return intervals, period_of(_lengths_s(intervals), MAX_PERIOD) or MAX_PERIOD


def _lengths_s(intervals: Iterable[Interval]) -> list[float]:
    """Of all steps but the first, from end to end on ``compute``."""
    by_step = intervals_by_step(intervals)
    return [compute_end_s(by_step[k]) - compute_end_s(by_step[k - 1]) for k in range(1, len(by_step))]


def period_of(lengths_s: Sequence[float], most: int) -> int | None:
    """The least number of steps after which the last ones repeat, seen three times; None where it is above ``most``."""
    for period in range(1, min(most, len(lengths_s) // 3) + 1):
        last = lengths_s[-3 * period :]
        if all(abs(a - b) <= SAME * b for a, b in zip(last, last[period:], strict=False)):
            return period
    return None


class _Durations:
    """Looks up an operation's cost key in the profile."""

    def __init__(self, program: Program, profile: Profile, micro_batch: int) -> None:
        self.program, self.profile = program, profile
        self.micro_batch = micro_batch
        self.both_ways = both_ways(program)
        self.variants: dict[tuple[str, str], SaveVariant] = {}

    def seconds(self, op: Op) -> float:
        """Duration of ``op``."""
        match op.cost:
            case ():
                return 0.0
            case ("variant", structure, name, direction):
                return self._variant(structure, name, direction) + self._added_s(op)
            case ("link", link):
                return self._curve(link).seconds(op.num_bytes)
            case ("update", processor, state_format):
                return op.num_params / self._rate(processor, state_format)
        raise AssertionError(f"{op.id}: unknown cost {op.cost}")

    def slowdowns(self) -> dict[str, float]:
        """Operation id -> seconds that an update on the host loses for each second that one direction copies."""
        return {
            op.id: self.profile.copy_slowdown(op.cost[2])
            for op in self.program.ops.values()
            if op.engine == "cpu" and op.kind == "update"
        }

    def _added_s(self, op: Op) -> float:
        """Time to add gradients up, which the variants' times leave out: it depends on the accumulation."""
        return self._curve("gpu").seconds(op.num_bytes) if op.num_bytes else 0.0

    def _variant(self, structure: str, name: str, direction: str) -> float:
        listed = self.profile.variants.get(structure, {}).get(self.micro_batch, [])
        variant = next((v for v in listed if v.name == name), None)
        where = f"profile: variants.{structure}.{self.micro_batch}.{name}"
        if variant is None:
            raise UsageError(f"{where}: missing; profile this micro-batch")
        timing = variant.forward if direction == "forward" else variant.backward
        if timing.median_s is None:
            raise UsageError(f"{where}.{direction}: not measured ({timing.reason}); profile again")
        return timing.median_s

    def _curve(self, link: str) -> Curve:
        both = self.profile.links.get(f"{link}_both")
        if self.both_ways and both is not None and both.points:
            return both
        curve = self.profile.links.get(link)
        if curve is None or not curve.points:
            reason = "missing" if curve is None else curve.reason
            raise UsageError(f"profile: links.{link}: not measured ({reason}); profile again")
        return curve

    def _rate(self, processor: str, state_format: str) -> float:
        rates: Mapping[str, Mapping[str, Rate]] = {str(key): value for key, value in self.profile.update.items()}
        rate = rates.get(processor, {}).get(state_format)
        if rate is None or rate.per_s is None:
            reason = "missing" if rate is None else rate.reason
            raise UsageError(f"profile: update.{processor}.{state_format}: not measured ({reason}); profile again")
        return rate.per_s


def peak_bytes(program: Program, profile: Profile, micro_batch: int) -> dict[Tier, int]:
    """Tier -> most bytes at once, the GPU's with fragmentation, driver context and its tables of page-locked memory."""
    peaks: dict[Tier, int] = {"gpu": 0, "host": 0, "nvme": 0}
    for tier in peaks:
        peaks[tier] = _peak_of_tier(program, tier)
    peaks["gpu"] += profile.fragmentation_bytes.get(micro_batch, 0) + profile.context_bytes
    if profile.device == "cuda":
        peaks["gpu"] += mapping_bytes(pinned_bytes(program))
    return peaks


def pinned_bytes(program: Program) -> int:
    """Host memory that has to be page-locked."""
    return sum(buffer.num_bytes for buffer in program.buffers.values() if buffer.pinned)


def _peak_of_tier(program: Program, tier: Tier) -> int:
    """Walk the lifetimes in order of priority."""
    alloc: dict[str, int] = defaultdict(int)
    free: dict[str, int] = defaultdict(int)
    live = 0
    for buffer in program.buffers.values():
        if buffer.tier != tier:
            continue
        if buffer.alloc_at is None:
            live += buffer.num_bytes
            continue
        alloc[buffer.alloc_at] += buffer.num_bytes
        if buffer.free_after is not None:
            free[buffer.free_after] += buffer.num_bytes
    peak = live
    for op in program.ops.values():
        live += alloc[op.id]
        peak = max(peak, live + (op.working_bytes if tier == "gpu" else 0))
        live -= free[op.id]
    return peak
