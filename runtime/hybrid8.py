"""The hybrid 8-bit optimizer state: one specification that every backend follows to the bit.

Backends: ``csrc/`` (AVX-512, AVX2 with FMA, NEON, portable C++), ``hybrid8_triton`` and ``hybrid8_torch``, which is the
reference that people read. A state written by one loads in the others; thread count and chunk size change nothing.

**State of a matrix** of n elements in row-major order, in blocks of 256 (the last may be shorter):

=============  ==========  ==================================================================================
weight         [n]         bf16, the very bytes that compute; or fp32, which then is the master itself
correction     int8 [n]    with a bf16 weight only: ``bits(master) = (weight << 16) + (correction << 8)``, a float
                           with 24 bits; the correction counts 1/128 of half an ulp of the weight
first          int8 [n]    first moment: |code| = 127 * 2x/(1+x) of x = |m| / max|m|
second         uint8 [n]   second moment: 255 * sqrt(v) / max sqrt(v)
first_scale    fp32 [n/256]  max|m| of the block
second_scale   fp32 [n/256]  max sqrt(v) of the block
=============  ==========  ==================================================================================

With the bf16 gradient 7.03 bytes a parameter. The companding of the first moment and the square root of the second are
FlashOptim's (arXiv 2602.23349), blocks with a scale Dettmers' (arXiv 2110.02861). Small or one-dimensional tensors keep
fp32 master and moments. Every element is addressed by its place in the matrix and blocks never look at a neighbour,
so that a set of columns can be held apart in fp32: its gradient is zeroed here and its weights are written afterwards.

**Where it differs from those papers**, each for a failure that a test shows:

- Codes of the second moment are at least 2 unless the whole block is zero: code 0 beside a first moment made updates
  of a thousand learning rates, code 1 still more than twice the exact ones where scales within a block vary.
- The first moment rounds stochastically: to nearest, codes up to 4 never decay (4 * 0.9 rounds to 4), and sparse
  gradients leave weights that drift for ever.
- The master rounds stochastically: to nearest, an update below its last bit is lost in every step.

**Random bits.** Element e of block b draws the word ``multiplier * e + offset`` mod 2**32: bits 24-31 for the
master, bits 2-15 for the first moment. ``low = mix32(mix32(step + seed) ^ tensor)``, ``high = mix32(low + seed)``,
``offset = mix32(b ^ low)``, ``multiplier = mix32(offset + high)``; seed and tensor are the upper and the lower 32 bits
of the stream.
Multiply-shift hashing would be pairwise independent within a block, as sums of roundings need, if multiplier and offset
were drawn independently (Dietzfelbinger, STACS 1996); here one is a hash of the other, and no correlation was measured.

**Arithmetic.** IEEE single precision to nearest with subnormals, ``fma`` rounding once, in exactly this order; the
functions named are below:

1.  Decode: ``m = fma(code * reciprocal(fma(-1/127, |code|, 2)), first_scale * first_decay, g * first_gain)``,
    ``a = code * (second_scale * second_decay)``, ``h = g * second_gain``, ``v = fma(a, a, h * h)``. Here v is already
    multiplied by the bias correction k**2 = 1 / (1 - beta2**t).
2.  ``s = sqrt(v)``, the root IEEE's, ``u = m * inverse(s + epsilon)``, ``x = fma(step_size, u, master * decay)``.
3.  Scales: maxima over the block of |m| and of s, the latter stored times inverse_k; a maximum below 2**-80 is stored
    as 0 with all codes 0, so that nothing decays into subnormals.
4.  Encode: ``f = fma(m * (r * FIRST_UNITS), reciprocal(fma(|m|, r, 1)), 1.5 * 2**23)`` with ``r = 1 / max|m|`` holds
    2**14 times the code; the code is ``(bits(f) + random) >> 14``, lowest byte.
    ``f = max(fma(s, 255 / max s, 2**23), 2**23 + 2)`` holds the second code in its lowest byte.
5.  ``bits = bits(x) + random``; ``weight = (bits + 0x8000) >> 16``, ``correction = bits >> 8``, lowest byte.

Not finite: a master that overflows or is not a number is stored as the infinity or NaN of its weight, correction 0; a
moment that is not finite anywhere in a block gets the scale NaN and codes 0. A gradient above 1e19 overflows when it is
squared and counts as not finite; a norm over it does too, so that such a step is skipped. A negative correction beside
a weight of zero (someone set it) counts as 0. No step changes anything where ``skip`` is set.

**Limits.** 8 bits in a block reach over two and a half decades: elements whose gradients stay a thousand times smaller
than the largest of their block move too little, never too much.

**fp32 tensors**: ``m = fma(m, beta1, g * first_gain)``, ``h = g * second_gain_fp32``, ``v = fma(v, beta2, h * h)``,
``x = fma(step_size, m / fma(sqrt(v), k, epsilon), x * decay)``; division and root are IEEE's.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lazysched.optimizer_state import BLOCK_ELEMENTS

SMALLEST_EPSILON = 1e-30
"""Below it a second moment of zero would divide by nothing."""
LARGEST_EPSILON = 1e18
"""The inverse is specified up to twice that."""
SMALLEST_SCALE = 2.0**-80

RECIPROCAL = (2.12121254, -1.45454577, 0.32323235)
"""Quadratic near 1/d on [1, 2], relative error 1/99, the least possible."""
RECIPROCAL_TWO = 2.0000510
"""Newton's 2, raised so that the error of y * (2 - d * y), never positive, lies on both sides."""
FIRST_UNITS = 254 * 2.0**14
INVERSE_SEED = 0x7EF31200


