"""Right functions of tensors that look unusual: a checker must not call them wrong."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from triton.tools.tensor_descriptor import TensorDescriptor

from lowbit.spec import operation


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67}, special=True)
def doubled(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return 2 * x


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67})
def sums(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67}, special=True)
def halves(x: BFloat16[np.ndarray, "N T"]) -> BFloat16[np.ndarray, "N T"]:
    return x / 2


@operation(exercise={"N": 6, "T": 72}, at_most={"N": 67}, multiple_of={"T": 8}, special=True)
def aligned(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return 2 * x


@triton.jit
def double_kernel(x_ptr, z_ptr, T, x_row, x_column, z_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + j * x_column, mask=j < T)
    tl.store(z_ptr + row * z_row + j, 2 * x, mask=j < T)


@triton.jit
def add_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * T + j, mask=j < T, other=0.0)
    tl.atomic_add(z_ptr + row, tl.sum(x, axis=0))


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})], key=["T"])
@triton.heuristics({"WIDE": lambda given: given["T"] > 64})
@triton.jit
def tuned_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * T + j, mask=j < T)
    tl.store(z_ptr + row * T + j, x * 2 if WIDE else x + x, mask=j < T)


@triton.jit
def half_kernel(x_ptr, z_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count)
    tl.store(z_ptr + i, x * 0.5, mask=i < count)


@triton.jit
def described_kernel(x, z, BLOCK: tl.constexpr):
    at = [tl.program_id(0), tl.program_id(1) * BLOCK]
    z.store(at, x.load(at) * 2)


def _twice(x, z, first=0):
    grid = (x.shape[0] - first, triton.cdiv(x.shape[1], 32))
    double_kernel[grid](x[first:], z[first:], x.shape[1], *x.stride(), z.stride(0), BLOCK=32)
    return z


def takes_any_strides(x):
    return _twice(x, torch.empty(x.shape))


def result_is_part_of_more(x):
    return _twice(x, torch.empty(x.shape[0], x.shape[1] + 5)[:, 2:-3])


def half_by_torch(x):
    z = torch.empty(x.shape)
    torch.mul(x[:1], 2, out=z[:1])
    return _twice(x, z, 1) if x.shape[0] > 1 else z


def zeroed_by_a_copy(x):
    z = torch.empty(x.shape[0])
    z.copy_(torch.zeros(1).expand(x.shape[0]))
    add_kernel[(x.shape[0], triton.cdiv(x.shape[1], 32))](x.contiguous(), z, x.shape[1], 32)
    return z


def works_on_its_own_copy(x):
    z = x.clone(memory_format=torch.contiguous_format)
    return _twice(z, z)


def tuned_and_decided(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    tuned_kernel[lambda meta: (x.shape[0], triton.cdiv(meta["T"], meta["BLOCK"]))](x, z, x.shape[1])
    return z


def arithmetic_in_bfloat16(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    half_kernel[(triton.cdiv(x.numel(), 64),)](x, z, x.numel(), 64, num_warps=2)
    return z


def described_by_the_host(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    tiles = [TensorDescriptor.from_tensor(one, [1, 16]) for one in (x, z)]
    described_kernel[(x.shape[0], triton.cdiv(x.shape[1], 16))](*tiles, 16)
    return z


UNUSUAL = [
    (takes_any_strides, doubled, ()),
    (result_is_part_of_more, doubled, ()),
    (half_by_torch, doubled, ()),
    (zeroed_by_a_copy, sums, ("rounding-order",)),
    (works_on_its_own_copy, doubled, ()),
    (tuned_and_decided, doubled, ()),
    (arithmetic_in_bfloat16, halves, ()),
    (described_by_the_host, aligned, ()),
]
