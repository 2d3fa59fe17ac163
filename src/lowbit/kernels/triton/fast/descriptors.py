"""How kernels get at tiles of tensors: descriptors, which the bulk copy engine of Hopper reads.

A kernel's parameter is a descriptor that the host has made, or a pointer with strides, of which the
kernel makes one itself; without that engine Triton turns the latter into ordinary loads and stores.
Tiles past an edge are filled with zeros when they are loaded, and cut when they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowbit.kernels.triton.fast.launch import gpu_of

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
    return x if describable(x) else aligned_like(x).copy_(x)


def aligned_like(x: Tensor, *shape: int) -> Tensor:
    """Memory for a tensor like x, of another shape if one is given, whose rows begin at multiples
    of 16 bytes."""
    *outer, width = shape or x.shape
    padded = width + -width % (_ALIGNMENT // x.itemsize)
    return torch.empty((*outer, padded), dtype=x.dtype, device=x.device)[..., :width]


def described(x: Tensor, block: Sequence[int]) -> Any:
    """A tensor for which `describable` holds, as what `tiles_of` takes: a descriptor of its tiles,
    or its pointer and all strides but the last, which is 1."""
    if gpu_of(x.device).capability < _HOPPER:
        return (x, *x.stride()[:-1])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def described_in_shared(x: Tensor, block: Sequence[int]) -> Any:
    """A descriptor of the tiles of a matrix for Gluon, which says how they lie in shared memory."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia import hopper

    gl: Any = language
    kind = gl.int8 if x.itemsize == 1 else gl.bfloat16  # whose size alone counts
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return hopper.TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


@triton.jit
def tiles_of(source, shape, block):
    """A descriptor of a tensor of this shape, in tiles of the shape `block`."""
    if isinstance(source, tl.tensor_descriptor):
        return source
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return tl.make_tensor_descriptor(source[0], shape, source[1:] + (1,), block)  # noqa: RUF005


@triton.jit
def load_rows(descriptor, batch, head, row):
    """A tile of rows of one head, from `row` on, as [rows, size]."""
    shape: tl.constexpr = descriptor.block_shape
    return descriptor.load([batch, head, row, 0]).reshape(shape[2], shape[3])


@triton.jit
def store_rows(descriptor, batch, head, row, values):
    """Store what `load_rows` would load, in the dtype of the tensor."""
    values = values.to(descriptor.dtype).reshape(descriptor.block_shape)
    descriptor.store([batch, head, row, 0], values)
