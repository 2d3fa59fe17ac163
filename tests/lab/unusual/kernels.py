"""Right kernels that look unusual: a checker must not call them wrong."""

# Triton's own annotations do not know that a constant may stand for a tensor.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.spec.exercises import add_constant_blocks, long_sum, outer_add_blocks


def blocks(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)


@triton.jit
def blocks_overlap_but_masks_do_not(x_ptr, z_ptr, N0, B0: tl.constexpr):
    # Each program starts 4 lanes early, and masks them.
    first = tl.program_id(0) * B0
    i = first - 4 + tl.arange(0, B0 * 2)
    mine = (i >= first) & (i < first + B0) & (i < N0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=mine) + 10.0, mask=mine)


@triton.jit
def loads_past_the_end_are_masked(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    for ahead in range(3):
        x = tl.load(x_ptr + i + ahead * 1000000, mask=i + ahead * 1000000 < N0, other=7.0)
        tl.store(z_ptr + i, x + 10.0, mask=(i < N0) & (ahead == 0))


@triton.jit
def writes_twice_itself(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, i * 0.5, mask=i < N0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def reads_back_its_own(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 4.0, mask=i < N0)
    tl.store(z_ptr + i, tl.load(z_ptr + i, mask=i < N0) + 6.0, mask=i < N0)


@triton.jit
def in_place(x_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def programs_that_do_nothing(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def last_block_is_moved_back(x_ptr, z_ptr, N0, B0: tl.constexpr):
    # The last two blocks overlap, and write the same values.
    start = tl.maximum(tl.minimum(tl.program_id(0) * B0, N0 - B0), 0)
    i = start + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def fixed_number_of_programs(x_ptr, z_ptr, N0, B0: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(N0, B0), tl.num_programs(0)):
        i = block * B0 + tl.arange(0, B0)
        tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def one_element_at_a_time(x_ptr, z_ptr, N0):
    i = N0 - 1
    while i >= 0:
        tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0)
        i -= 1


@triton.jit
def reads_floats_as_integers(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    bits = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + i, mask=i < N0)
    tl.store(z_ptr + i, bits.to(tl.float32, bitcast=True) + 10.0, mask=i < N0)


@triton.jit
def masked_lanes_have_no_value(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def adds_atomically(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
    tl.atomic_add(z_ptr + i, tl.sum(x, axis=0))


@triton.jit
def lanes_add_atomically(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
    tl.atomic_add(z_ptr + i + j * 0, x, mask=j < T)


@triton.jit
def takes_strides(
    x_ptr,
    y_ptr,
    z_ptr,
    N0,
    N1,
    stride_x0,
    stride_y0,
    stride_z0,
    stride_z1,
    B0: tl.constexpr,
    B1: tl.constexpr,
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i * stride_x0, mask=i < N0)
    y = tl.load(y_ptr + j * stride_y0, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * stride_z0 + i[None, :] * stride_z1
    tl.store(z_ptr + at, x[None, :] + y[:, None], mask=inside)


@triton.jit
def result_of_another_name(
    x_ptr, y_ptr, c_ptr, N0, N1, stride_c0, stride_c1, B0: tl.constexpr, B1: tl.constexpr
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * stride_c0 + i[None, :] * stride_c1
    tl.store(c_ptr + at, x[None, :] + y[:, None], mask=inside)


@triton.jit
def _shifted(x, by):
    return x + by


@triton.autotune([triton.Config({"B0": 16}), triton.Config({"B0": 64})], key=["N0"])
@triton.jit
def tuned_with_a_helper(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, _shifted(x, 10.0), mask=i < N0)


@triton.heuristics({"EVEN": lambda arguments: arguments["N0"] % arguments["B0"] == 0})
@triton.jit
def unmasked_where_it_fits(x_ptr, z_ptr, N0, B0: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    if EVEN:
        x = tl.load(x_ptr + i)
    else:
        x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def leaves_early(x_ptr, z_ptr, N0, B0: tl.constexpr):
    if tl.program_id(0) * B0 >= N0:
        return
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def through_descriptors(x_ptr, z_ptr, N0, B0: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [N0], [1], [B0])
    z = tl.make_tensor_descriptor(z_ptr, [N0], [1], [B0])
    start = tl.program_id(0) * B0
    z.store([start], x.load([start]) + 10.0)


def one_too_many(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]) + 3,)


@triton.autotune(
    [triton.Config({"B1": 32}), triton.Config({"B1": 64})], key=["T"], reset_to_zero=["z_ptr"]
)
@triton.jit
def adds_once_when_tuned(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    j = tl.arange(0, B1)
    for start in range(0, T, B1):
        x = tl.load(x_ptr + tl.program_id(0) * T + start + j, mask=start + j < T, other=0.0)
        tl.atomic_add(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.autotune(
    [triton.Config({"B0": 32}), triton.Config({"B0": 64})], key=["N0"], restore_value=["x_ptr"]
)
@triton.jit
def restored_when_tuned(x_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


def rows(meta):
    return (meta["N0"],)


def three(meta):
    return 3


def rows_and_blocks(meta):
    return (meta["N0"], triton.cdiv(meta["T"], meta["B1"]))


def tiles(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"]))


ADD = {"spec": add_constant_blocks, "grid": blocks}
SPLIT = {"spec": long_sum, "grid": rows_and_blocks, "initial": 0.0}
# The kernel, what it is checked with, and the warnings that are due.
UNUSUAL = [
    (blocks_overlap_but_masks_do_not, ADD, ()),
    (loads_past_the_end_are_masked, ADD, ()),
    (writes_twice_itself, ADD, ()),
    (reads_back_its_own, ADD, ()),
    (in_place, {**ADD, "output": "x"}, ()),
    (programs_that_do_nothing, {**ADD, "grid": one_too_many}, ()),
    (last_block_is_moved_back, ADD, ("written-twice",)),
    (fixed_number_of_programs, {**ADD, "grid": three}, ()),
    (one_element_at_a_time, {"spec": add_constant_blocks}, ()),
    (reads_floats_as_integers, ADD, ()),
    (masked_lanes_have_no_value, ADD, ()),
    (adds_atomically, SPLIT, ("rounding-order",)),
    (lanes_add_atomically, SPLIT, ("rounding-order",)),
    (adds_once_when_tuned, {"spec": long_sum, "grid": rows, "initial": 0.0}, ()),
    (restored_when_tuned, {**ADD, "output": "x"}, ()),
    (takes_strides, {"spec": outer_add_blocks, "grid": tiles}, ()),
    (result_of_another_name, {"spec": outer_add_blocks, "grid": tiles}, ()),
    (tuned_with_a_helper, ADD, ()),
    (unmasked_where_it_fits, ADD, ()),
    (leaves_early, {**ADD, "grid": one_too_many}, ()),
    (through_descriptors, ADD, ()),
]
