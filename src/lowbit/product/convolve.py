"""`lowbit.convolution`: checks its arguments, prepares a convolution, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lowbit import isa as instruction_sets
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.kernels.cpu.shared.panel_format import PanelFormat
from lowbit.product.arguments import (
    bytes_array,
    check_bytes,
    check_k,
    moderate_number,
    output,
    per_column,
    per_element,
    per_row,
    plain_number,
    zero_points,
)
from lowbit.product.convolution import prepare_convolution
from lowbit.product.dispatch import threads_key
from lowbit.product.geometry import Geometry
from lowbit.product.output import AnyPostOp, OutputSpec, post_ops_tuple
from lowbit.product.prepare import KEPT
from lowbit.product.prepared import Prepared
from lowbit.product.product import Convolution
from lowbit.product.requests import bounded, group_format
from lowbit.product.types import Kind, Operand, OutDtype, PaddingMode
from lowbit.weights.convolution import ConvolutionShape, PackedConvolution

_UNSCALED = (False, False, None, "float32", None, 0)
"""What must be asked of the output, as `OutputSpec.of` takes it, where there is no scale."""


def convolution(
    x: Kind,
    weight: PackedConvolution,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int | Sequence[int]] = 0,
    dilation: int | Sequence[int] = 1,
    padding_mode: PaddingMode = "constant",
    output_padding: int | Sequence[int] = 0,
    zero_point: int = 0,
    scale: float | None = None,
    bias: Operand | None = None,
    residual: Operand | None = None,
    post_ops: Sequence[AnyPostOp] | None = None,
    out_dtype: OutDtype = "float32",
    out_scale: float | None = None,
    out_zero_point: int = 0,
    out: Kind | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """The convolution of 8-bit images, channels last, in any number of dimensions:
    `[batch, *size, channels]` → `[batch, *output, outputs]`.

    x: int8 or uint8; weight: from `lowbit.pack_convolution`, with its groups. stride, dilation: one
    integer, or one for each dimension; padding: also a pair for each. What lies outside is
    `zero_point` ("constant"), or pixels of the image as numpy.pad repeats them ("reflect",
    "edge", "wrap"). Of a transposed weight all these, and output_padding, mean what they do in
    ONNX's ConvTranspose.

    Without a scale, the exact sums Σ (x − zero_point)·w, int32. With the scale of x, times this and
    the weight's scales; then bias [outputs], residual `[batch, *output, outputs]`, post_ops and the
    output as in `lowbit.matmul_scaled`. The same bits on every instruction set.

    Raises as that does, and ValueError if the weight is of other channels or dimensions, padding
    does not go with its mode, or an image takes 2 GiB.
    """
    left, scale = np.ascontiguousarray(bytes_array(x, "x")), plain_number(scale)
    geometry = (_integers(stride, "stride"), _integers(padding, "padding"),
                _integers(dilation, "dilation"), padding_mode,
                _integers(output_padding, "output_padding"))  # fmt: skip
    prepared, spec = _requested(
        left.shape, left.dtype, group_format(weight, isa), weight.shape, threads_key(threads), isa,
        bool(np.any(zero_point)), scale is not None, moderate_number(scale),
        bounded(weight, isa), geometry,
        bias is not None, residual is not None, post_ops_tuple(post_ops), out_dtype,
        plain_number(out_scale), plain_number(out_zero_point),
    )  # fmt: skip
    zero = zero_points(zero_point, 1, left.dtype, "zero_point", FLIP * (left.dtype == np.int8))
    factor = None if scale is None else per_row(scale, 1, "scale")
    columns = per_column(bias, weight.outputs, "bias")
    added = None if columns is None else weight.biased(columns)
    beside = per_element(residual, prepared.shape, "residual", spec.residual)
    result, returned = output(x, out, prepared.shape, spec.storage, (x, residual, bias))
    prepared.into(result, {
        **prepared.weight(weight), "a": left, "row_scale": factor, "row_zero": zero, "bias": added,
        "residual": beside, "parameters": spec.parameters,
    })  # fmt: skip
    return returned


@lru_cache(maxsize=KEPT, typed=True)  # 7 is a zero point, 7.0 none
def _requested(
    shape: tuple[int, ...], dtype: np.dtype[Any], b: PanelFormat, weight: ConvolutionShape,
    threads: int, isa: str | None, shifted: bool, scaled: bool, fair: bool, small: bool,
    geometry: tuple[Any, ...], *output: Any,
) -> tuple[Prepared, OutputSpec]:  # fmt: skip
    """What `lowbit.convolution` asks for. shape, dtype: of the images; b: the form of a group's
    matrix; shifted, scaled, fair: whether they have a zero point, a scale, a moderate one; small:
    whether sums are bounded; geometry: stride, padding, dilation, padding_mode, output_padding;
    output: as `OutputSpec.of` takes it."""
    check_bytes(dtype, "x")
    size = shape[1:-1]
    if len(shape) != len(weight.kernel) + 2 or shape[-1] != weight.channels:
        raise ValueError(
            f"x must be [batch, {len(weight.kernel)} sizes, {weight.channels} channels] for a "
            f"kernel {weight.kernel}, got {shape}"
        )
    stride, padding, dilation, mode, more = geometry
    if not weight.transposed:
        if more:
            raise ValueError("output_padding belongs to transposed convolutions")
        where = Geometry.of(size, weight.kernel, stride, padding, dilation, mode)
    else:
        if mode != "constant":
            raise ValueError(f"a transposed convolution has no padding_mode, got {mode!r}")
        where = Geometry.transposed(size, weight.kernel, stride, padding, dilation, more)
    where.check_pixels()
    check_k(b.k, dtype.name, b.dtype, (shifted, False))
    if scaled and not b.scaled:
        raise ValueError("weight has no scale: pack a QTensor, or give x no scale")
    spec = OutputSpec.of(*output) if scaled else OutputSpec("s32", np.dtype(np.int32))
    if not scaled and output != _UNSCALED:
        raise ValueError("bias, residual, post_ops and outputs but int32 need the scale of x")
    name = instruction_sets.active(isa).name
    signed = dtype == np.int8
    convolution = Convolution(
        shape[0], where, shape[-1], weight.groups, signed, shifted, b, name, threads,
        spec.post_ops, spec.out, fair and spec.moderate, small,
    )  # fmt: skip
    return prepare_convolution(convolution), spec


def _integers(given: Any, name: str) -> Any:
    """An integer, or sequences of them as tuples. TypeError: there are others, which must be said
    before they are looked up, since 1.0 equals 1."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return tuple(_integers(one, name) for one in given)
    if type(given := plain_number(given)) is not int:
        raise TypeError(f"{name} must be an integer or a sequence of them, got {given!r}")
    return given
