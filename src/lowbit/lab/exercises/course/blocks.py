"""Exercises about blocks, grids and masks: each element of the result is computed on its own."""

from __future__ import annotations

from lowbit.lab.exercises.exercise import Exercise, course
from lowbit.spec import exercises as operations

for exercise in (
    Exercise(
        number=1,
        operation=operations.add_constant,
        formula="z_i = x_i + 10",
        idea="One program works on a whole block of lanes; a mask keeps lanes past the end away.",
        hints=(
            "A Triton program does not compute one element but a block of them. tl.arange(0, B0) "
            "is the block of the numbers 0 to B0 - 1: use it as the indices.",
            "A pointer plus a block of indices is a block of pointers. B0 is a power of two and "
            "may be larger than N0: tl.load and tl.store take mask=, and touch only the lanes "
            "where it is true.",
            """\
i = tl.arange(0, B0)
x = tl.load(x_ptr + i, mask=i < N0)
tl.store(z_ptr + i, ..., mask=...)""",
        ),
    ),
    Exercise(
        number=2,
        operation=operations.add_constant_blocks,
        formula="z_i = x_i + 10",
        idea="A grid of programs, a block to each; the last block is ragged, so the mask matters.",
        hints=(
            "The same text is run by every program of the grid. They differ in one thing: "
            "tl.program_id(0) is 0 in the first, 1 in the second, and so on.",
            "Program p starts at p * B0. The mask compares the index in the whole tensor with N0, "
            "not the lane in the block.",
            """\
i = tl.program_id(0) * B0 + tl.arange(0, B0)
x = tl.load(x_ptr + i, mask=...)
tl.store(z_ptr + i, ..., mask=...)""",
        ),
    ),
    Exercise(
        number=3,
        operation=operations.outer_add,
        formula="z_ji = x_i + y_j",
        idea="Broadcasting: a row of lanes meets a column of lanes and makes a block [B1, B0].",
        hints=(
            "x varies along i and y along j. As in NumPy, x[None, :] is a row and y[:, None] a "
            "column, and their sum is a block of two dimensions.",
            "Memory has one dimension. Element z[j, i] of a tensor [N1, N0] lies at j * N0 + i; "
            "with j as a column and i as a row, that is a block of offsets.",
            """\
i = tl.arange(0, B0)
j = tl.arange(0, B1)
x = tl.load(x_ptr + i, mask=i < N0)
y = tl.load(y_ptr + j, mask=...)
inside = (j < N1)[:, None] & (i < N0)[None, :]
tl.store(z_ptr + j[:, None] * N0 + i[None, :], ..., mask=inside)""",
        ),
    ),
    Exercise(
        number=4,
        operation=operations.outer_add_blocks,
        formula="z_ji = x_i + y_j",
        idea="The grid has two axes, as the result has; both edges are ragged.",
        hints=(
            "It is exercise 3 with a grid as in exercise 2. Axis 0 of the grid walks along i, "
            "axis 1 along j: see `grid` in the file.",
            "tl.program_id(0) * B0 is the first i of a program, tl.program_id(1) * B1 its first "
            "j. A store needs a mask of both axes; the mask of one leaves the other open.",
            """\
i = tl.program_id(0) * B0 + tl.arange(0, B0)
j = tl.program_id(1) * B1 + tl.arange(0, B1)
x = ...
y = ...
inside = (j < N1)[:, None] & (i < N0)[None, :]
tl.store(z_ptr + j[:, None] * N0 + i[None, :], ..., mask=inside)""",
        ),
    ),
    Exercise(
        number=5,
        operation=operations.outer_mul_relu,
        formula="z_ji = relu(x_i · y_j)",
        idea="Fusion: what follows the product happens in registers, before the only store.",
        hints=(
            "relu(a) is a where a is positive and 0 elsewhere. Nothing has to be written and read "
            "again between the product and the relu.",
            "tl.maximum(a, 0.0) works on a whole block. Everything else is as in exercise 4.",
            """\
...  # i, j, x, y and inside as in exercise 4
z = tl.maximum(x[None, :] * y[:, None], 0.0)
tl.store(z_ptr + ..., z, mask=inside)""",
        ),
    ),
    Exercise(
        number=6,
        operation=operations.mul_relu_backward,
        formula="dx_ji = dz_ji · y_j where x_ji · y_j > 0, else 0",
        idea="The chain rule in a kernel: compute the forward again rather than store it.",
        hints=(
            "The forward was z = relu(x_ji · y_j). relu passes the gradient on where its argument "
            "was positive, and stops it elsewhere, at 0 too; the derivative of x · y by x is y.",
            "x is a matrix now: load it with the offsets j * N0 + i, those of dz and dx. "
            "tl.where(condition, a, b) chooses lane by lane.",
            """\
inside = (j < N1)[:, None] & (i < N0)[None, :]
at = j[:, None] * N0 + i[None, :]
x = tl.load(x_ptr + at, mask=inside)
y = tl.load(y_ptr + j, mask=j < N1)[:, None]
dz = ...
tl.store(dx_ptr + at, tl.where(..., dz * y, 0.0), mask=inside)""",
        ),
    ),
):
    course.add(exercise.name, exercise)
