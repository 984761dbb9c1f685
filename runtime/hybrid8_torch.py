"""The update of :mod:`lazysched.runtime.hybrid8` in torch operations: the reference, and the fallback without a kernel.

Slow and short: every line is one line of the specification. Runs on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lazysched.optimizer_state import BLOCK_ELEMENTS
from lazysched.runtime.hybrid8 import (
    FIRST_UNITS,
    INVERSE_SEED,
    RECIPROCAL,
    RECIPROCAL_TWO,
    SMALLEST_SCALE,
    BlockState,
    Coefficients,
    Fp32State,
    num_blocks,
)

CHUNK_ELEMENTS = 1 << 20
"""Elements at a time; a fused multiply-add takes several fp64 tensors of that size."""
_MASK = 0xFFFFFFFF


def update_blocks(state: BlockState, coefficients: Tensor) -> None:
    """One step of a tensor with 8-bit moments, in place.

    Args:
        state: of the tensor.
        coefficients: fp32 [14].
    """
    c = Coefficients(*coefficients.unbind())
    if bool(c.skip):
        return
    for start in range(0, state.weight.numel(), CHUNK_ELEMENTS):
        _update_chunk(state, c, start, min(start + CHUNK_ELEMENTS, state.weight.numel()))


def update_fp32(state: Fp32State, coefficients: Tensor) -> None:
    """One step of a tensor with fp32 moments, in place."""
    c = Coefficients(*coefficients.unbind())
    if bool(c.skip):
        return
    master = state.weight if state.master is None else state.master
    arrays = (state.weight, state.grad, master, state.first, state.second)
    for weight, grad, x, first, second in zip(*(a.split(CHUNK_ELEMENTS) for a in arrays), strict=True):
        g = grad.float()
        first.copy_(fma(first, c.beta1, g * c.first_gain))
        h = g * c.second_gain_fp32
        second.copy_(fma(second, c.beta2, h * h))
        u = first / fma(square_root(second), c.k, c.epsilon)
        x.copy_(fma(c.step_size, u, x * c.decay if state.decays else x))
        if state.master is not None:
            weight.view(torch.int16).copy_(torch.where(x.isnan(), 0x7FC0, x.bfloat16().view(torch.int16)))


def fma(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """``a * b + c`` of fp32 numbers, rounded once.

    The product is exact in fp64. The sum is rounded there to odd (Boldo and Melquiond, IEEE TC 2008), which makes the
    second rounding, to fp32, right.
    """
    product = torch.as_tensor(a, dtype=torch.float32).double() * b.double()
    addend = torch.as_tensor(c, dtype=torch.float32, device=b.device).double().expand_as(product)
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def reciprocal(d: Tensor) -> Tensor:
    """1 / d for d in [1, 2], relative error 5.2e-5, a hundredth of a code: quadratic, then Newton's step."""
    y = fma(fma(RECIPROCAL[2], d, RECIPROCAL[1]), d, RECIPROCAL[0])
    return y * fma(-d, y, RECIPROCAL_TWO)


def square_root(v: Tensor) -> Tensor:
    """sqrt(v), rounded right: torch's own fp32 root is not; that of fp64 has digits enough to be rounded twice."""
    return v.double().sqrt().float()


def inverse(d: Tensor) -> Tensor:
    """1 / d for d in [1e-30, 2**65], relative error 1.3e-4: integer seed, then one step of third order."""
    y = _float(INVERSE_SEED - _bits(d))
    e = fma(-d, y, 1.0)
    return fma(y, fma(e, e, e), y)


def mix32(value: Tensor) -> Tensor:
    """:func:`lazysched.runtime.hybrid8.mix32` of int64 tensors that hold 32 bits."""
    value = ((value ^ value >> 16) * 0x7FEB352D) & _MASK
    value = ((value ^ value >> 15) * 0x846CA68B) & _MASK
    return value ^ value >> 16


def random_words(stream: int, step: Tensor, blocks: Tensor) -> Tensor:
    """The 32-bit word of every element of ``blocks``, int64 [blocks, 256]."""
    seed = stream >> 32
    low = mix32(mix32((step.long() + seed) & _MASK) ^ (stream & _MASK))
    high = mix32((low + seed) & _MASK)
    offset = mix32(blocks ^ low)
    multiplier = mix32((offset + high) & _MASK)
    element = torch.arange(BLOCK_ELEMENTS, device=blocks.device)
    return (multiplier[:, None] * element + offset[:, None]) & _MASK


def master_of(weight: Tensor, correction: Tensor) -> Tensor:
    """fp32 master of bf16 weights and their corrections."""
    high = weight.view(torch.int16).int()
    low = correction.int()
    low = torch.where((high & 0x7FFF == 0) & (low < 0), 0, low)
    return ((high << 16) + (low << 8)).view(torch.float32)


