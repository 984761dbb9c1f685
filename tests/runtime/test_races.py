"""Nothing but the program's edges keeps engines apart: they suffice whoever lags, and without any of them data break.

On a CPU the engines of the product run in line; here each has a thread of its own. Results must be those of the serial
order to the bit. The same on a GPU stands at the end, with streams and the product's engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazysched.lower import lower
from lazysched.runtime.engines import CudaEngines
from lazysched.runtime.executor import Executor
from lazysched.runtime.session import Session
from lazysched.schemas import Op, Program
from tests.runtime.fake_streams import current_stream, fake_streams, launched
from tests.runtime.race_plans import (
    HARMLESS,
    KINDS,
    Case,
    Edge,
    Kind,
    examples_of,
    fixed_plans,
    kind_of,
    matters,
    needed_edges,
)
from tests.runtime.racing import GUARD_S, Disturbed, HeldBack, ThreadedEngines, racing_executor, without
from tests.runtime.test_plans_do_not_change_results import (
    CHUNK_TOKENS,
    FP32_ELEMENTS,
    LEARNING_RATES,
    MICRO_BATCH,
    batches,
    cases,
    open_session,
    tiny_model,
)
from tests.runtime.tiny import SEQ_LEN, llama

Make = Callable[[Session], Executor]

HELD_STEP = 1
"""The step in which an operation is held back: one more follows, and what the one before left is stale."""


@cache
def fixed_cases() -> list[Case]:
    """Between them they have every kind of edge."""
    return list(
        fixed_plans(
            tiny_model, "float32", micro_batch=MICRO_BATCH, seq_len=SEQ_LEN, chunk_tokens=CHUNK_TOKENS,
            fp32_elements=FP32_ELEMENTS,
        )
    )  # fmt: skip


def lowered(case: Case) -> Program:
    return lower(case[0], tiny_model(case[1])[0].stages)


@cache
def examples() -> dict[Kind, tuple[int, Edge]]:
    return examples_of([lowered(case) for case in fixed_cases()])


def outcome(case: Case, make: Make) -> list[object]:
    """Losses, norms, and every byte of weights and optimizer state by stage, after three steps launched at once."""
    plan, tied, clip_norm = case
    config = llama(tied)
    data = batches(plan.accumulation, config.vocab_size, plan.packing)
    with open_session(plan, config, clip_norm) as session:
        executor = make(session)
        try:
            results = [executor.step(batch, rate) for batch, rate in zip(data, LEARNING_RATES, strict=True)]
            executor.drain()
        finally:
            executor.close()
        kept: list[object] = [(result.loss, result.grad_norm) for result in results]
        for stage, choice in plan.stages.items():
            flats = (session.buffers[f"{choice.state}/{kind}/{stage}"] for kind in ("weights", "state"))
            kept += [flat.view(torch.uint8).numpy().tobytes() for flat in flats]
        return kept


def in_line(session: Session) -> Executor:
    return session.executor


@cache
def expected(index: int) -> list[object]:
    """What the fixed plan gives when everything runs in line."""
    return outcome(fixed_cases()[index], in_line)


def sleep(op: Op, seconds: float) -> None:
    time.sleep(seconds)


def check_delayed(case: Case, seed: int) -> None:
    def delayed(session: Session) -> Executor:
        around = Disturbed(session, seed, sleep)
        return racing_executor(session, session.program, ThreadedEngines(), around)

    assert outcome(case, delayed) == outcome(case, in_line)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"), st.integers(0, 2**32))
def test_random_plans_with_random_delays(case: Case, seed: int) -> None:
    check_delayed(case, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"), st.integers(0, 2**32))
def test_many_random_plans_with_random_delays(case: Case, seed: int) -> None:
    check_delayed(case, seed)


@pytest.mark.parametrize("blocking_copies", [False, True], ids=["pinned", "pageable"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases("fp32", "hybrid8"), seed=st.integers(0, 2**32))
def test_random_plans_with_random_delays_on_the_engines_of_a_gpu(blocking_copies: bool, case: Case, seed: int) -> None:
    def delayed(session: Session) -> Executor:
        around = launched(Disturbed(session, seed, sleep), blocking_copies=blocking_copies)
        return racing_executor(session, session.program, CudaEngines(1, blocking_copies=blocking_copies), around)

    right = outcome(case, in_line)
    with fake_streams():
        assert outcome(case, delayed) == right


def test_copies_that_block_are_ordered_by_events_and_promises_and_hold_nobody_up() -> None:
    gates, order = {name: threading.Event() for name in ("backward", "grads")}, list[str]()

    def work(name: str, *, blocks: bool = False) -> Callable[[], None]:
        def run() -> None:
            assert name not in gates or gates[name].wait(GUARD_S)
            order.append(name)

        def launch() -> None:
            done = current_stream().launch(run)
            if blocks:
                done.result()

        return launch

    with fake_streams():
        engines = CudaEngines(1, blocking_copies=True)
        backward = engines.submit("compute", work("backward"), (), True)
        grads = engines.submit("d2h", work("grads", blocks=True), (backward,), True)
        update = engines.submit("cpu", partial(order.append, "update"), (grads,), True)
        load = engines.submit("h2d", work("load", blocks=True), (update, backward), True)
        gates["grads"].set()  # the launching thread got here though nothing has run
        time.sleep(0.05)
        assert order == []
        gates["backward"].set()
        engines.submit("compute", work("forward"), (load,), False)
        engines.drain()
        engines.close()
    assert order == ["backward", "grads", "update", "load", "forward"]


def outcome_held_back(case: Case, edge: Edge, forget: str) -> list[object]:
    """Without ``edge``, or without all that waits for its first operation, that operation held back in one step."""

    def held(session: Session) -> Executor:
        program = without(session.program, edge) if forget == "edge" else session.program
        executor = racing_executor(session, program, ThreadedEngines(), HeldBack(edge, HELD_STEP))
        if forget == "event":
            executor._signals[id(program)].remove(edge[0])
        return executor

    return outcome(case, held)


def goes_wrong(case: Case, edge: Edge, forget: str, right: list[object]) -> bool:
    try:
        return outcome_held_back(case, edge, forget) != right
    except (RuntimeError, KeyError):  # torch saw a tensor written that it needs, or what should leave is not there yet
        return True


@pytest.mark.parametrize("forget", ["edge", "event"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " -> ".join(map(str, kind)))
def test_without_any_one_edge_or_event_the_result_is_wrong(kind: Kind, forget: str) -> None:
    index, edge = examples()[kind]
    assert goes_wrong(fixed_cases()[index], edge, forget, expected(index))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"))
def test_without_any_edge_of_random_plans_the_result_is_wrong(case: Case) -> None:
    right, program = outcome(case, in_line), lowered(case)
    for edge in needed_edges(program):
        if matters(program, edge):
            assert goes_wrong(case, edge, "edge", right), edge


def test_edges_that_nobody_needs_change_nothing() -> None:
    """The same for those that ``matters`` leaves out; that every other edge is implied, ``needed_edges`` shows."""
    for index, case in enumerate(fixed_cases()):
        program = lowered(case)
        for edge in (edge for edge in needed_edges(program) if not matters(program, edge)):
            assert outcome_held_back(case, edge, "edge") == expected(index), edge


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases("fp32", "hybrid8"))
def test_random_plans_need_no_other_kind_of_edge(case: Case) -> None:
    program = lowered(case)
    assert {kind_of(program, edge) for edge in needed_edges(program)} <= {*KINDS, HARMLESS}
