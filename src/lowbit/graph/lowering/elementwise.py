"""One kernel for arithmetic, functions, conversions and copies: the steps that others add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Tensor
from lowbit.graph.lower import Lowering, channels_last, is_dense, order_of
from lowbit.graph.step import View
from lowbit.kernels.cpu.shared.formats import WHOLE, parameters_of
from lowbit.kernels.cpu.tensors.elementwise import (
    Elementwise,
    Step,
    elementwise,
    parameters_array,
    plan_copy,
    plan_elementwise,
    whole_parameters,
)
from lowbit.kernels.cpu.tensors.loops import CHANNELS, interleave_channels

_FLOATS = {"float32": "f32", "bfloat16": "bf16"}
_AFFINE = {"uint8": "u8", "int8": "s8", "int32": "s32"}


def compute(
    lowering: Lowering,
    out: View,
    inputs: Sequence[View],
    expression: Sequence[Step],
    values: Sequence[float] = (),
) -> None:
    """Add the step that computes `out`, of whose shape the inputs are, or can be made by repeating.

    expression: as `plan_elementwise` takes it; values: its numbers. Formats are converted.
    """
    strides = [out.strides, *(broadcast(one, out.shape) for one in inputs)]
    same = len(inputs) == 1 and tuple(expression) == (0,) and same_format(inputs[0], out)
    if same:
        form = plan_copy(out.tensor.itemsize, out.shape, strides)
        parameters = None
    else:
        computed = whole_dtype(out.tensor, [one.tensor for one in inputs])
        formats = [format_of(one.tensor) for one in inputs]
        form = plan_elementwise(
            formats, format_of(out.tensor), expression, out.shape, strides, computed or "f32"
        )
        if computed is None:
            pairs = [pair for one in inputs for pair in pairs_of(one.tensor)]
            target = next(iter(pairs_of(out.tensor)), None)
            parameters = parameters_array(pairs, values, target)
        else:
            parameters = whole_parameters([int(value) for value in values])
    add(lowering, form, [out, *inputs], parameters)


def whole_dtype(out: Tensor, inputs: Sequence[Tensor]) -> str | None:
    """The integers in which a function of these tensors is computed: of the inputs' dtype, booleans
    aside. None: it is computed in float32. NotImplementedError: no integers hold all inputs."""
    if not all(is_whole(one) for one in (out, *inputs)):
        return None
    dtypes = {one.dtype for one in inputs}
    found = np.result_type(*(dtypes - {"bool"} or dtypes))
    if found.kind not in "iub":
        raise NotImplementedError(f"no integers hold all of {', '.join(sorted(dtypes))}: Cast them")
    return found.name


def is_whole(tensor: Tensor) -> bool:
    """Whether it is of integers or booleans that stand for themselves."""
    return tensor.scale is None and tensor.dtype in WHOLE


def add(
    lowering: Lowering, form: Elementwise, operands: Sequence[View], parameters: np.ndarray | None
) -> None:
    """Add the launch of a form that was planned, of the output and the inputs."""
    program = elementwise.program(lowering.isa, form=form.form)
    places = [one.place for one in operands]
    names = ("out", "a", "b", "c")
    words = dict.fromkeys(names) | dict(zip(names, places, strict=False))
    lowering.add(program, {
        **words,
        "parameters": None if parameters is None else lowering.known(parameters),
        "geometry": lowering.known(form.geometry),
        "items": form.items,
    })  # fmt: skip


def format_of(tensor: Tensor) -> str:
    """What the kernels call a tensor's format. NotImplementedError: they have none for it."""
    if is_whole(tensor):
        return tensor.dtype
    found = (_FLOATS if tensor.scale is None else _AFFINE).get(tensor.dtype)
    if found is None:
        raise NotImplementedError(f"no kernel computes on tensors of {tensor.dtype}")
    return found


def index_format(view: View, what: str = "indices") -> str:
    """What the kernels call the format of indices. NotImplementedError: they have none for it."""
    if view.tensor.dtype not in ("int32", "int64"):
        raise NotImplementedError(f"{what} are int32 or int64, not {view.tensor.dtype}")
    return {"int32": "s32", "int64": "s64"}[view.tensor.dtype]


def pairs_of(tensor: Tensor) -> list[tuple[float, int]]:
    """(scale, zero point) of integers; plain ones stand for themselves."""
    if tensor.scale is None or not parameters_of(format_of(tensor)):
        return []
    return [(tensor.scale, tensor.zero_point)]


def affine(tensor: Tensor) -> tuple[float, int] | None:
    """Scale and zero point, if there are any."""
    return None if tensor.scale is None else (tensor.scale, tensor.zero_point)


def same_format(one: View, other: View) -> bool:
    a, b = one.tensor, other.tensor
    return (a.dtype, a.scale, a.zero_point) == (b.dtype, b.scale, b.zero_point)


def broadcast(view: View, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a view fills a larger shape."""
    added = len(shape) - len(view.shape)
    own = [
        0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True)
    ]
    return (*(0,) * added, *own)


def plain(lowering: Lowering, view: View, order: Sequence[int] | None = None) -> View:
    """The same numbers, dense in this order of dimensions: where they are, or copied."""
    if is_dense(view, order):
        return view
    target = lowering.fresh(view.tensor, order)
    compute(lowering, target, [view], (0,))
    return target


def converted(
    lowering: Lowering, view: View, tensor: Tensor, order: Sequence[int] | None = None
) -> View:
    """The same numbers in another format and order: where they are, or in new memory."""
    wanted = replace(tensor, shape=view.shape)
    target = View(wanted, view.place, view.strides)
    if same_format(view, target) and is_dense(view, order):
        return view
    target = lowering.fresh(wanted, order)
    if not _interleaved(lowering, view, target):
        compute(lowering, target, [view], (0,))
    return target


def in_format(lowering: Lowering, view: View, tensor: Tensor) -> View:
    """The same numbers in another format, in any order: where they are, or in new memory."""
    if same_format(view, View(tensor, view.place, view.strides)):
        return view
    return converted(lowering, view, tensor, order_of(view))


def _interleaved(lowering: Lowering, view: View, out: View) -> bool:
    """Whether few planes of float32 became bytes with channels last."""
    rank = len(view.shape)
    if rank < 3 or view.shape[1] not in CHANNELS or view.tensor.dtype != "float32":
        return False
    planes = is_dense(view) and is_dense(out, channels_last(rank))
    if not planes or out.tensor.scale is None:
        return False
    form = {"channels": view.shape[1], "format": format_of(out.tensor)}
    lowering.add(interleave_channels.program(lowering.isa, **form), {
        "out": out.place, "x": view.place, "images": view.shape[0],
        "pixels": math.prod(view.shape[2:]),
        "parameters": lowering.known(parameters_array([], (), pairs_of(out.tensor)[0])),
    })  # fmt: skip
    return True
