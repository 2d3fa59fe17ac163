"""The course: what it says about each operation of `lowbit.spec.exercises`."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.spec import Operation
from lowbit.spec import exercises as operations


@dataclass(frozen=True)
class Exercise:
    """An exercise of the course. number: from 1, its place in `lowbit.spec.exercises`. hints: from
    the idea to nearly the code; the last one may have several lines."""

    number: int
    operation: Operation
    formula: str
    idea: str
    hints: tuple[str, str, str]

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.operation.name

    @property
    def stem(self) -> str:
        """The name of its file, without the ending."""
        return f"{self.number:02d}_{self.name}"


def find(what: str) -> Exercise:
    """The exercise of a number or of an operation's name. ValueError for one that there is not."""
    for exercise in course:
        if what in (exercise.name, str(exercise.number), f"{exercise.number:02d}"):
            return exercise
    names = ", ".join(f"{one.number} {one.name}" for one in course)
    raise ValueError(f"there is no exercise {what!r}; there are {names}")


course: tuple[Exercise, ...] = (
    # Each element of the result is computed on its own: blocks, grids and masks.
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
    # An element of the result needs more input than a block holds: loops.
    Exercise(
        number=7,
        operation=operations.long_sum,
        formula="z_i = Σ_j x_ij",
        idea="A loop over blocks of the row, and a sum that stays in registers.",
        hints=(
            "A row may be longer than a block. One program takes B0 rows and walks along them, "
            "B1 elements at a time, adding to a sum that it stores once, at the end.",
            "tl.sum(block, axis=1) adds along the rows of a block. The last block of a row is "
            "ragged: masked lanes have no value unless other= gives them one, and here it has to "
            "be one that adds nothing.",
            """\
i = tl.program_id(0) * B0 + tl.arange(0, B0)
total = tl.zeros((B0,), tl.float32)
for start in range(0, T, B1):
    j = start + tl.arange(0, B1)
    inside = (i < N0)[:, None] & (j < T)[None, :]
    x = tl.load(x_ptr + i[:, None] * T + j[None, :], mask=inside, other=...)
    total += ...
tl.store(z_ptr + i, total, mask=i < N0)""",
        ),
    ),
    Exercise(
        number=8,
        operation=operations.long_softmax,
        formula="z_ij = exp(x_ij) / Σ_k exp(x_ik)",
        idea="The running maximum and the running sum in one pass: the sum is rescaled.",
        hints=(
            "exp(89) is too large for float32, so subtract the largest element of the row first: "
            "the quotient is the same. One pass finds the largest and the sum together, a second "
            "one writes the result.",
            "When a block brings a larger maximum, all that was summed so far is too large by "
            "exp(now - largest): multiply it by exp(largest - now), then add the block's part. "
            "exp(a) is tl.exp2(a * 1.44269504). Beware of -inf minus -inf in rows past the end.",
            """\
for start in range(0, T, B1):
    ...
    x = tl.load(row + j[None, :], mask=inside, other=-float("inf"))
    now = tl.where(i < N0, tl.maximum(largest, tl.max(x, axis=1)), 0.0)
    total *= tl.exp2((largest - now) * log2_e)
    total += tl.sum(..., axis=1)
    largest = now
for start in range(0, T, B1):
    ...
    z = tl.exp2((x - largest[:, None]) * log2_e) / total[:, None]
    tl.store(...)""",
        ),
    ),
    Exercise(
        number=9,
        operation=operations.flash_attention,
        formula="z_i = Σ_j softmax_j(q_i · k_j) · v_j",
        idea="Softmax and the weighted sum in one loop; the scores are never stored.",
        hints=(
            "It is the first pass of exercise 8 with a second sum beside the first: the sum of "
            "weight · v. Their quotient is the result, so there is no second pass.",
            "Rescale both sums by the same factor when the maximum grows. Mask the scores, after "
            "the product: with k padded by -inf, q · k is +inf for a negative q, and NaN for 0.",
            """\
for start in range(0, T, B1):
    j = start + tl.arange(0, B1)
    k = tl.load(k_ptr + j, mask=j < T, other=0.0)
    v = ...
    scores = tl.where((j < T)[None, :], q[:, None] * k[None, :], -float("inf"))
    now = tl.maximum(largest, tl.max(scores, axis=1))
    rescale = tl.exp2((largest - now) * log2_e)
    weight = tl.exp2((scores - now[:, None]) * log2_e)
    weights = weights * rescale + tl.sum(weight, axis=1)
    weighted = ...
    largest = now""",
        ),
    ),
    Exercise(
        number=10,
        operation=operations.conv2d,
        formula="z_bij = Σ_uv k_uv · x_b,i+u,j+v, zeros past the lower and right edge",
        idea="Two short loops over the small kernel; the padding is a mask.",
        hints=(
            "A program computes B1 neighbours of one row of one image: see `grid` in the file for "
            "what its three numbers are. It loops over the KH · KW weights and, for each, loads "
            "the same lanes shifted by (u, v).",
            "A weight is one number: tl.load of a pointer without a block. Elements past an edge "
            "count as 0, which is what mask= with other=0.0 gives; both edges need it.",
            """\
b, i = tl.program_id(0), tl.program_id(1)
j = tl.program_id(2) * B1 + tl.arange(0, B1)
total = tl.zeros((B1,), tl.float32)
for u in range(KH):
    for v in range(KW):
        inside = (i + u < H) & (j + v < W)
        x = tl.load(x_ptr + (b * H + i + u) * W + j + v, mask=inside, other=0.0)
        total += tl.load(k_ptr + ...) * x
tl.store(z_ptr + ..., total, mask=j < W)""",
        ),
    ),
    Exercise(
        number=11,
        operation=operations.batched_matmul,
        formula="z_b = x_b @ y_b",
        idea="A tile of the result stays in registers while tiles of x and y pass by.",
        hints=(
            "A program owns a tile [B0, B1] of one z_b. It walks along MID, B_MID at a time; each "
            "step loads a tile of x and a tile of y and adds their product to its own.",
            "tl.dot(x, y, total) multiplies two blocks and adds. input_precision='ieee' keeps "
            "float32; otherwise a GPU rounds to TF32. The third axis of the grid is the batch: x_b "
            "starts at b * N0 * MID. Fill masked lanes along MID with 0.",
            """\
total = tl.zeros((B0, B1), tl.float32)
for start in range(0, MID, B_MID):
    m = start + tl.arange(0, B_MID)
    x_inside = (i < N0)[:, None] & (m < MID)[None, :]
    x = tl.load(x_ptr + (b * N0 + i[:, None]) * MID + m[None, :], mask=x_inside, other=0.0)
    y = ...
    total = tl.dot(x, y, total, input_precision="ieee")
tl.store(z_ptr + (b * N0 + i[:, None]) * N1 + j[None, :], total, mask=...)""",
        ),
    ),
    Exercise(
        number=12,
        operation=operations.quantized_matmul,
        formula="z = (scale · (nibble(weight) − nibble(offset))) @ activation",
        idea="Weights stay at 4 bits in memory and become floats in registers, just before dot.",
        hints=(
            "It is exercise 11 without the batch. What is new is how a tile of the weight is "
            "made: load words, take a nibble of each, subtract the offset, multiply by the scale.",
            "Element m of a row is nibble m % 8 of word m // 8, and that word is its group: scale "
            "has the same index. The group's offset is nibble m // 8 % 8 of word m // 64. Nibble "
            "n of a word is (word >> 4 * n) & 15.",
            """\
m = start + tl.arange(0, B_MID)
group = i[:, None] * (MID // 8) + m[None, :] // 8
scale = tl.load(scale_ptr + group, mask=w_inside, other=0.0)
word = tl.load(weight_ptr + group, mask=w_inside, other=0)
offset = tl.load(offset_ptr + i[:, None] * (MID // 64) + m[None, :] // 64, ...)
nibble = (word >> (m[None, :] % 8 * 4)) & 15
zero = (offset >> ...) & 15
weight = scale * (nibble - zero).to(tl.float32)
...
total = tl.dot(weight, activation, total, input_precision="ieee")""",
        ),
    ),
)
