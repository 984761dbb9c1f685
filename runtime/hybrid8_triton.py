"""The update of :mod:`lazysched.runtime.hybrid8` as Triton kernels, with the bits of the other backends.

Multiplications and additions are not contracted (``enable_fp_fusion=False``); every fused one is written ``tl.fma``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lazysched.runtime import hybrid8
from lazysched.runtime.hybrid8 import BlockState, Fp32State

ROWS = 8
"""Blocks of 256 elements that a program updates: 16 elements a thread with 4 warps."""
FP32_ELEMENTS = 1024
_WARPS = 4

_R0, _R1, _R2 = (tl.constexpr(value) for value in hybrid8.RECIPROCAL)
_P0, _P1, _P2, _P3 = (tl.constexpr(value) for value in hybrid8.ROOT)
_ROOT_SEED, _INVERSE_SEED = tl.constexpr(hybrid8.ROOT_SEED), tl.constexpr(hybrid8.INVERSE_SEED)
_WEYL, _FIRST_UNITS = tl.constexpr(hybrid8.WEYL), tl.constexpr(hybrid8.FIRST_UNITS)
_SMALLEST_SCALE = tl.constexpr(hybrid8.SMALLEST_SCALE)
_INFINITY_BITS, _NAN_BITS, _MAGNITUDE = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000), tl.constexpr(0x7FFFFFFF)


class TritonUpdate:
    """The update of some tensors on one GPU, queued on the current stream.

    Args:
        states: the tensors; contiguous, of one dtype each, on one GPU.
    """

    def __init__(self, states: Sequence[BlockState | Fp32State]) -> None:
        self._states = states

    def update(self, coefficients: torch.Tensor) -> None:
        """Queue one step.

        Args:
            coefficients: fp32 [14], on the GPU.
        """
        for state in self._states:
            if state.weight.numel() == 0:
                continue
            if isinstance(state, BlockState):
                _launch_blocks(state, coefficients)
            else:
                _launch_fp32(state, coefficients)


def _launch_blocks(state: BlockState, coefficients: torch.Tensor) -> None:
    numel, narrow = state.weight.numel(), state.correction is not None
    weight, grad = (_integers(array) if narrow else array for array in (state.weight, state.grad))
    _update_blocks[(triton.cdiv(hybrid8.num_blocks(numel), ROWS),)](
        weight, grad, state.correction, state.first, state.second, state.first_scale, state.second_scale, coefficients,
        numel, _signed(state.stream), _signed(state.stream >> 32), NARROW=narrow, DECAYS=state.decays,
        WHOLE=numel % (256 * ROWS) == 0, ROWS=ROWS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_fp32(state: Fp32State, coefficients: torch.Tensor) -> None:
    narrow = state.master is not None
    weight, grad = (_integers(array) if narrow else array for array in (state.weight, state.grad))
    _update_fp32[(triton.cdiv(state.weight.numel(), FP32_ELEMENTS),)](
        weight, grad, state.master, state.first, state.second, coefficients, state.weight.numel(), NARROW=narrow,
        DECAYS=state.decays, ELEMENTS=FP32_ELEMENTS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _signed(value: int) -> int:
    """The lower 32 bits as a signed integer: one type of argument, whatever its value."""
    return (value + 2**31) % 2**32 - 2**31


def _integers(array: torch.Tensor) -> torch.Tensor:
    """bf16 as the integers that the kernels work on."""
    return array.view(torch.int16)


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _widen(halves):
    return _float(halves.to(tl.uint32) << 16)


@triton.jit
def _reciprocal(d):
    y = tl.fma(tl.fma(tl.full(d.shape, _R2, tl.float32), d, _R1), d, _R0)
    e = tl.fma(-d, y, 1.0)
    return tl.fma(y, tl.fma(e, e, e), y)


@triton.jit
def _square_root(v):
    y = _float(_ROOT_SEED - (_bits(v) >> 1))
    t = v * y
    e = t * y
    p = tl.fma(tl.full(e.shape, _P3, tl.float32), e, _P2)
    return t * tl.fma(tl.fma(p, e, _P1), e, _P0)


@triton.jit
def _inverse(d):
    y = _float(_INVERSE_SEED - _bits(d))
    e = tl.fma(-d, y, 1.0)
    return tl.fma(y, e, y) * tl.fma(e, e, 1.0)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _words(stream_low, stream_high, step, block, element):
    """Random words [blocks, 256]."""
    low = _mix32(step.to(tl.uint32) ^ stream_low.to(tl.uint32))
    high = _mix32(low + stream_high.to(tl.uint32))
    multiplier = _mix32(_mix32(block.to(tl.uint32) ^ low) + high)
    offset = _mix32(multiplier ^ _WEYL)
    return multiplier[:, None] * element.to(tl.uint32)[None, :] + offset[:, None]


@triton.jit
def _scale_of(magnitude_bits):
    """Largest of each row as stored, its inverse (0 where all codes are 0), and the largest itself."""
    bits = tl.max(magnitude_bits.to(tl.int32, bitcast=True), 1)
    finite = bits < _INFINITY_BITS
    most = _float(tl.where(finite, bits, _NAN_BITS))
    most = tl.where(most < _SMALLEST_SCALE, 0.0, most)
    coded = finite & (most > 0.0)
    return most, coded


# A stream of 1 would become a constant, which has no type.
@triton.jit(do_not_specialize=["stream_low", "stream_high"])
def _update_blocks(
    weight_ptr, grad_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr,
    numel, stream_low, stream_high, NARROW: tl.constexpr, DECAYS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    if tl.load(coefficients_ptr) != 0.0:
        return
    step = tl.load(coefficients_ptr + 1)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, 256)
    at = block.to(tl.int64)[:, None] * 256 + element[None, :]
    row_inside = block.to(tl.int64) * 256 < numel
    inside = None if WHOLE else at < numel
    other = None if WHOLE else 0

    grad = tl.load(grad_ptr + at, inside, other)
    code = tl.load(first_ptr + at, inside, other).to(tl.float32)
    root_code = tl.load(second_ptr + at, inside, other).to(tl.float32)
    if NARROW:
        g = _widen(grad)
        high = tl.load(weight_ptr + at, inside, other).to(tl.int32)
        low = tl.load(correction_ptr + at, inside, other).to(tl.int32)
        low = tl.where(((high & 0x7FFF) == 0) & (low < 0), 0, low)
        master = _float((high << 16) + (low << 8))
    else:
        g = grad
        master = tl.load(weight_ptr + at, inside, other)

    first_unit = tl.load(first_scale_ptr + block, row_inside, 0.0) * tl.load(coefficients_ptr + 2)
    second_unit = tl.load(second_scale_ptr + block, row_inside, 0.0) * tl.load(coefficients_ptr + 4)
    companded = code * _reciprocal(tl.fma(tl.abs(code), -1.0 / 127.0, 2.0))
    m = tl.fma(companded, first_unit[:, None], g * tl.load(coefficients_ptr + 3))
    a = root_code * second_unit[:, None]
    h = g * tl.load(coefficients_ptr + 5)
    s = _square_root(tl.fma(a, a, h * h))
    u = m * _inverse(s + tl.load(coefficients_ptr + 8))
    if DECAYS:
        master = master * tl.load(coefficients_ptr + 9)
    x = tl.fma(u, tl.load(coefficients_ptr + 7), master)

    word = _words(stream_low, stream_high, step, block, element)
    most, coded = _scale_of(_bits(m) & _MAGNITUDE)
    tl.store(first_scale_ptr + block, most, row_inside)
    inverse_most = tl.where(coded, tl.div_rn(1.0, most), 0.0)
    f = tl.fma(
        m * (inverse_most * _FIRST_UNITS)[:, None],
        _reciprocal(tl.fma(tl.abs(m), inverse_most[:, None], 1.0)),
        12582912.0,
    )
    first = ((_bits(f) + (word & 0x3FFF)) >> 14).to(tl.int8)
    tl.store(first_ptr + at, tl.where(coded[:, None], first, 0), inside)

    most, coded = _scale_of(_bits(s) & _MAGNITUDE)
    tl.store(second_scale_ptr + block, most * tl.load(coefficients_ptr + 6), row_inside)
    ratio = tl.where(coded, tl.div_rn(255.0, most), 0.0)
    lowest = tl.where(coded, 8388610.0, 8388608.0)
    second = _bits(tl.maximum(tl.fma(s, ratio[:, None], 8388608.0), lowest[:, None])).to(tl.uint8)
    tl.store(second_ptr + at, tl.where(coded[:, None], second, 0), inside)

    exponent = _bits(x) & _MAGNITUDE
    if NARROW:
        bits = _bits(x) + (word >> 24)
        special = tl.where(exponent > _INFINITY_BITS, 0x7FC0, _bits(x) >> 16)
        finite = exponent < _INFINITY_BITS
        tl.store(weight_ptr + at, tl.where(finite, (bits + 0x8000) >> 16, special).to(tl.int16), inside)
        tl.store(correction_ptr + at, tl.where(finite, bits >> 8, 0).to(tl.int8), inside)
    else:
        tl.store(weight_ptr + at, _float(tl.where(exponent > _INFINITY_BITS, _NAN_BITS, _bits(x))), inside)


@triton.jit
def _update_fp32(
    weight_ptr, grad_ptr, master_ptr, first_ptr, second_ptr, coefficients_ptr, numel, NARROW: tl.constexpr,
    DECAYS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    if tl.load(coefficients_ptr) != 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < numel
    grad = tl.load(grad_ptr + at, inside, 0)
    if NARROW:
        g = _widen(grad)
        master = tl.load(master_ptr + at, inside, 0.0)
    else:
        g = grad
        master = tl.load(weight_ptr + at, inside, 0.0)
    first = tl.load(first_ptr + at, inside, 0.0)
    second = tl.load(second_ptr + at, inside, 0.0)
    m = tl.fma(first, tl.load(coefficients_ptr + 10), g * tl.load(coefficients_ptr + 3))
    h = g * tl.load(coefficients_ptr + 12)
    v = tl.fma(second, tl.load(coefficients_ptr + 11), h * h)
    u = tl.div_rn(m, tl.fma(tl.sqrt_rn(v), tl.load(coefficients_ptr + 13), tl.load(coefficients_ptr + 8)))
    if DECAYS:
        master = master * tl.load(coefficients_ptr + 9)
    x = tl.fma(u, tl.load(coefficients_ptr + 7), master)
    tl.store(first_ptr + at, m, inside)
    tl.store(second_ptr + at, v, inside)
    if NARROW:
        bits = _bits(x)
        is_nan = (bits & _MAGNITUDE) > _INFINITY_BITS
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(weight_ptr + at, tl.where(is_nan, 0x7FC0, rounded).to(tl.int16), inside)
        tl.store(master_ptr + at, x, inside)
    else:
        tl.store(weight_ptr + at, x, inside)
