"""``profile --from-run``: what a run measured takes the place of what the profiler measured before it.

The run's figures hold what the profiler leaves out: other work at the same time, caches as training finds them, a
machine that has become warm. Every figure that is replaced has a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from lazysched.errors import UsageError
from lazysched.schemas import Curve, Profile, Rate, Recording, TimedOp, Timing
from lazysched.schemas.recording import RECORDING_FILE

SAME_SIZE_FACTOR = 2.0
"""A point of a curve gives way to a size that the run moved within this factor of it."""
_REMEDY = "give the profile that the run's plan was solved from, or profile again"


def load_recording(run_dir: Path) -> Recording:
    """What a run left in the folder that it wrote.

    Raises:
        UsageError: there is no such folder, or the run was too short to be timed.
    """
    path = run_dir / RECORDING_FILE
    if not run_dir.is_dir():
        raise UsageError(f"from_run: {run_dir}: no such folder; name the --output-dir of a run")
    if not path.is_file():
        raise UsageError(f"from_run: {run_dir} has no {RECORDING_FILE}; train at least 3 steps, then refine")
    return Recording.load(path)


def refine(profile: Profile, recording: Recording) -> Profile:
    """``profile`` with the figures of ``recording`` in the place of its own.

    Timings of the variants that ran, update rates of the processors and formats that updated, and throughput of the
    sizes that were moved are replaced; points of a curve beyond ``SAME_SIZE_FACTOR`` of any such size stay.

    Raises:
        UsageError: the run was of another model, machine or shape, or used what the profile does not have.
    """
    _check_same(profile, recording)
    return _Refinement(profile, recording).run()


def _check_same(profile: Profile, recording: Recording) -> None:
    for field in (
        "model_id", "hardware_id", "compute_dtype", "seq_len", "loss_chunk_tokens", "packing", "trainable",
        "full_determinism",
    ):  # fmt: skip
        theirs, ours = getattr(recording, field), getattr(profile, field)
        if theirs != ours:
            raise UsageError(f"from_run: {field}: the run had {theirs}, the profile has {ours}; {_REMEDY}")


class _Refinement:
    """Copies of what changes, until ``run`` puts them into a new profile."""

    def __init__(self, profile: Profile, recording: Recording) -> None:
        self.profile, self.recording = profile, recording
        self.variants = {key: {size: [*found] for size, found in by.items()} for key, by in profile.variants.items()}
        self.links, self.update = dict(profile.links), {key: dict(value) for key, value in profile.update.items()}
        self.beside_copies = dict(profile.update_beside_copies)
        self.notes = dict(profile.notes)

    def run(self) -> Profile:
        """The refined profile, validated anew."""
        by_cost = _by_cost(self.recording.durations)
        for cost in sorted(by_cost, key=lambda cost: cost[0] != "link"):  # variants read a refined link
            timed = by_cost[cost]
            match cost:
                case ("variant", structure, name, "forward" | "backward" as direction):
                    self._variant(structure, name, direction, timed)
                case ("link", link):
                    self._link(link, timed)
                case ("update", "cpu" | "gpu" as processor, state_format):
                    self._update(processor, state_format, timed)
                case _:
                    raise UsageError(f"from_run: {RECORDING_FILE}: durations: cost {cost} is not known; train again")
        changed = {
            "variants": self.variants, "links": self.links, "update": self.update,
            "update_beside_copies": self.beside_copies, "notes": self.notes,
        }  # fmt: skip
        return Profile.model_validate(self.profile.model_copy(update=changed).model_dump())

    def _note(self, figure: str, repeats: int) -> None:
        rows, steps = self.recording.micro_batch, len(self.recording.steps)
        self.notes[f"refined.{figure}"] = f"{repeats} repeats in {steps} steps of a run, micro-batches of {rows} rows"

    def _variant(
        self, structure: str, name: str, direction: Literal["forward", "backward"], timed: Sequence[TimedOp]
    ) -> None:
        size = self.recording.micro_batch
        where = f"variants.{structure}.{size}.{name}"
        listed = self.variants.get(structure, {}).get(size, [])
        position = next((index for index, variant in enumerate(listed) if variant.name == name), None)
        if position is None:
            raise UsageError(f"from_run: the profile has no {where}, which the run used; {_REMEDY}")
        repeats = sum(op.duration.repeats for op in timed)
        seconds = sum((op.duration.seconds - self._added_s(op)) * op.duration.repeats for op in timed) / repeats
        spread_s = sum(op.duration.spread_s * op.duration.repeats for op in timed) / repeats
        duration = Timing(median_s=max(0.0, seconds), spread_s=spread_s, repeats=repeats)
        listed[position] = listed[position].model_copy(update={direction: duration})
        self._note(f"{where}.{direction}", repeats)

    def _added_s(self, op: TimedOp) -> float:
        """What an operation took to add gradients up, which a variant's times leave out."""
        curve = self.links.get("gpu")
        return curve.seconds(op.num_bytes) if op.num_bytes and curve is not None and curve.points else 0.0

    def _link(self, link: str, timed: Sequence[TimedOp]) -> None:
        """Refine the curve that the simulator reads for this run, which is another one where both ways were busy."""
        both = self.links.get(f"{link}_both")
        name = f"{link}_both" if self.recording.both_ways and both is not None and both.points else link
        seen = {
            op.num_bytes: op.num_bytes / op.duration.seconds for op in timed if op.num_bytes and op.duration.seconds
        }
        if name not in self.links:
            raise UsageError(f"from_run: the profile has no links.{name}, which the run used; {_REMEDY}")
        if seen:
            self.links[name] = _curve_through(self.links[name], seen)
            self._note(f"links.{name}", sum(op.duration.repeats for op in timed if op.num_bytes in seen))

    def _update(self, processor: Literal["cpu", "gpu"], state_format: str, timed: Sequence[TimedOp]) -> None:
        """The rate over all stages that were updated, each as often as it was, with the copies that ran beside it."""
        rates = self.update.get(processor, {})
        if state_format not in rates:
            raise UsageError(f"from_run: the profile has no update.{processor}.{state_format}; {_REMEDY}")
        num_params = sum(op.num_params * op.duration.repeats for op in timed)
        seconds = sum(op.duration.seconds * op.duration.repeats for op in timed)
        spread_s = sum(op.duration.spread_s * op.duration.repeats for op in timed)
        if num_params and seconds:
            repeats = sum(op.duration.repeats for op in timed)
            rates[state_format] = Rate(per_s=num_params / seconds, spread=spread_s / seconds, repeats=repeats)
            if processor == "cpu":
                self.beside_copies.pop(state_format, None)  # what copies cost is in the rate now
            self._note(f"update.{processor}.{state_format}", repeats)


def _by_cost(durations: Iterable[TimedOp]) -> dict[tuple[str, ...], list[TimedOp]]:
    by_cost: dict[tuple[str, ...], list[TimedOp]] = {}
    for op in durations:
        by_cost.setdefault(op.cost, []).append(op)
    return by_cost


def _curve_through(curve: Curve, seen: dict[int, float]) -> Curve:
    """``curve`` through the rates at the sizes ``seen``, its own points left out where they are near one of them."""
    kept = [
        (size, rate)
        for size, rate in curve.points
        if not any(other / SAME_SIZE_FACTOR <= size <= other * SAME_SIZE_FACTOR for other in seen)
    ]
    return Curve(points=sorted([*kept, *seen.items()]))
