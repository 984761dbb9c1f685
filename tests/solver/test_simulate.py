"""Programs made by hand, with answers known by hand."""

from __future__ import annotations

import pytest

from lazysched.errors import UsageError
from lazysched.schemas import Buffer, Curve, Op, Program, Rate, SaveVariant, Timing
from lazysched.solver import simulate, simulate_plan, solve
from lazysched.solver.simulate import period_of
from tests.solver.synthetic import tiny_profile

MB = 1_000_000


def op(op_id: str, engine: str, **fields: object) -> Op:
    kind = {"compute": "forward", "cpu": "update"}.get(engine, "copy")
    return Op.model_validate({"id": op_id, "kind": kind, "engine": engine, "priority": 0, **fields})


def program(ops: list[Op], edges: list[tuple[str, str, int]], buffers: list[Buffer] | None = None) -> Program:
    return Program(plan_hash="", ops={o.id: o for o in ops}, edges=edges, buffers={b.id: b for b in buffers or []})


FORWARD = ("variant", "block", "all", "forward")  # 10 ms
UPLOAD = ("link", "h2d")  # 1 ms per MB
UPDATE = ("update", "cpu", "fp32")  # 10 ms per million parameters


class TestTime:
    def test_an_upload_hides_behind_compute_but_for_what_is_longer(self) -> None:
        ops = [
            op("load", "h2d", cost=UPLOAD, num_bytes=14 * MB),
            op("forward/0", "compute", cost=FORWARD),
            op("forward/1", "compute", cost=FORWARD),
        ]
        timeline = simulate(
            program(ops, [("load", "forward/1", 0), ("forward/1", "load", 1)]), tiny_profile(), micro_batch=1
        )
        # load 0-14, forward/1 14-24; the next load waits for forward/1: 24-38 while forward/0 runs 24-34.
        assert timeline.step_s == pytest.approx(0.024)
        assert timeline.exposed_s == {"h2d": pytest.approx(0.004)}
        assert timeline.moved_bytes == {"h2d": 14 * MB}

    def test_engines_keep_the_order_of_the_program(self) -> None:
        ops = [
            op("late", "h2d", cost=UPLOAD, num_bytes=5 * MB),
            op("early", "h2d", cost=UPLOAD, num_bytes=5 * MB),
            op("forward", "compute", cost=FORWARD),
        ]
        timeline = simulate(program(ops, [("early", "forward", 0)]), tiny_profile(), micro_batch=1)
        first = timeline.to_frame().query("step == 0").set_index("op")
        assert first.loc["forward", "start_s"] == pytest.approx(0.010)

    def test_on_a_cpu_everything_is_one_thread(self) -> None:
        ops = [
            op("load", "h2d", cost=UPLOAD, num_bytes=14 * MB),
            op("forward", "compute", cost=FORWARD),
            op("update", "cpu", cost=UPDATE, num_params=3 * MB),
        ]
        profile = tiny_profile().model_copy(update={"device": "cpu"})
        timeline = simulate(program(ops, []), profile, micro_batch=1)
        assert timeline.step_s == pytest.approx(0.014 + 0.010 + 0.030)
        assert timeline.exposed_s == {"h2d": pytest.approx(0.014), "cpu": pytest.approx(0.030)}

    def test_the_next_step_waits_for_the_update_that_wraps(self) -> None:
        ops = [op("forward", "compute", cost=FORWARD), op("update", "cpu", cost=UPDATE, num_params=3 * MB)]
        edges = [("forward", "update", 0), ("update", "forward", 1)]
        timeline = simulate(program(ops, edges), tiny_profile(), micro_batch=1)
        assert timeline.step_s == pytest.approx(0.040)
        assert timeline.exposed_s == {"cpu": pytest.approx(0.030)}

    def test_both_ways_curve_counts_only_when_both_ways_are_busy(self) -> None:
        profile = tiny_profile()
        links = {**profile.links, "h2d_both": Curve(points=[(1, 0.5e9)]), "d2h_both": Curve(points=[(1, 0.5e9)])}
        profile = profile.model_copy(update={"links": links})
        up = op("up", "h2d", cost=UPLOAD, num_bytes=10 * MB)
        forward = op("forward", "compute")
        for down_bytes, expected_s in ((12, 0.010), (10 * MB, 0.020)):
            down = op("down", "d2h", cost=("link", "d2h"), num_bytes=down_bytes)
            edges = [("up", "forward", 0), ("forward", "up", 1)]
            timeline = simulate(program([up, down, forward], edges), profile, micro_batch=1)
            assert timeline.step_s == pytest.approx(expected_s)

    def test_an_update_slows_down_while_copies_run_beside_it(self) -> None:
        profile = tiny_profile().model_copy(update={"update_beside_copies": {"fp32": Rate(per_s=50e6)}})
        # Alone 10 ms; each direction that copies takes half a second of every second from it.
        ops = [
            op("up", "h2d", cost=UPLOAD, num_bytes=6 * MB),
            op("down", "d2h", cost=("link", "d2h"), num_bytes=3 * MB),
            op("update", "cpu", cost=UPDATE, num_params=MB),
        ]
        edges = [("update", "up", 1), ("update", "down", 1)]
        first = simulate(program(ops, edges), profile, micro_batch=1).to_frame().query("step == 0").set_index("op")
        # 3 ms at half speed, 3 ms at two thirds of it, then 6.5 ms alone.
        assert first.loc["down", "end_s"] == pytest.approx(0.003)
        assert first.loc["update", "end_s"] == pytest.approx(0.003 + 0.003 + (0.010 - 0.003 / 2 - 0.003 / 1.5))

    def test_an_order_that_contradicts_the_edges_is_refused(self) -> None:
        ops = [op("a", "compute", cost=FORWARD), op("b", "compute", cost=FORWARD)]
        with pytest.raises(ValueError, match="a never starts"):
            simulate(program(ops, [("b", "a", 0)]), tiny_profile(), micro_batch=1)

    def test_copies_of_ordinary_memory_take_their_own_curves(self) -> None:
        profile = tiny_profile()
        slow = {"h2d_pageable": Curve(points=[(1, 0.25e9)]), "h2d_pageable_both": Curve(points=[(1, 0.125e9)])}
        profile = profile.model_copy(
            update={"links": {**profile.links, **slow, "d2h_pageable": Curve(points=[(1, 1e9)])}}
        )
        up = op("up", "h2d", cost=("link", "h2d_pageable"), num_bytes=10 * MB)
        forward = op("forward", "compute")
        edges = [("up", "forward", 0), ("forward", "up", 1)]
        for down_bytes, expected_s in ((12, 0.040), (10 * MB, 0.080)):
            down = op("down", "d2h", cost=("link", "d2h_pageable"), num_bytes=down_bytes)
            timeline = simulate(program([up, down, forward], edges), profile, micro_batch=1)
            assert timeline.step_s == pytest.approx(expected_s)


