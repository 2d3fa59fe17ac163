"""What a decoder does between products and attention: heads turned by their position, keys and
values kept in a cache, gated units, sums with a norm. Each in one launch, since a step has few
rows and would spend its time on starting kernels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch

_BLOCK = 1024  # elements of a gated unit to a program
_ELEMENTS = 8  # of a thread: 16 bytes of bfloat16


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride, angles_ptr, positions_ptr, slots_ptr,
    out_ptr, keys_ptr, values_ptr, q_norm_ptr, k_norm_ptr,
    heads, key_heads, slot_stride, head_stride, position_stride, epsilon,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """A program takes a head of a row: queries, then keys, then values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    place = tl.load(slots_ptr + row) * slot_stride + position * position_stride
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    key = head - heads
    if key >= key_heads:
        value = key - key_heads
        copied = tl.load(v_ptr + row * v_stride + value * SIZE + i, mask=inside, other=0.0)
        target = values_ptr + place + value.to(tl.int64) * head_stride
        tl.store(target + i, copied.to(values_ptr.dtype.element_ty), mask=inside)
    else:
        source = q_ptr + row * q_stride + head * SIZE
        weight_ptr = q_norm_ptr
        if key >= 0:
            source = k_ptr + row * k_stride + key * SIZE
            weight_ptr = k_norm_ptr
        x = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
        factor = 1.0
        if NORMED:
            factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
            x = x * factor * tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
        if TURNED:
            # Of each element the one that it is turned with, half of the turned ones away.
            other = tl.where(i < HALF, i + HALF, i - HALF)
            both = i < 2 * HALF
            y = tl.load(source + other, mask=both, other=0.0).to(tl.float32)
            if NORMED:
                y = y * factor * tl.load(weight_ptr + other, mask=both, other=0.0).to(tl.float32)
            angle = angles_ptr + position * (2 * HALF) + i % HALF
            cos = tl.load(angle, mask=both, other=1.0)
            sin = tl.load(angle + HALF, mask=both, other=0.0)
            x = x * cos + tl.where(i < HALF, -y, y) * sin
        if key >= 0:
            target = keys_ptr + place + key.to(tl.int64) * head_stride
            tl.store(target + i, x.to(keys_ptr.dtype.element_ty), mask=inside)
        else:
            target = out_ptr + (row * heads + head) * SIZE
            tl.store(target + i, x.to(out_ptr.dtype.element_ty), mask=inside)


def rotate(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, positions: Tensor, slots: Tensor,
    keys: Tensor, values: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, epsilon: float,
) -> Tensor:  # fmt: skip
    """As `lowbit.torch.functional.decoding.rotate`."""
    q, k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v))
    positions, slots = positions.contiguous(), slots.contiguous()
    angles, q_norm, k_norm = (
        None if one is None else one.contiguous() for one in (angles, q_norm, k_norm)
    )
    key_heads, size = keys.shape[1], keys.shape[3]
    rows, heads = len(q), q.shape[1] // size
    out = keys.new_empty(rows, heads, size)
    arguments: dict[str, Any] = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "q_stride": q.stride(0), "k_stride": k.stride(0),
        "v_stride": v.stride(0), "angles_ptr": q if angles is None else angles,
        "positions_ptr": positions, "slots_ptr": slots, "out_ptr": out, "keys_ptr": keys,
        "values_ptr": values, "q_norm_ptr": q if q_norm is None else q_norm,
        "k_norm_ptr": q if k_norm is None else k_norm, "heads": heads, "key_heads": key_heads,
        "slot_stride": keys.stride(0), "head_stride": keys.stride(1),
        "position_stride": keys.stride(2), "epsilon": epsilon, "SIZE": size,
        "BLOCK": triton.next_power_of_2(size), "HALF": 1 if angles is None else angles.shape[2],
        "TURNED": angles is not None, "NORMED": q_norm is not None,
    }  # fmt: skip
    launch(rotate_kernel, (rows, heads + 2 * key_heads), arguments, num_warps=1)
    return out


@triton.jit
def gated_kernel(x_ptr, z_ptr, length, x_stride, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """z = f(a) · b of rows x = [a, b]; f: SiLU, or GELU by tanh."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    a = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * x_stride + length + i, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh u) / 2 is the logistic function of 2 u.
    u = 1.5957691216057308 * (a + 0.044715 * a * a * a) if TANH else a
    z = a / (1.0 + tl.exp(-u)) * b
    tl.store(z_ptr + row * length + i, z.to(z_ptr.dtype.element_ty), mask=inside)


def gated(x: Tensor, function: str) -> Tensor:
    """As `lowbit.torch.functional.decoding.gated`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, length = x.shape[0], x.shape[1] // 2
    z = x.new_empty(rows, length)
    arguments = {
        "x_ptr": x, "z_ptr": z, "length": length, "x_stride": x.stride(0), "BLOCK": _BLOCK,
        "TANH": function == "gelu_tanh",
    }  # fmt: skip
    launch(gated_kernel, (rows, -(-length // _BLOCK)), arguments, num_warps=4)
    return z


@triton.jit
def add_norm_kernel(
    x_ptr, y_ptr, weight_ptr, sum_ptr, z_ptr, length, x_stride, y_stride, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """sum = x + y, z = sum / sqrt(mean(sum²) + epsilon) · weight, of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < length
    x = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)  # before threads meet
    # The norm is that of the sum as it is kept.
    total = (x + y).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * length + i, total, mask=inside)
    total = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total, axis=0) / length + epsilon)
    tl.store(z_ptr + row * length + i, (total * factor * weight).to(z_ptr.dtype.element_ty),
             mask=inside)  # fmt: skip


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """As `lowbit.torch.functional.decoding.add_rms_norm`."""
    x, y = (one if one.stride(1) == 1 else one.contiguous() for one in (x, y))
    weight = weight.contiguous()
    rows, length = x.shape
    total, z = x.new_empty(rows, length), x.new_empty(rows, length)
    block = triton.next_power_of_2(length)
    arguments = {
        "x_ptr": x, "y_ptr": y, "weight_ptr": weight, "sum_ptr": total, "z_ptr": z,
        "length": length, "x_stride": x.stride(0), "y_stride": y.stride(0), "epsilon": epsilon,
        "BLOCK": block,
    }  # fmt: skip
    warps = min(max(block // (32 * _ELEMENTS), 1), 16)
    launch(add_norm_kernel, (rows,), arguments, num_warps=warps)
    return total, z
