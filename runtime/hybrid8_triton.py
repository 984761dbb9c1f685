"""The update of :mod:`lazysched.runtime.hybrid8` as Triton kernels, with the bits of the other backends.

Multiplications and additions are not contracted (``enable_fp_fusion=False``); every fused one is written ``tl.fma``.
"""

# Triton is not installed where there is no GPU, and kernels are no Python that a type checker understands.
# mypy: disable-error-code="no-untyped-def, import-not-found, untyped-decorator, misc, attr-defined, index"
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lazysched.optimizer_state import BLOCK_ELEMENTS
from lazysched.runtime import hybrid8
from lazysched.runtime.hybrid8 import BlockState, Fp32State

BLOCKS = 8
"""Blocks of 256 elements that a program updates one after the other. A program is one warp: no barrier is needed."""
FP32_ELEMENTS = 1024
_FP32_WARPS = 4

_R0, _R1, _R2 = (tl.constexpr(value) for value in hybrid8.RECIPROCAL)
_TWO = tl.constexpr(hybrid8.RECIPROCAL_TWO)
_MINUS_INVERSE_SEED = tl.constexpr(hybrid8.INVERSE_SEED + 2**31)
_FIRST_UNITS = tl.constexpr(hybrid8.FIRST_UNITS)
_SMALLEST_SCALE = tl.constexpr(hybrid8.SMALLEST_SCALE)

