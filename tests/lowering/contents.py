"""What a step of training must find where: an independent replay of a program in its order, with versions.

Every buffer holds facts, as ``("weights", "block.0", 1)``: the weights after one update. An operation must find the
facts that the mathematics of the step needs, in what it reads, and says which facts it leaves. Nothing of lowering is
used but the names of operations, and of the buffers in which a stage lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lazysched.schemas import Op, Plan, Program, Stage

Fact = tuple[object, ...]


class Replay:
    """Replays consecutive steps; ``AssertionError`` where an operation does not find what it needs.

    Args:
        program: of training.
        plan: it was lowered from.
        stages: of the model.
    """

    def __init__(self, program: Program, plan: Plan, stages: Sequence[Stage]) -> None:
        self.program, self.plan, self.stages = program, plan, stages
        self.place = {stage.id: index for index, stage in enumerate(stages)}
        self.trained = {stage.id: stage.is_trained for stage in stages}
        self.first = next(index for index, stage in enumerate(stages) if stage.is_trained)
        self.tied = stages[-1].shares is not None
        self.step = 0
        self.holds: dict[str, set[Fact]] = {"host/batch": set()}
        for stage in stages:
            choice = plan.stages[stage.id]
            home = "nvme" if choice.weights == "nvme" else "gpu" if choice.state == "gpu" else "host"
            self.holds[f"{home}/weights/{stage.id}"] = {("weights", stage.id, 0)}
            if stage.is_trained:
                self.holds[f"{choice.state}/state/{stage.id}"] = {("state", stage.id, 0)}

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            for op in self.program.ops.values():
                assert {*op.reads, *op.writes} <= set(self.program.buffers), op.id
                for buffer in op.reads:
                    assert buffer in self.holds, f"{op.id} reads {buffer}, which nobody wrote"
                getattr(self, f"_{op.kind}")(op)
        for stage in self.stages:  # what a step leaves behind is in the stage's own store
            choice = self.plan.stages[stage.id]
            home = "nvme" if choice.weights == "nvme" else "gpu" if choice.state == "gpu" else "host"
            updates = steps if stage.is_trained else 0
            assert self.holds[f"{home}/weights/{stage.id}"] == {("weights", stage.id, updates)}
            if stage.is_trained:
                assert self.holds[f"{choice.state}/state/{stage.id}"] == {("state", stage.id, steps)}

    def _found(self, buffers: Iterable[str]) -> set[Fact]:
        return {fact for buffer in buffers for fact in self.holds[buffer]}

    def _need(self, op: Op, *facts: Fact) -> None:
        missing = set(facts) - self._found(op.reads)
        assert not missing, f"step {self.step}: {op.id} does not find {missing}"

    def _leave(self, op: Op, kind: str, *facts: Fact) -> None:
        """Facts go to the only buffer of that kind that the operation writes, which must be there."""
        [target] = [buffer for buffer in op.writes if buffer.split("/")[1] == kind]
        self.holds[target] = set(facts)

    def _now(self, kind: str, stage: str) -> Fact:
        """Of a frozen stage the weights are always the first."""
        return (kind, stage, self.step if kind != "weights" or self.trained[stage] else 0)

    def _hidden(self, place: int, op: Op) -> Fact:
        return ("hidden", place, op.micro_batch, self.step)

    def _grad(self, place: int, op: Op) -> Fact:
        return ("grad", place, op.micro_batch, self.step)

    def _saved(self, op: Op, away: bool) -> list[Fact]:
        """What the stage of ``op`` saves beside its input, on the GPU or elsewhere."""
        tiers = self.plan.stages[op.stage or ""].saved_tiers
        groups = [group for group, tier in tiers.items() if (tier != "gpu") == away]
        return [("saved", op.stage, group, op.micro_batch, self.step) for group in groups]

    # ---- copies

    def _copy(self, op: Op) -> None:
        assert all(op.num_bytes <= self.program.buffers[target].num_bytes for target in op.writes), op.id
        if op.id == "batch":
            self.holds["gpu/batch"] = {("batch", self.step)}
            return
        facts = self._found(op.reads)
        if op.id.startswith("load/"):
            assert facts == {self._now("weights", op.stage or "")}, op.id
        elif op.id.startswith(("save/", "fetch/")):
            choice = self.plan.stages[op.stage or ""]
            input_leaves = [self._hidden(self.place[op.stage or ""], op)] if choice.input_tier != "gpu" else []
            facts &= {*self._saved(op, away=True), *input_leaves}
            assert facts == {*self._saved(op, away=True), *input_leaves}, f"{op.id} finds {facts}"
        self.holds[op.writes[0]] = facts

    def _read(self, op: Op) -> None:
        assert {buffer.split("/")[0] for buffer in op.reads} == {"nvme"}
        assert op.num_bytes == sum(self.program.buffers[source].num_bytes for source in op.reads)
        assert op.num_bytes <= self.program.buffers[op.writes[0]].num_bytes
        self.holds[op.writes[0]] = self._found(op.reads)

    def _write(self, op: Op) -> None:
        assert {buffer.split("/")[0] for buffer in op.writes} == {"nvme"}
        assert op.num_bytes == sum(self.program.buffers[target].num_bytes for target in op.writes)
        assert op.num_bytes <= self.program.buffers[op.reads[0]].num_bytes
        for target in op.writes:
            kind = target.split("/")[1]
            found = self._found(op.reads)
            self.holds[target] = found if kind == "saved" else {fact for fact in found if fact[0] == kind}

    # ---- compute

    def _forward(self, op: Op) -> None:
        stage, place = op.stage or "", self.place[op.stage or ""]
        self._need(op, self._now("weights", stage), self._hidden(place, op) if place else ("batch", self.step))
        kinds = {buffer.split("/")[1] for buffer in op.writes}
        if op.kind == "forward" and self.plan.stages[stage].segment > 1:
            assert kinds == {"hidden"}
        self._leave(op, "hidden", self._hidden(place + 1, op))
        for kind, away in (("saved", False), ("outgoing", True)):
            if kind in kinds:
                self._leave(op, kind, *self._saved(op, away))

    _recompute = _forward

    def _loss(self, op: Op) -> None:
        place, last = self.place["head"], ["embed"] if self.tied else []
        weights = [self._now("weights", stage) for stage in ["head", *last]]
        self._need(op, *weights, self._hidden(place, op), ("batch", self.step))
        self._leave(op, "hidden", self._grad(place, op))
        self.holds["gpu/loss"] = {("loss", self.step)}
        own = ["gpu/accumulator/head" if self.tied else "gpu/accumulator/vocabulary"] if self.trained["head"] else []
        shared = ["gpu/accumulator/shared"] if self.tied and self.trained["embed"] else []
        assert {*own, *shared} == {buffer for buffer in op.writes if buffer.startswith("gpu/accumulator/")}
        for target in [*own, *shared]:
            self._add(op, target, "shared" if target.endswith("shared") else "head")

    def _backward(self, op: Op) -> None:
        stage, place = op.stage or "", self.place[op.stage or ""]
        assert place >= self.first, f"{op.id}: nothing is trained there or before"
        self._need(op, self._grad(place + 1, op))
        if place:
            self._need(op, self._now("weights", stage), self._hidden(place, op))
            self._need(op, *self._saved(op, away=False), *self._saved(op, away=True))
            self._leave(op, "hidden", self._grad(place, op))
        else:
            self._need(op, ("batch", self.step))
        if self.trained[stage]:
            self._add(op, op.writes[-1], stage)
        else:
            assert len(op.writes) == 1

    def _add(self, op: Op, target: str, stage: str) -> None:
        m = op.micro_batch
        assert m == 0 or self.holds[target] == {("sum", stage, self.step, m)}, op.id
        self.holds[target] = {("sum", stage, self.step, (m or 0) + 1)}

    def _whole(self, stage: str) -> Fact:
        return ("sum", stage, self.step, self.plan.accumulation)

    def _accumulate(self, op: Op) -> None:
        self._need(op, self._whole("shared"))
        assert self.holds[op.writes[0]] == {self._whole("embed")}

    def _norm(self, op: Op) -> None:
        assert self.trained[op.stage or ""]
        self._need(op, self._whole(op.stage or ""))
        self.holds.setdefault("gpu/norms", set())
        self.holds[op.writes[-1] if len(op.writes) > 1 else op.reads[0]] = {self._whole(op.stage or "")}

    def _totals(self, op: Op) -> None:
        self.holds["gpu/totals"] = {("totals", self.step)}

    def _scale(self, op: Op) -> None:
        self.holds["gpu/scale"] = {("scale", self.step)}

    def _update(self, op: Op) -> None:
        stage = op.stage or ""
        self._need(op, self._whole(stage), ("scale", self.step))
        found = self._found(op.writes)
        assert found == {self._now("weights", stage), self._now("state", stage)}, f"{op.id} finds {found}"
        for target in op.writes:
            self.holds[target] = {(kind, stage, self.step + 1) for kind, *_ in self.holds[target]}
