"""What is asked for, when anything asks for a product of integers or of floats, or for a
convolution: one record each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.isa import host
from lowbit.kernels.cpu.convolution.depthwise import is_depthwise
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery
from lowbit.kernels.cpu.rows.input_format import InputFormat
from lowbit.kernels.cpu.rows.shifted import Image
from lowbit.kernels.cpu.shared.epilogue import OUTPUTS, Epilogue
from lowbit.kernels.cpu.shared.layout import padded_k
from lowbit.kernels.cpu.shared.panel_format import PanelFormat
from lowbit.product.geometry import Geometry

_FLOATS = {np.dtype(np.float32): "f32", np.dtype(bfloat16): "bf16", np.dtype(np.float16): "f16"}
_MOST_CLAIMED = 512  # k; where products take longer, stores wait for nothing


class Product(NamedTuple):
    """The product of m rows with a packed right operand, and what follows it.

    - a: what the left operand is, and how its rows are made. a_strides: from row to row and within
      one, in elements.
    - b: what the right operand is.
    - isa: the instruction set. threads: how many, or, negative, at most how many, as the work is
      worth.
    - post_ops: their names, in order. output: "s32", "f32", "bf16", "u8", "s8", or "max8", the
      greatest float32 of each 8 columns ("max8_masked": of those that a mask admits, bytes, one for
      each column, in place of a residual). streams: the output goes past the caches; its rows begin
      at multiples of 64 bytes. out_stride, residual_stride: elements from row to row of the output
      and of the residual; 0: n.
    - image: where rows are made in strips, the geometry of one.
    - moderate: the scale of rows is, and that of a quantized output.
    """

    m: int
    a: InputFormat
    a_strides: tuple[int, int]
    b: PanelFormat
    isa: str
    threads: int
    post_ops: tuple[str, ...] = ()
    output: str = "s32"
    streams: bool = False
    out_stride: int = 0
    residual_stride: int = 0
    image: Image | None = None
    moderate: bool = False

    @property
    def n(self) -> int:
        return self.b.n

    @property
    def k(self) -> int:
        return self.b.k

    @property
    def row_bytes(self) -> int:
        """Of a packed row of the left operand, with all of its digits."""
        return padded_k(self.k) * self.a.digits

    @property
    def out_bytes(self) -> int:
        """Of an element of the output."""
        return OUTPUTS[self.output].bytes

    @property
    def out_row(self) -> int:
        """Elements from row to row of the output."""
        return self.out_stride or self.n

    @property
    def residual_bytes(self) -> int:
        """From row to row of the residual."""
        if self.output == "max8_masked":  # which is the same for all
            return 0
        item = 4 if "residual" in self.post_ops else 1
        return item * (self.residual_stride or self.n)

    @property
    def by_lines(self) -> bool:
        """Whether lines of rows can be made one by one: without sums, which rows have as wholes."""
        return self.a.by_lines and not self.epilogue.b_zero

    @property
    def query(self) -> KernelQuery:
        """What the micro-kernels are asked."""
        b = self.b
        return KernelQuery(
            self.m, b.n, b.k, b.largest_pair, b.stored, self.a.grouping,
            self.by_lines and not self.a.windows, bool(self.a.flip), b.split,
            self.image.length if self.image else 0, self.image is None or self.image.aligned,
        )  # fmt: skip

    @property
    def epilogue(self) -> Epilogue:
        """What follows the sums. With groups, the sums hold scales and zero points already."""
        scales = "both"
        if self.a.grouping:
            scales = "none" if self.a.grouping.by_group else "row"
        return Epilogue(
            a_zero=self.a.zero_points,
            b_zero=bool(self.b.zero_points) and self.a.grouping is None,
            post_ops=self.post_ops,
            out=self.output,
            streams=self.streams,
            scales=scales,
            uniform=self.a.uniform,
            moderate=self.moderate and self.b.moderate,
            prefetch_output=not self.streams
            and self.b.k <= _MOST_CLAIMED
            and host.claims_lines(self.m * self.n * self.out_bytes),
        )


class Convolution(NamedTuple):
    """The convolution of 8-bit images [batch, *size, channels], channels last and contiguous, to
    [batch, *output, outputs], and what follows it.

    - groups: how many, each of which has a weight of the form `b`.
    - signed: images are int8, else uint8. shifted: they have a zero point.
    - isa, threads, post_ops, output, moderate: as in `Product`.
    - bounded: sums are known to be as small as `PackedConvolution.bounded` says.
    """

    batch: int
    geometry: Geometry
    channels: int
    groups: int
    signed: bool
    shifted: bool
    b: PanelFormat
    isa: str
    threads: int
    post_ops: tuple[str, ...] = ()
    output: str = "s32"
    moderate: bool = False
    bounded: bool = False
    out_stride = 0  # rows of pixels are beside each other

    @property
    def depthwise(self) -> bool:
        """Whether one kernel serves all groups."""
        return is_depthwise(self.channels, self.groups, self.geometry.kernel)

    @property
    def outputs(self) -> int:
        return self.b.n * self.groups

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return self.batch, *self.geometry.output, self.outputs


class Layout(NamedTuple):
    """What a matrix is, but for its address: its type, shape, strides in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, matrix: npt.NDArray[Any]) -> Layout:
        return cls(matrix.dtype, matrix.shape, matrix.strides)

    @property
    def T(self) -> Layout:
        """The transposed matrix, which is the same memory."""
        return Layout(self.dtype, self.shape[::-1], self.strides[::-1])

    @property
    def kind(self) -> str:
        """What the kernels call the type: "f32", "bf16" or "f16"."""
        return _FLOATS[self.dtype]

    @property
    def steps(self) -> tuple[int, int]:
        """Strides in elements, where an axis of at most one element counts as contiguous."""
        pairs = zip(self.strides, self.shape, strict=True)
        rows, columns = (s // self.dtype.itemsize if n > 1 else 1 for s, n in pairs)
        return rows, columns


class FloatProduct(NamedTuple):
    """out = alpha·(a @ b) + beta·c, all sizes at least 1; c None: it is not read.

    The kernels take rows of out and c that are contiguous. isa: the level of instruction sets,
    whose extensions serve too. threads: how many. swapped: it is the transposed one of what was
    asked for, whose operand b is a here.
    """

    a: Layout
    b: Layout
    c: Layout | None
    out: Layout
    isa: str
    threads: int
    swapped: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What was asked for calls a and b so."""
        return ("b", "a") if self.swapped else ("a", "b")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output, as it was asked for."""
        return self.out.shape[::-1] if self.swapped else self.out.shape

    @property
    def m(self) -> int:
        return self.out.shape[0]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def kind(self) -> str:
        """What is multiplied: "bf16" where both operands are that, else "f32", to which numbers of
        16 bits are widened when they are read."""
        return "bf16" if self.a.kind == self.b.kind == "bf16" else "f32"

    @property
    def item_bytes(self) -> int:
        """Of a number that is multiplied. What is cut by it is cut for an operand that is widened
        as it is for its numbers as float32, so that sums are the same, to the bit."""
        return 2 if self.kind == "bf16" else 4

    @property
    def right_bytes(self) -> int:
        """Of the numbers of the right operand."""
        return self.k * self.n * self.item_bytes

    @property
    def a_along(self) -> str:
        """The axis of a with stride 1: "k", "x" for its rows, or "" for neither."""
        return _along(self.a.steps[1], self.a.steps[0], "k")

    @property
    def b_along(self) -> str:
        """The axis of b with stride 1: "x" for its columns, "k", or "" for neither."""
        return _along(self.b.steps[0], self.b.steps[1], "x")


def _along(k_step: int, x_step: int, first: str) -> str:
    """Which axis is contiguous; `first` is asked first."""
    axes = [axis for axis, step in (("k", k_step), ("x", x_step)) if step == 1]
    return first if first in axes else "".join(axes)
