"""Wrong functions of tensors: right or wrong kernels, launched wrongly."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch
from lowbit.spec import operation

BLOCK = 32


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67}, summed=("T",))
def scaled(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return x / (1 + np.abs(x).max(axis=1, keepdims=True))


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67})
def sums(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@operation(exercise={"N": 6, "T": 70}, at_most={"N": 67}, special=True)
def flipped(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "T N"]:
    return x.T


@triton.jit
def largest_kernel(x_ptr, largest_ptr, T, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, T, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + j, mask=j < T, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(largest_ptr + row, tl.max(largest, axis=0))


@triton.jit
def divide_kernel(x_ptr, largest_ptr, z_ptr, T, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.load(largest_ptr + row)
    x = tl.load(x_ptr + row * stride + j, mask=j < T)
    tl.store(z_ptr + row * T + j, x / (1 + largest), mask=j < T)


@triton.jit
def divide_by_the_next_kernel(x_ptr, largest_ptr, z_ptr, T, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.load(largest_ptr + row + 1)
    x = tl.load(x_ptr + row * stride + j, mask=j < T)
    tl.store(z_ptr + row * T + j, x / (1 + largest), mask=j < T)


@triton.jit
def divide_within_kernel(x_ptr, largest_ptr, T, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + j, mask=j < T)
    tl.store(x_ptr + row * stride + j, x / (1 + tl.load(largest_ptr + row)), mask=j < T)


@triton.jit
def add_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * T + j, mask=j < T, other=0.0)
    tl.atomic_add(z_ptr + row, tl.sum(x, axis=0))


@triton.jit
def store_sums_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + row, tl.sum(tl.load(x_ptr + row * T + j, mask=j < T, other=0.0), axis=0))


@triton.jit
def copy_kernel(x_ptr, z_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < count), mask=i < count)


def _largest(x: Tensor) -> Tensor:
    largest = torch.empty(x.shape[0])
    largest_kernel[(x.shape[0],)](x, largest, x.shape[1], x.stride(0), BLOCK)
    return largest


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], BLOCK)


def block_that_is_too_short(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    divide_kernel[(x.shape[0], 1)](x, _largest(x), z, x.shape[1], x.stride(0), BLOCK)
    return z


def temporary_is_not_zeroed(x):
    x = x.contiguous()
    z = torch.empty(x.shape[0])
    add_kernel[_grid(x)](x, z, x.shape[1], BLOCK)
    return z


def second_kernel_reads_past_the_first(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    largest = _largest(x)
    divide_by_the_next_kernel[_grid(x)](x, largest, z, x.shape[1], x.stride(0), BLOCK)
    return z


def result_has_the_strides_of_another(x):
    x = x.contiguous()
    z = torch.empty_strided(x.shape, (1, x.shape[0]))
    divide_kernel[_grid(x)](x, _largest(x), z, x.shape[1], x.stride(0), BLOCK)
    return z


def forgets_contiguous(x):
    z = torch.empty(x.shape)
    divide_kernel[_grid(x)](x, _largest(x), z, x.shape[1], x.stride(0), BLOCK)
    return z


def divides_its_input(x):
    x = x if x.stride(1) == 1 else x.contiguous()
    divide_within_kernel[_grid(x)](x, _largest(x), x.shape[1], x.stride(0), BLOCK)
    return x


def torch_changes_its_input(x):
    x.clamp_(-1e30, 1e30)
    x = x.contiguous()
    z = torch.empty_like(x)
    divide_kernel[_grid(x)](x, _largest(x), z, x.shape[1], x.stride(0), BLOCK)
    return z


def never_writes_the_tail(x):
    x = x.contiguous()
    z = torch.empty_like(x)
    whole = (x.shape[0], max(1, x.shape[1] // BLOCK))
    divide_kernel[whole](x, _largest(x), z, x.shape[1], x.stride(0), BLOCK)
    return z


def tail_is_lost_in_a_copy(x):
    padded = torch.empty(x.shape[0], triton.next_power_of_2(x.shape[1]) + BLOCK)
    padded[:, : x.shape[1] - 1] = x[:, :-1] / (1 + x.abs().amax(1, keepdim=True))
    return padded[:, : x.shape[1]].contiguous()


def launches_in_the_wrong_order(x):
    x = x.contiguous()
    z, largest = torch.empty_like(x), torch.empty(x.shape[0])
    divide_kernel[_grid(x)](x, largest, z, x.shape[1], x.stride(0), BLOCK)
    largest_kernel[(x.shape[0],)](x, largest, x.shape[1], x.stride(0), BLOCK)
    return z


def programs_race_for_the_sum(x):
    x = x.contiguous()
    z = torch.empty(x.shape[0])
    store_sums_kernel[_grid(x)](x, z, x.shape[1], BLOCK)
    return z


def torch_reads_what_nobody_wrote(x):
    return x.sum(1) + torch.empty(x.shape[0])


def returns_another_dtype(x):
    return x.sum(1).to(torch.bfloat16)


def returns_another_shape(x):
    return x.sum(1, keepdim=True)


def returns_two(x):
    return x.sum(1), x


def grid_for_another_block(x):
    x = x.T.contiguous()
    z = torch.empty_like(x)
    arguments = {"x_ptr": x, "z_ptr": z, "count": x.numel(), "BLOCK": BLOCK}
    launch(copy_kernel, (triton.cdiv(x.numel(), 2 * BLOCK),), arguments)
    return z


def count_of_padded_memory(x):
    x = x.T.contiguous()
    z = torch.empty_like(x)
    count = triton.cdiv(x.numel(), BLOCK) * BLOCK
    copy_kernel[(triton.cdiv(count, BLOCK),)](x, z, count, BLOCK=BLOCK)
    return z


# Function, specification, finding, the kernel that is named (None where none is to blame).
WRONG = [
    (block_that_is_too_short, scaled, "unwritten", None),
    (temporary_is_not_zeroed, sums, "unwritten-read", "add_kernel"),
    (second_kernel_reads_past_the_first, scaled, "out-of-bounds-load", "divide_by_the_next_kernel"),
    (result_has_the_strides_of_another, scaled, "wrong-values", "divide_kernel"),
    (forgets_contiguous, scaled, "out-of-bounds-load", "largest_kernel"),
    (divides_its_input, scaled, "input-written", "divide_within_kernel"),
    (torch_changes_its_input, scaled, "input-written", None),
    (never_writes_the_tail, scaled, "unwritten", None),
    (tail_is_lost_in_a_copy, scaled, "unwritten", None),
    (launches_in_the_wrong_order, scaled, "unwritten-read", "divide_kernel"),
    (programs_race_for_the_sum, sums, "write-conflict", "store_sums_kernel"),
    (torch_reads_what_nobody_wrote, sums, "unwritten-read", None),
    (returns_another_dtype, sums, "wrong-result", None),
    (returns_another_shape, sums, "wrong-result", None),
    (returns_two, sums, "crash", None),
    (grid_for_another_block, flipped, "unwritten", None),
    (count_of_padded_memory, flipped, "out-of-bounds-store", "copy_kernel"),
]