def store_master(master: Tensor, random: Tensor | int, weight: Tensor, correction: Tensor) -> None:
    """Split an fp32 master into ``weight`` and ``correction``; ``random`` in [0, 255], 128 rounds to nearest."""
    bits = _bits(master) + random
    high, low = bits + 0x8000 >> 16, bits >> 8 & 0xFF
    finite = master.isfinite()
    special = torch.where(master.isnan(), 0x7FC0, _bits(master) >> 16)
    weight.copy_(_as_int(torch.where(finite, high, special), 16).to(torch.int16).view(torch.bfloat16))
    correction.copy_(_as_int(torch.where(finite, low, 0), 8).to(torch.int8))


def _update_chunk(state: BlockState, c: Coefficients, start: int, stop: int) -> None:
    blocks = torch.arange(start // BLOCK_ELEMENTS, num_blocks(stop), device=state.weight.device)
    here = slice(blocks.numel() and int(blocks[0]), num_blocks(stop))
    weight, first, second = state.weight[start:stop], state.first[start:stop], state.second[start:stop]
    g = _rows(state.grad[start:stop].float())
    x = _rows(weight if state.correction is None else master_of(weight, state.correction[start:stop]))
    m = _first_moment(_rows(first.float()), state.first_scale[here], g, c)
    s = square_root(_second_moment(_rows(second.float()), state.second_scale[here], g, c))
    u = m * inverse(s + c.epsilon)
    x = fma(c.step_size, u, x * c.decay if state.decays else x)
    words = random_words(state.stream, c.step, blocks)
    count = stop - start
    first.copy_(_encode_first(m, words >> 2 & 0x3FFF, state.first_scale[here])[:count])
    second.copy_(_encode_second(s, c, state.second_scale[here])[:count])
    master = x.flatten()[:count]
    if state.correction is None:
        weight.copy_(torch.where(master.isnan(), torch.nan, master))
    else:
        store_master(master, (words >> 24).flatten()[:count], weight, state.correction[start:stop])


def _first_moment(code: Tensor, scale: Tensor, g: Tensor, c: Coefficients) -> Tensor:
    companded = code * reciprocal(fma(-1 / 127, code.abs(), 2.0))
    return fma(companded, (scale * c.first_decay)[:, None].expand_as(g), g * c.first_gain)


def _second_moment(code: Tensor, scale: Tensor, g: Tensor, c: Coefficients) -> Tensor:
    a = code * (scale * c.second_decay)[:, None]
    h = g * c.second_gain
    return fma(a, a, h * h)


def _encode_first(m: Tensor, random: Tensor, scale: Tensor) -> Tensor:
    """Codes int8 [elements]; writes ``scale`` [blocks]."""
    most, inverse_most = _scale_of(m.abs())
    scale.copy_(most)
    d = fma(m.abs(), inverse_most[:, None].expand_as(m), 1.0)
    f = fma(m * (inverse_most * FIRST_UNITS)[:, None], reciprocal(d), 12582912.0)
    code = _as_int(_bits(f) + random >> 14, 8)
    return torch.where(inverse_most[:, None] == 0, 0, code).to(torch.int8).flatten()


def _encode_second(s: Tensor, c: Coefficients, scale: Tensor) -> Tensor:
    """Codes uint8 [elements]; writes ``scale`` [blocks]."""
    most, inverse_most = _scale_of(s)
    scale.copy_(most * c.inverse_k)
    ratio = torch.where(inverse_most == 0, 0.0, torch.full_like(most, 255.0) / most)  # 255 / most is not a division
    code = _bits(fma(s, ratio[:, None].expand_as(s), 8388608.0).clamp(min=8388610.0)) & 0xFF
    return torch.where(inverse_most[:, None] == 0, 0, code).to(torch.uint8).flatten()


def _scale_of(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of each row and its inverse; inverse 0 where all codes are 0."""
    finite = magnitude.isfinite().all(1)
    most = torch.where(finite, magnitude.amax(1), torch.nan)
    most = torch.where(most < SMALLEST_SCALE, 0.0, most)
    coded = finite & (most > 0)
    return most, torch.where(coded, 1.0 / most, 0.0)


def _rows(flat: Tensor) -> Tensor:
    """Whole blocks, [blocks, 256]; what lies beyond the end is zero and is never the largest."""
    missing = -flat.numel() % BLOCK_ELEMENTS
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK_ELEMENTS)


def _bits(value: Tensor) -> Tensor:
    """The 32 bits of fp32 numbers as int64."""
    return value.contiguous().view(torch.int32).long() & _MASK


def _float(bits: Tensor) -> Tensor:
    return _as_int(bits & _MASK, 32).int().view(torch.float32)


def _as_int(value: Tensor, bits: int) -> Tensor:
    """Two's complement of the lowest ``bits``."""
    value = value & (1 << bits) - 1
    return torch.where(value >= 1 << bits - 1, value - (1 << bits), value)
