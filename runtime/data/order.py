"""Shuffling as arithmetic: which row stands at a position of an epoch, with nothing drawn or kept.

A permutation of ``num`` rows is a Feistel network on the smallest even number of bits that holds them; a number beyond
the rows is put in again until it falls among them. So any position is found at once, however many rows and epochs lie
before it, no array of the length of the data exists, and resuming needs the position alone. The same seed gives the
same order for ever: generators of numpy may change theirs with a release.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from lazysched.errors import UsageError, short_repr

Indices = npt.NDArray[np.int64]
_ROUNDS = 8
_MIN_HALF_BITS = 3
"""With 2, orders of five rows were visibly uneven (chi-square 341 at 119 degrees of freedom)."""
# Constants of the finalizer of splitmix64: every bit of its input moves every bit of its output.
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


MAX_SEED = 2**63 - 1


def checked_seed(seed: int) -> int:
    """``seed``.

    Raises:
        UsageError: it is negative, or longer than generators take.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(
            f"seed: {short_repr(seed)} is {'negative' if seed < 0 else 'too large'}; give one from 0 to {MAX_SEED}"
        )
    return seed


def shuffled(positions: Indices, num: int, seed: int, epoch: int, purpose: str = "epoch") -> Indices:
    """Rows that stand at ``positions``.

    Args:
        positions: [n] of 0 to ``num`` - 1.
        num: rows, at least one.
        seed: 0 or more.
        epoch: each has an order of its own.
        purpose: so has each purpose.
    """
    half_bits = max(_MIN_HALF_BITS, ((num - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, purpose)
    if half_bits == _MIN_HALF_BITS:  # most numbers may lie beyond so few rows: no walk, the rows in the order of all
        everything = _permuted(np.arange(1 << 2 * half_bits, dtype=np.uint64), np.uint64(half_bits), keys)
        return everything[everything < num][positions].astype(np.int64)
    rows = positions.astype(np.uint64)
    outside = np.arange(len(rows))
    while len(outside):
        rows[outside] = _permuted(rows[outside], np.uint64(half_bits), keys)
        outside = outside[rows[outside] >= num]
    return rows.astype(np.int64)


def _round_keys(seed: int, epoch: int, purpose: str) -> npt.NDArray[np.uint64]:
    name = f"{purpose}/{seed}/{epoch}".encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest(), dtype="<u8").astype(np.uint64)


def _permuted(
    numbers: npt.NDArray[np.uint64], half_bits: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = numbers >> half_bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << half_bits) | right


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _SHIFTS[2])