class Coefficients(NamedTuple):
    """Scalars of one step, in the order of the fp32 vector that kernels read."""

    skip: torch.Tensor
    """1 where nothing may change."""
    step: torch.Tensor
    """Number of updates including this one; exact up to 2**24."""
    first_decay: torch.Tensor
    """beta1 / 127."""
    first_gain: torch.Tensor
    """(1 - beta1) * clip factor."""
    second_decay: torch.Tensor
    """sqrt(beta2) * k / 255."""
    second_gain: torch.Tensor
    """sqrt(1 - beta2) * k * clip factor."""
    inverse_k: torch.Tensor
    """sqrt(1 - beta2**t)."""
    step_size: torch.Tensor
    """-learning rate / (1 - beta1**t)."""
    epsilon: torch.Tensor
    decay: torch.Tensor
    """1 - learning rate * weight decay; tensors without decay use 1."""
    beta1: torch.Tensor
    beta2: torch.Tensor
    second_gain_fp32: torch.Tensor
    """sqrt(1 - beta2) * clip factor."""
    k: torch.Tensor
    """1 / sqrt(1 - beta2**t)."""


NUM_COEFFICIENTS = len(Coefficients._fields)


def coefficients(
    factor: torch.Tensor, skip: torch.Tensor, step: torch.Tensor, *, learning_rate: float, beta1: float, beta2: float,
    epsilon: float, weight_decay: float,
) -> torch.Tensor:  # fmt: skip
    """The vector of :class:`Coefficients`, fp32 [14], on the device of the arguments; computed in fp64.

    Args:
        factor: scalar that gradients are multiplied by.
        skip: scalar, 1 where nothing may change.
        step: scalar, number of updates including this one.
        learning_rate: of the step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: at least ``SMALLEST_EPSILON``.
        weight_decay: decoupled.
    """
    t, scale = step.double(), factor.double()
    one = torch.ones_like(t)
    inverse_k = (1.0 - torch.pow(beta2 * one, t)).clamp(min=1e-30).sqrt()
    first = (1.0 - torch.pow(beta1 * one, t)).clamp(min=1e-30)
    values = Coefficients(
        skip=skip.double(), step=t, first_decay=one * (beta1 / 127), first_gain=(1 - beta1) * scale,
        second_decay=(beta2**0.5 / 255) / inverse_k, second_gain=(1 - beta2) ** 0.5 * scale / inverse_k,
        inverse_k=inverse_k, step_size=-learning_rate / first, epsilon=one * epsilon,
        decay=one * (1 - learning_rate * weight_decay), beta1=one * beta1, beta2=one * beta2,
        second_gain_fp32=(1 - beta2) ** 0.5 * scale, k=1.0 / inverse_k,
    )  # fmt: skip
    return torch.stack(list(values)).float()


@dataclass(frozen=True)
class BlockState:
    """One tensor with 8-bit moments, all flat; the module's docstring says what each array holds.

    Attributes:
        grad: in the dtype of the weight.
        stream: what makes its random bits differ from other tensors', [0, 2**64).
        decays: whether weight decay applies.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    correction: torch.Tensor | None
    first: torch.Tensor
    second: torch.Tensor
    first_scale: torch.Tensor
    second_scale: torch.Tensor
    stream: int
    decays: bool


@dataclass(frozen=True)
class Fp32State:
    """One tensor with fp32 moments, all flat; ``master`` is None where the weight is fp32 itself."""

    weight: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    first: torch.Tensor
    second: torch.Tensor
    decays: bool


def num_blocks(numel: int) -> int:
    """Blocks of a tensor."""
    return -(-numel // BLOCK_ELEMENTS)


def stream_of(seed: int, name: str) -> int:
    """Number that sets the random bits of tensor ``name`` apart, the same in every process."""
    return (seed % 2**32) << 32 | zlib.crc32(name.encode())


def mix32(value: int) -> int:
    """A bijection of 32-bit numbers that flips each output bit half of the time (Wellons, ``lowbias32``)."""
    value = ((value ^ value >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ value >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ value >> 16