class TestMemory:
    def test_what_is_page_locked_is_counted(self) -> None:
        sizes = {"weights": (7, True), "grads": (5, True), "state": (100, False)}
        buffers = [
            Buffer(id=f"host/{kind}/x", tier="host", kind=kind, num_bytes=size, pinned=pinned)
            for kind, (size, pinned) in sizes.items()
        ]
        timeline = simulate(program([op("a", "compute")], [], buffers), tiny_profile(), micro_batch=1)
        assert timeline.pinned_bytes == 12

    def test_peak_is_where_lifetimes_and_working_sets_meet(self) -> None:
        ops = [op("a", "compute", working_bytes=5), op("b", "compute", working_bytes=40), op("c", "compute")]
        buffers = [
            Buffer(id="gpu/static/x", tier="gpu", kind="static", num_bytes=100),
            Buffer(id="gpu/saved/y", tier="gpu", kind="saved", num_bytes=30, alloc_at="a", free_after="b"),
            Buffer(id="gpu/saved/z", tier="gpu", kind="saved", num_bytes=60, alloc_at="c", free_after="c"),
            Buffer(id="host/weights/x", tier="host", kind="weights", num_bytes=7),
        ]
        timeline = simulate(program(ops, [], buffers), tiny_profile(), micro_batch=1)
        assert timeline.peak_bytes == {"gpu": 170, "host": 7, "nvme": 0}

    def test_context_and_fragmentation_are_in_the_gpu_peak(self) -> None:
        profile = tiny_profile().model_copy(update={"context_bytes": 1000, "fragmentation_bytes": {1: 13, 2: 99}})
        buffers = [Buffer(id="gpu/static/x", tier="gpu", kind="static", num_bytes=100)]
        timeline = simulate(program([op("a", "compute")], [], buffers), profile, micro_batch=1)
        assert timeline.peak_bytes["gpu"] == 113 + 1000

    def test_page_locked_memory_takes_8_bytes_of_the_gpu_a_page(self) -> None:
        buffers = [
            Buffer(id=f"host/{kind}/x", tier="host", kind=kind, num_bytes=4096 * 1000, pinned=pinned)
            for kind, pinned in (("weights", True), ("state", False))
        ]
        run = program([op("a", "compute")], [], buffers)
        on_gpu, profile = (tiny_profile().model_copy(update={"device": device}) for device in ("cuda", "cpu"))
        assert simulate(run, on_gpu, micro_batch=1).peak_bytes["gpu"] == 8 * 1000
        assert simulate(run, profile, micro_batch=1).peak_bytes["gpu"] == 0


