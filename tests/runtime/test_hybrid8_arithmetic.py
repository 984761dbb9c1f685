"""The scalar functions that the hybrid 8-bit update is made of, and its random bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazysched.runtime import hybrid8, hybrid8_torch
from lazysched.runtime.hybrid8 import FIRST_UNITS
from lazysched.runtime.hybrid8_torch import fma, inverse, random_words, reciprocal, square_root
from tests.runtime.hybrid8_cases import (
    INVERSE_ERROR,
    RECIPROCAL_ERROR,
    Prepare,
    Settings,
    each_backend,
    fresh_state,
    generator,
)
from tests.runtime.hybrid8_cases import master as master_of_state
from tests.runtime.hybrid8_exact import exact_fma, pattern_of, python_word

LARGEST = 3.4028234663852886e38
SIGMAS = 5
"""Of the mean of so many draws; the seeds are fixed, so that a test does not fail by chance later."""


def floats(patterns: Tensor) -> Tensor:
    """fp32 of int64 bit patterns in [0, 2**32)."""
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).int().view(torch.float32)


def naive_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def wrong_of(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], a: Tensor, b: Tensor, c: Tensor
) -> list[tuple[float, float, float]]:
    """Triples for which ``function`` is not the correctly rounded a * b + c; -0 is not 0, NaN is NaN."""
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    expected = torch.tensor([exact_fma(*t) for t in triples], dtype=torch.float64).float()
    got = function(a, b, c)
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    return [t for t, ok in zip(triples, same.tolist(), strict=True) if not ok]


PATTERN = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]).flatmap(
        lambda p: st.sampled_from([p, p | 0x80000000])
    ),
    st.integers(0, 2**24).flatmap(lambda p: st.sampled_from([p, p | 0x80000000])),  # subnormals and the next binade
)


@given(st.lists(st.tuples(PATTERN, PATTERN, PATTERN), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_fma_of_any_bits_rounds_once(triples: list[tuple[int, int, int]]) -> None:
    a, b, c = (floats(torch.tensor(column)) for column in zip(*triples, strict=True))
    assert not wrong_of(fma, a, b, c)


@given(st.lists(st.tuples(PATTERN, PATTERN, st.integers(-3, 3)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_fma_is_exact_where_product_and_addend_cancel(triples: list[tuple[int, int, int]]) -> None:
    a, b = (floats(torch.tensor(column)) for column in list(zip(*triples, strict=True))[:2])
    product = (a.double() * b.double()).float()
    c = -product.nan_to_num()
    c = (c.view(torch.int32) + torch.tensor([t[2] for t in triples], dtype=torch.int32)).view(torch.float32)
    assert not wrong_of(fma, a, b, c)


def double_rounding_traps() -> tuple[Tensor, Tensor, Tensor]:
    """Sums so near the middle between two fp32 numbers that fp64 rounds them onto it: the second rounding errs."""
    g = generator(0)
    num = 4000
    j = torch.randint(15, 24, (num,), generator=g).double()
    sign = torch.randint(0, 2, (2, num), generator=g).double() * 2 - 1
    exponent = torch.randint(-60, 60, (num,), generator=g).double()
    c = (1 + torch.randint(0, 2**23, (num,), generator=g).double() * 2.0**-23) * sign[0] * 2.0**exponent
    # (1 - 2**-j) * (1 + 2**-j) lies 2**-2j below 1, the half ulp of c.
    a = (1 - 2.0**-j) * sign[1]
    b = (1 + 2.0**-j) * 2.0 ** (exponent - 24)
    return a.float(), b.float(), c.float()


def test_fma_avoids_double_rounding_which_a_naive_version_does_not() -> None:
    traps = double_rounding_traps()
    assert not wrong_of(fma, *traps)
    assert len(wrong_of(naive_fma, *traps)) > 1000


def test_fma_is_exact_for_subnormal_results() -> None:
    g = generator(1)
    a, b = floats(torch.randint(0, 2**32, (2, 4000), generator=g) & 0x80FFFFFF | 0x1FC00000)
    c = floats(torch.randint(0, 2**24, (4000,), generator=g))
    results = fma(a, b, c)
    assert (results.abs() < 2.0**-126).float().mean() > 0.3
    assert not wrong_of(fma, a, b, c)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() / exact - 1).abs().max())


def every(low: float, high: float, stride: int = 1) -> Iterator[Tensor]:
    """The fp32 numbers of [low, high], or every ``stride``-th and ``high``, in parts."""
    yield torch.tensor([high])
    for part in torch.arange(pattern_of(low), pattern_of(high), stride).split(1 << 20):
        yield floats(part)


def test_reciprocal_is_within_its_error_for_every_argument() -> None:
    for d in every(1.0, 2.0):
        assert relative_error(reciprocal(d), 1 / d.double()) <= RECIPROCAL_ERROR


def test_reciprocal_never_makes_a_code_of_128() -> None:
    """It would be stored as -128."""
    for d in every(1.5, 2.0):
        assert ((d - 1) * FIRST_UNITS * reciprocal(d)).max() <= 127 * 2**14


@pytest.mark.parametrize(("low", "high", "stride"), [(1.0, 4.0, 1), (2.0**-149, LARGEST, 1999)])
def test_square_root_is_rounded_right(low: float, high: float, stride: int) -> None:
    """All of two binades, which the others repeat, as powers of 4 only move the exponent; and a grid over the range.
    Halfway points between neighbours have 25 bits, so that their squares are exact in fp64; no root is one."""
    for v in every(low, high, stride):
        root = square_root(v)
        below, above = (
            (root.double() + torch.nextafter(root, torch.tensor(limit)).double()) / 2 for limit in (0.0, float("inf"))
        )
        assert (below.square() < v).all()
        assert (v < above.square()).all()


@pytest.mark.parametrize(("low", "high", "stride"), [(1.0, 2.0, 1), (1e-30, 2.0**65, 997)])
def test_inverse_is_within_its_error(low: float, high: float, stride: int) -> None:
    """All of one binade, which the others repeat, and a grid over the range."""
    for d in every(low, high, stride):
        assert relative_error(inverse(d), 1 / d.double()) <= INVERSE_ERROR


def test_square_roots_of_zero_and_infinity_are_themselves() -> None:
    assert square_root(torch.tensor([0.0, float("inf")])).tolist() == [0.0, float("inf")]


@given(st.integers(0, 2**32 - 1), st.text(max_size=20), st.integers(1, 2**24), st.integers(0, 2**31 - 1))
@settings(max_examples=50, deadline=None)
@example(seed=2**32 - 1, name="", step=2**24, block=2**31 - 1)
def test_random_words_are_those_of_whole_number_arithmetic(seed: int, name: str, step: int, block: int) -> None:
    words = random_words(hybrid8.stream_of(seed, name), torch.tensor(float(step)), torch.tensor([block]))
    assert words.tolist() == [[python_word((seed, name), step, block, e) for e in range(256)]]
    assert [hybrid8.mix32(e * step) for e in range(9)] == hybrid8_torch.mix32(torch.arange(9) * step).tolist()


@each_backend
def test_backends_round_with_those_words(prepare: Prepare) -> None:
    """Zero moments and a decay leave x = weight * decay, whose rounding shows the upper byte; the first moment of a
    third of the block's largest has the code 63.5, which shows whether the 14 lower bits are at least a half."""
    numel = 3 * 256 + 77
    weight = (torch.randn(numel, generator=generator(2)) * 0.02).bfloat16()
    state = fresh_state(weight, name="q.weight", seed=11)
    update = Settings(learning_rate=0.01, weight_decay=0.3)
    prepare([state]).update(update.at(5))
    words = [python_word((11, "q.weight"), 5, i // 256, i % 256) for i in range(numel)]
    decayed = (weight.float() * torch.tensor(1 - 0.01 * 0.3)).tolist()
    expected = torch.tensor([(pattern_of(x) + (w >> 24)) // 256 * 256 for x, w in zip(decayed, words, strict=True)])
    assert torch.equal(master_of_state(state), floats(expected).double())

    state.grad.fill_(1.0)
    state.grad[::256] = 3.0
    prepare([state]).update(update.at(5))
    third = torch.arange(numel) % 256 != 0
    expected = torch.tensor([63 + (w >> 15 & 1) for w in words])
    # Within the code's own error of a half either is right.
    clear = torch.tensor([abs((w >> 2) % 2**14 - 2**13) > 2**14 * 5e-3 for w in words])
    assert torch.equal(state.first[third & clear].long(), expected[third & clear])
    assert (third & clear).sum() > 0.98 * numel


def roundings_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 bits that round the master and the 14 that round the first moment, centred, in units of one sigma."""
    master, first = words >> 24, words >> 2 & 0x3FFF
    return (master - 127.5) / ((2**16 - 1) / 12) ** 0.5, (first - 8191.5) / ((2**28 - 1) / 12) ** 0.5


def words_over_steps(steps: range, block: int, name: str = "w", seed: int = 0) -> Tensor:
    """Words of one block, int64 [steps, 256]."""
    t = torch.arange(steps.start, steps.stop)
    return random_words(hybrid8.stream_of(seed, name), t, torch.full_like(t, block))


def test_roundings_of_an_element_are_even_and_independent_over_steps() -> None:
    num = 20000
    master, first = roundings_of(words_over_steps(range(1, num + 1), block=7))
    pairs = {"master": (master, 1.0), "first": (first, 1.0), "both": (master, first)}
    pairs |= {f"lag {lag}": (master[lag:], master[:-lag]) for lag in (1, 2, 16)}
    for name, (left, right) in pairs.items():
        sums = (left * right).sum(0) / num**0.5
        assert sums.abs().max() < SIGMAS, name
    counts = torch.bincount((words_over_steps(range(1, num + 1), block=7) >> 24).flatten(), minlength=256)
    expected = num * 256 / 256
    assert ((counts - expected) / expected**0.5).abs().max() < SIGMAS


@pytest.mark.parametrize("which", [0, 1])
def test_roundings_of_a_block_are_pairwise_uncorrelated(which: int) -> None:
    num = 20000
    values = roundings_of(words_over_steps(range(1, num + 1), block=3))[which].float()
    correlation = values.T @ values / num**0.5
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < SIGMAS + 1  # 32,640 pairs
    # Rounding errors of a row add up as independent ones do on average, though a multiplier near 0 now and then makes
    # all words of a block alike.
    squares = values.sum(1).square()
    assert (squares.mean() - 256).abs() < SIGMAS * squares.std() / num**0.5
    assert squares.std() / num**0.5 < 0.2 * 256


@pytest.mark.parametrize(
    ("seed", "name", "step", "block"),
    [(1, "w", 1, 0), (0, "v", 1, 0), (0, "w", 2, 0), (0, "w", 1, 1)],
    ids=["seed", "name", "step", "block"],
)
def test_random_words_of_every_element_differ_by_seed_name_step_and_block(
    seed: int, name: str, step: int, block: int
) -> None:
    num = 400
    base = words_over_steps(range(1, num + 1), 0)
    words = words_over_steps(range(step, num + step), block, name, seed)
    assert (words == base).float().mean(0).max() < 0.02
    for left, right in zip(roundings_of(words), roundings_of(base), strict=True):
        assert ((left * right).sum(0) / num**0.5).abs().max() < SIGMAS


def test_stream_of_a_tensor_is_the_same_in_every_process() -> None:
    assert hybrid8.stream_of(3, "a.weight") == 3 << 32 | zlib.crc32(b"a.weight")
    assert hybrid8.stream_of(2**32 + 3, "a.weight") == hybrid8.stream_of(3, "a.weight")
