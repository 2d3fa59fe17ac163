"""How kernels get at tiles of tensors: descriptors, which the bulk copy engine of Hopper reads.

A kernel's parameter may be a descriptor that the host has made, or a pointer of which the kernel
makes one itself; without that engine Triton turns the latter into ordinary loads and stores.
Tiles past an edge are filled with zeros when they are loaded, and cut when they are stored.
"""

# Triton turns numbers into its own types, which its annotations do not say.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowbit.kernels.triton.fast.launch import compute_capability

_HOPPER = 90
_ALIGNMENT = 16
"""Bytes: of the address, and of every stride but the last (CUDA driver API, cuTensorMapEncode)."""


def describable(x: Tensor) -> bool:
    """Whether a descriptor can stand for a tensor as it lies in memory."""
    *strides, last = x.stride()
    steps = (stride * x.element_size() for stride in strides)
    aligned = x.data_ptr() % _ALIGNMENT == 0 and all(s > 0 and s % _ALIGNMENT == 0 for s in steps)
    return aligned and last == 1


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy of it whose rows begin at multiples of 16 bytes."""
    if describable(x):
        return x
    return aligned_like(x).copy_(x)


def aligned_like(x: Tensor) -> Tensor:
    """Memory for a tensor of this shape and dtype whose rows begin at multiples of 16 bytes."""
    return aligned_empty(x.shape, x.dtype, x.device)


def aligned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a tensor whose rows begin at multiples of 16 bytes."""
    *outer, width = shape
    padded = width + -width % (_ALIGNMENT // dtype.itemsize)
    return torch.empty((*outer, padded), dtype=dtype, device=device)[..., :width]


def described(x: Tensor, block: Sequence[int]) -> Any:
    """A tensor for which `describable` holds, as a kernel's argument."""
    if compute_capability(x.device) < _HOPPER:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@triton.jit
def heads_of(
    source,
    batches,
    heads,
    length,
    size,
    batch_stride,
    head_stride,
    row_stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A descriptor of [batches, heads, length, size] in blocks [1, 1, ROWS, SIZE]."""
    if isinstance(source, tl.tensor_descriptor):
        return source
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return tl.make_tensor_descriptor(
            source,
            [batches, heads, length, size],
            [batch_stride, head_stride, row_stride, 1],
            [1, 1, ROWS, SIZE],
        )


@triton.jit
def rows_of(descriptor, batch, head, row, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """ROWS rows of one head, from `row` on, as [ROWS, SIZE]."""
    return descriptor.load([batch, head, row, 0]).reshape(ROWS, SIZE)


@triton.jit
def numbers_of(source, rows, length, row_stride, COUNT: tl.constexpr):
    """A descriptor of [rows, length] in blocks [1, COUNT]."""
    if isinstance(source, tl.tensor_descriptor):
        return source
    else:  # noqa: RET505  # As above.
        return tl.make_tensor_descriptor(source, [rows, length], [row_stride, 1], [1, COUNT])


@triton.jit
def program_of(section, blocks, heads):
    """(block, head) of this program, of blocks · heads in one dimension.

    Heads are taken by sections; within one, the last blocks of all its heads, which causal
    attention has the most work for, come first. How many heads to a section: `section_of`.
    """
    program = tl.program_id(0)
    first = program // (section * blocks) * section
    width = tl.minimum(section, heads - first)
    place = program % (section * blocks)
    return blocks - 1 - place // width, first + place % width