class TestRefusals:
    def test_a_missing_figure_is_named(self) -> None:
        run = program([op("u", "cpu", cost=UPDATE, num_params=1)], [])
        profile = tiny_profile()
        unknown = {"cpu": {"fp32": Rate(per_s=None, reason="no time")}, "gpu": profile.update["gpu"]}
        with pytest.raises(UsageError, match=r"update\.cpu\.fp32: not measured \(no time\)"):
            simulate(run, profile.model_copy(update={"update": unknown}), micro_batch=1)
        with pytest.raises(UsageError, match=r"variants\.block\.3\.all: missing"):
            simulate(program([op("f", "compute", cost=FORWARD)], []), profile, micro_batch=3)

    def test_an_unmeasured_variant_is_named(self) -> None:
        profile = tiny_profile()
        broken = SaveVariant(
            name="all", saved={"input": 1}, forward=Timing(median_s=None, reason="out of memory"),
            backward=Timing(median_s=1.0), working_forward_bytes=0, working_backward_bytes=0,
        )  # fmt: skip
        profile = profile.model_copy(update={"variants": {"block": {1: [broken]}}})
        with pytest.raises(UsageError, match=r"all\.forward: not measured \(out of memory\)"):
            simulate(program([op("f", "compute", cost=FORWARD)], []), profile, micro_batch=1)

    def test_one_step_shows_no_steady_state(self) -> None:
        with pytest.raises(UsageError, match="steps"):
            simulate(program([op("a", "compute")], []), tiny_profile(), micro_batch=1, steps=1)


class TestSteady:
    def test_the_period_in_which_steps_repeat(self) -> None:
        assert period_of([5.0, 2.0, 1.0, 1.0, 1.0], 8) == 1
        assert period_of([9.0, *[1.0, 2.0] * 4], 8) == 2
        assert period_of([9.0, *[1.0, 1.0, 2.0] * 3], 8) == 3
        assert period_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 8) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("seq_len", 64), ("compute_dtype", "bfloat16"), ("loss_chunk_tokens", 512)],
)
def test_times_of_other_tensors_are_no_prediction(field: str, value: object) -> None:
    profile = tiny_profile()
    plan = solve(profile, batch_size=1).plan
    with pytest.raises(
        UsageError, match=rf"^profile: {field}: measured with {value}, the plan is for .*; name another$"
    ):
        simulate_plan(plan, profile.model_copy(update={field: value}))
    assert plan.predicted is not None
    assert simulate_plan(plan, profile).step_s == plan.predicted.step_s