# Bytes are moved four elements at a time. ``prmt`` chooses the bytes of its result among eight; 0x4B000000 is 2**23, so
# that a byte beneath it is a float without a conversion.
_UNPACK_CODES = tl.constexpr(
    "{.reg .b32 f; xor.b32 f, $8, 0x80808080;"
    + "".join(f"prmt.b32 ${k}, f, 0x4B000000, 0x765{k};" for k in range(4))
    + "".join(f"prmt.b32 ${k + 4}, $9, 0x4B000000, 0x765{k};" for k in range(4))
    + "}"
)
# The correction plus 128 stands below the weight: together the master plus half an ulp of the weight. Masking half of
# the bytes leaves a zero for the lowest byte.
_UNPACK_MASTER = tl.constexpr(
    "{.reg .b32 c, e, o; xor.b32 c, $10, 0x80808080; and.b32 e, c, 0x00FF00FF; and.b32 o, c, 0xFF00FF00;"
    "prmt.b32 $0, e, $8, 0x5401; prmt.b32 $1, o, $8, 0x7610; prmt.b32 $2, e, $9, 0x5423; prmt.b32 $3, o, $9, 0x7632;"
    + "".join(f"sub.u32 ${k}, ${k}, 0x8000;" for k in range(4))
    + "shl.b32 $4, $11, 16; and.b32 $5, $11, 0xFFFF0000; shl.b32 $6, $12, 16; and.b32 $7, $12, 0xFFFF0000;}"
)
_PACK_CODES = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $2, $3, 0x0062; prmt.b32 b, $4, $5, 0x0062; prmt.b32 $0, a, b, 0x5410;"
    "prmt.b32 a, $6, $7, 0x0040; prmt.b32 b, $8, $9, 0x0040; prmt.b32 $1, a, b, 0x5410;}"
)
_PACK_MASTER = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 $0, $3, $4, 0x7632; prmt.b32 $1, $5, $6, 0x7632;"
    "prmt.b32 a, $3, $4, 0x0051; prmt.b32 b, $5, $6, 0x0051; prmt.b32 a, a, b, 0x5410; xor.b32 $2, a, 0x80808080;}"
)


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
    num_blocks = hybrid8.num_blocks(numel)
    weight, grad = (_integers(array) if narrow else array for array in (state.weight, state.grad))
    _update_blocks[(triton.cdiv(num_blocks, BLOCKS),)](
        weight, grad, state.correction, state.first, state.second, state.first_scale, state.second_scale, coefficients,
        numel, num_blocks, _signed(state.stream), _signed(state.stream >> 32), NARROW=narrow, DECAYS=state.decays,
        WHOLE=numel % BLOCK_ELEMENTS == 0, BLOCKS=BLOCKS, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_fp32(state: Fp32State, coefficients: torch.Tensor) -> None:
    narrow = state.master is not None
    weight, grad = (_integers(array) if narrow else array for array in (state.weight, state.grad))
    _update_fp32[(triton.cdiv(state.weight.numel(), FP32_ELEMENTS),)](
        weight, grad, state.master, state.first, state.second, coefficients, state.weight.numel(), NARROW=narrow,
        DECAYS=state.decays, ELEMENTS=FP32_ELEMENTS, num_warps=_FP32_WARPS, enable_fp_fusion=False,
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
def _minus_reciprocal(d):
    """-1 / d for d in [1, 2]; the sign comes with the constants, where it costs nothing."""
    y = tl.fma(tl.fma(tl.full(d.shape, -_R2, tl.float32), d, -_R1), d, -_R0)
    return y * tl.fma(d, y, _TWO)


@triton.jit
def _minus_inverse(d):
    y = _float(_MINUS_INVERSE_SEED - _bits(d))
    e = tl.fma(d, y, 1.0)
    return tl.fma(y, tl.fma(e, e, e), y)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _larger(a, b):
    """The larger, or NaN beside a NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _codes(first, second):
    """Both codes as floats."""
    first_bits, second_bits = tl.inline_asm_elementwise(
        _UNPACK_CODES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [first, second], (tl.uint32, tl.uint32), is_pure=True, pack=4
    )
    return _float(first_bits) - 8388736.0, _float(second_bits) - 8388608.0


@triton.jit
def _step(master, m, s, coefficients_ptr, DECAYS: tl.constexpr):
    """The new master, from both moments."""
    u = m * _minus_inverse(s + tl.load(coefficients_ptr + 8))
    if DECAYS:
        master = master * tl.load(coefficients_ptr + 9)
    return tl.fma(u, -tl.load(coefficients_ptr + 7), master)


@triton.jit
def _first_bits(m, inverse_most, word):
    """Words whose third byte is the code of the first moment."""
    minus_reciprocal = _minus_reciprocal(tl.fma(tl.abs(m), inverse_most, 1.0))
    f = tl.fma(m * (inverse_most * -_FIRST_UNITS), minus_reciprocal, 12582912.0)
    return (_bits(f) << 2) + (word & 0xFFFC)


@triton.jit
def _store_careful(
    weight_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr, numel,
    block, at, m, s, word, NARROW: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Store a block in which something is not finite, or a weight of zero has a negative correction."""
    inside = at < numel
    if NARROW:
        high = tl.load(weight_ptr + at, inside, 0).to(tl.int32)
        low = tl.load(correction_ptr + at, inside, 0).to(tl.int32)
        low = tl.where(((high & 0x7FFF) == 0) & (low < 0), 0, low)
        master = _float((high << 16) + (low << 8))
    else:
        master = tl.load(weight_ptr + at, inside, 0.0)
    x = _step(master, m, s, coefficients_ptr, DECAYS)
    magnitude = _bits(x) & 0x7FFFFFFF
    is_finite, is_nan = magnitude < 0x7F800000, magnitude > 0x7F800000
    if NARROW:
        bits = _bits(x) + (word >> 24)
        weight = tl.where(is_finite, (bits + 0x8000) >> 16, tl.where(is_nan, 0x7FC0, _bits(x) >> 16))
        tl.store(weight_ptr + at, weight.to(tl.int16), inside)
        tl.store(correction_ptr + at, tl.where(is_finite, bits >> 8, 0).to(tl.int8), inside)
    else:
        tl.store(weight_ptr + at, tl.where(is_nan, _float(tl.full(x.shape, 0x7FC00000, tl.uint32)), x), inside)

    most, coded = _careful_scale(m)
    first = (_first_bits(m, tl.where(coded, tl.div_rn(1.0, most), 0.0), word) >> 16).to(tl.int8)
    tl.store(first_ptr + at, tl.where(coded, first, 0), inside)
    tl.store(first_scale_ptr + block, most)
    most, coded = _careful_scale(s)
    ratio = tl.where(coded, tl.div_rn(255.0, most), 0.0)
    second = _bits(tl.maximum(tl.fma(s, ratio, 8388608.0), 8388610.0)).to(tl.uint8)
    tl.store(second_ptr + at, tl.where(coded, second, 0), inside)
    tl.store(second_scale_ptr + block, tl.where(most == most, most * tl.load(coefficients_ptr + 6), most))


@triton.jit
def _careful_scale(moment):
    """Largest magnitude of a block as it is stored, and whether the block has codes other than 0."""
    bits = tl.max((_bits(moment) & 0x7FFFFFFF).to(tl.int32, bitcast=True), 0)
    is_finite = bits < 0x7F800000
    most = _float(tl.where(is_finite, bits, 0x7FC00000))
    most = tl.where(most < _SMALLEST_SCALE, 0.0, most)
    return most, is_finite & (most > 0.0)


@triton.jit
def _store(
    weight_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr, block, at,
    inside, m, s, x, most_first, most_second, word, NARROW: tl.constexpr,
):  # fmt: skip
    """Store a block in which everything is finite."""
    most_first = tl.where(most_first < _SMALLEST_SCALE, 0.0, most_first)
    most_second = tl.where(most_second < _SMALLEST_SCALE, 0.0, most_second)
    tl.store(first_scale_ptr + block, most_first)
    tl.store(second_scale_ptr + block, most_second * tl.load(coefficients_ptr + 6))
    inverse_most = tl.where(most_first > 0.0, tl.div_rn(1.0, most_first), 0.0)
    ratio = tl.where(most_second > 0.0, tl.div_rn(255.0, most_second), 0.0)
    lowest = tl.where(most_second > 0.0, 8388610.0, 8388608.0)
    second_bits = _bits(tl.maximum(tl.fma(s, ratio, 8388608.0), lowest))
    first, second = tl.inline_asm_elementwise(
        _PACK_CODES, "=r,=r,r,r,r,r,r,r,r,r", [_first_bits(m, inverse_most, word), second_bits], (tl.int8, tl.uint8),
        is_pure=True, pack=4,
    )  # fmt: skip
    tl.store(first_ptr + at, first, inside)
    tl.store(second_ptr + at, second, inside)
    if NARROW:
        weight, correction = tl.inline_asm_elementwise(
            _PACK_MASTER, "=r,=r,=r,r,r,r,r", [_bits(x) + (word >> 24) + 0x8000], (tl.int16, tl.int8), is_pure=True,
            pack=4,
        )  # fmt: skip
        tl.store(weight_ptr + at, weight, inside)
        tl.store(correction_ptr + at, correction, inside)
    else:
        tl.store(weight_ptr + at, x, inside)


# A stream of 1 would become a constant, which has no type.
@triton.jit(do_not_specialize=["stream_low", "stream_high"])
def _update_blocks(
    weight_ptr, grad_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr,
    numel, num_blocks, stream_low, stream_high, NARROW: tl.constexpr, DECAYS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    if tl.load(coefficients_ptr) != 0.0:
        return
    seed = stream_high.to(tl.uint32)
    low = _mix32(_mix32(tl.load(coefficients_ptr + 1).to(tl.uint32) + seed) ^ stream_low.to(tl.uint32))
    high = _mix32(low + seed)
    start = tl.program_id(0) * BLOCKS
    for block in range(start, tl.minimum(start + BLOCKS, num_blocks)):
        at = block.to(tl.int64) * 256 + tl.arange(0, 256)
        inside = None if WHOLE else at < numel
        other = None if WHOLE else 0
        weight, grad = tl.load(weight_ptr + at, inside, other), tl.load(grad_ptr + at, inside, other)
        code, root_code = _codes(tl.load(first_ptr + at, inside, other), tl.load(second_ptr + at, inside, other))
        if NARROW:
            correction = tl.load(correction_ptr + at, inside, other)
            master_bits, grad_bits = tl.inline_asm_elementwise(
                _UNPACK_MASTER, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r", [weight, correction, grad],
                (tl.uint32, tl.uint32), is_pure=True, pack=4,
            )  # fmt: skip
            master, g = _float(master_bits), _float(grad_bits)
        else:
            master, g = weight, grad

        first_unit = tl.load(first_scale_ptr + block) * tl.load(coefficients_ptr + 2)
        second_unit = tl.load(second_scale_ptr + block) * tl.load(coefficients_ptr + 4)
        companded = code * _minus_reciprocal(tl.fma(tl.abs(code), -1.0 / 127.0, 2.0))
        m = tl.fma(companded, -first_unit, g * tl.load(coefficients_ptr + 3))
        a = root_code * second_unit
        h = g * tl.load(coefficients_ptr + 5)
        s = tl.sqrt_rn(tl.fma(a, a, h * h))
        x = _step(master, m, s, coefficients_ptr, DECAYS)

        offset = _mix32(block.to(tl.uint32) ^ low)
        word = _mix32(offset + high) * tl.arange(0, 256).to(tl.uint32) + offset
        # 0 * x adds nothing but a NaN where x is not finite, as it is not where a moment is not.
        most_first = tl.reduce(tl.abs(tl.fma(x, 0.0, m)), 0, _larger)
        if most_first < float("inf"):
            most_second = _float(tl.max(_bits(s).to(tl.int32, bitcast=True), 0))
            _store(
                weight_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr,
                block, at, inside, m, s, x, most_first, most_second, word, NARROW,
            )  # fmt: skip
        else:
            _store_careful(
                weight_ptr, correction_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, coefficients_ptr,
                numel, block, at, m, s, word, NARROW, DECAYS,
            )  # fmt: skip


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
        g = _float(grad.to(tl.uint32) << 16)
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
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(weight_ptr + at, tl.where(is_nan, 0x7FC0, rounded).to(tl.int16), inside)
        tl.store(master_ptr + at, x, inside)
    else:
        tl.store(weight_ptr + at, x, inside)
