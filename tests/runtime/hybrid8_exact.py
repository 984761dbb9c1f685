"""The specification of the hybrid 8-bit update once more, element by element in Python: fused multiply-adds by rational
numbers, all else in numpy's fp32 and whole numbers. It shares nothing with the backends but the docstring."""

from __future__ import annotations

import struct
import zlib
from fractions import Fraction

import numpy as np
import torch

from lazysched.runtime.hybrid8 import BlockState, Coefficients
from tests.runtime.hybrid8_cases import arrays

F = np.float32
RECIPROCAL = (F(2.12121254), F(-1.45454577), F(0.32323235))


def pattern_of(value: float) -> int:
    """The 32 bits of an fp32 number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def number_of(pattern: int) -> np.float32:
    """The fp32 number of 32 bits."""
    return F(struct.unpack("<f", struct.pack("<I", pattern % 2**32))[0])


def rounded(exact: Fraction) -> float:
    """Nearest fp32 number of a number that is not 0, ties to even, subnormals kept."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(size / quantum) * quantum
    value = float("inf") if nearest >= 2**128 else float(nearest)
    return value if exact > 0 else -value


def exact_fma(a: float, b: float, c: float) -> float:
    """By rational numbers; what is 0 or not finite is the same in fp64 and fp32."""
    if all(abs(x) < float("inf") for x in (a, b, c)):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            return rounded(exact)
    return a * b + c


def fma(a: np.float32, b: np.float32, c: np.float32 | float) -> np.float32:
    return F(exact_fma(float(a), float(b), float(F(c))))


def python_word(stream: tuple[int, str], step: int, block: int, element: int) -> int:
    """The random word of one element.

    Args:
        stream: seed and name of the tensor.
        step: number of updates including this one.
        block: of the tensor.
        element: of the block.
    """

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    low = mix(mix((step + stream[0]) % 2**32) ^ zlib.crc32(stream[1].encode()))
    high = mix((low + stream[0]) % 2**32)
    offset = mix(block ^ low)
    return (mix((offset + high) % 2**32) * element + offset) % 2**32


def reciprocal(d: np.float32) -> np.float32:
    y = fma(fma(RECIPROCAL[2], d, RECIPROCAL[1]), d, RECIPROCAL[0])
    return y * fma(-d, y, F(2.0000510))


def inverse(d: np.float32) -> np.float32:
    y = number_of(0x7EF31200 - pattern_of(float(d)))
    e = fma(-d, y, 1)
    return fma(y, fma(e, e, e), y)


def exact_block(state: BlockState, stream: tuple[int, str], c: Coefficients, block: int) -> dict[str, torch.Tensor]:
    """The arrays of one block after an update; all finite, and some gradient or moment not zero.

    Args:
        state: before the update.
        stream: seed and name of the tensor.
        c: of the step.
        block: of the tensor.
    """
    k = {name: F(float(value)) for name, value in c._asdict().items()}
    here = slice(block * 256, (block + 1) * 256)
    old = {name: value[here].float().numpy() for name, value in arrays(state).items() if "scale" not in name}
    scales = [F(scale[block].item()) for scale in (state.first_scale, state.second_scale)]
    words = [python_word(stream, int(c.step), block, e) for e in range(len(old["weight"]))]
    m, s, x = [], [], []
    for g, first, second, start in zip(old["grad"], old["first"], old["second"], _masters(state, here), strict=True):
        companded = first * reciprocal(fma(F(-1 / 127), abs(first), 2))
        m.append(fma(companded, scales[0] * k["first_decay"], g * k["first_gain"]))
        a, h = second * (scales[1] * k["second_decay"]), g * k["second_gain"]
        s.append(np.sqrt(fma(a, a, h * h)))
        u = m[-1] * inverse(s[-1] + k["epsilon"])
        x.append(fma(k["step_size"], u, start * k["decay"] if state.decays else start))
    most_m, most_s = max(abs(v) for v in m), max(s)
    codes = zip(m, s, words, strict=True)
    encoded = [(_first_code(a, most_m, w >> 2 & 0x3FFF), _second_code(b, most_s)) for a, b, w in codes]
    return {
        "first": torch.tensor([pair[0] for pair in encoded], dtype=torch.int8),
        "second": torch.tensor([pair[1] for pair in encoded], dtype=torch.uint8),
        "first_scale": torch.tensor([float(most_m)]), "second_scale": torch.tensor([float(most_s * k["inverse_k"])]),
    } | _stored(state, x, words)  # fmt: skip


def _masters(state: BlockState, here: slice) -> list[np.float32]:
    if state.correction is None:
        return [F(w) for w in state.weight[here].tolist()]
    pairs = zip(state.weight[here].float().tolist(), state.correction[here].tolist(), strict=True)
    return [number_of(pattern_of(weight) + correction * 256) for weight, correction in pairs]


def _first_code(m: np.float32, most: np.float32, random: int) -> int:
    r = F(1) / most
    f = fma(m * (r * F(254 * 2**14)), reciprocal(fma(abs(m), r, 1)), 12582912)
    code = (pattern_of(float(f)) + random >> 14) % 256
    return code - 256 if code > 127 else code


def _second_code(s: np.float32, most: np.float32) -> int:
    return pattern_of(max(float(fma(s, F(255) / most, 8388608)), 8388610.0)) % 256


def _stored(state: BlockState, x: list[np.float32], words: list[int]) -> dict[str, torch.Tensor]:
    if state.correction is None:
        return {"weight": torch.tensor([float(v) for v in x])}
    patterns = [pattern_of(float(v)) + (word >> 24) for v, word in zip(x, words, strict=True)]
    high = [(p + 0x8000) >> 16 for p in patterns]
    low = [(p >> 8) % 256 for p in patterns]
    return {
        "weight": torch.tensor([float(number_of(h << 16)) for h in high]).bfloat16(),
        "correction": torch.tensor([b - 256 if b > 127 else b for b in low], dtype=torch.int8),
    }
