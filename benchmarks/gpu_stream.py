"""A stream in place on a GPU over arrays as the 8-bit update has them: what memory alone allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

ELEMENTS = 2048


def stream_step(params: int) -> Callable[[], object]:
    """A call that reads 7 and writes 5 bytes of each of ``params`` parameters."""
    halves = [torch.zeros(params, dtype=torch.int16, device="cuda") for _ in range(2)]
    codes = [torch.zeros(params, dtype=torch.int8, device="cuda") for _ in range(3)]
    return lambda: _stream[(triton.cdiv(params, ELEMENTS),)](*halves, *codes, params, ELEMENTS=ELEMENTS, num_warps=4)


@triton.jit
def _stream(weight_ptr, grad_ptr, correction_ptr, first_ptr, second_ptr, numel, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < numel
    weight, grad = tl.load(weight_ptr + at, inside), tl.load(grad_ptr + at, inside)
    correction, first = tl.load(correction_ptr + at, inside), tl.load(first_ptr + at, inside)
    second = tl.load(second_ptr + at, inside)
    tl.store(weight_ptr + at, weight ^ grad, inside)
    tl.store(correction_ptr + at, correction ^ 1, inside)
    tl.store(first_ptr + at, first ^ 1, inside)
    tl.store(second_ptr + at, second ^ 1, inside)
