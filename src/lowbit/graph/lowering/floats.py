"""What stays in float32: products as calls of the float kernels, and what follows element by
element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from lowbit.graph.graph import Constant, Node, Tensor, numbers
from lowbit.graph.lower import Lowering, channels_last, lowerings, strides_of
from lowbit.graph.lowering.elementwise import broadcast, compute, converted, in_format, plain
from lowbit.graph.operators.convolution import convolution_windows, transposed_windows
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.tensors.loops import DIMENSIONS
from lowbit.product.geometry import Geometry

_FLOAT32 = np.dtype(np.float32)
Facts = tuple[np.dtype, tuple[int, ...], tuple[int, ...]]


def gemm(lowering: Lowering, a: View, b: View, out: View, bias: Place | None = None) -> None:
    """Add the launches of out = a @ b + bias, of float32; bias [N] is added to each row."""
    from lowbit.product.gemm import CopyFirst, factors, prepare_gemm  # not for 8 bits alone

    added = None if bias is None else (_FLOAT32, out.shape, (0, 4))
    prepared = prepare_gemm(
        _facts(a), _facts(b), added, _facts(out), True, bias is not None, lowering.threads,
        lowering.isa.name,
    )  # fmt: skip
    if isinstance(prepared.plan, CopyFirst):
        _gemm_by_copies(lowering, a, b, out, bias, prepared.plan.by_columns)
        return
    if not prepared.launches:  # nothing is multiplied
        if math.prod(out.shape):
            zero = lowering.known_view(np.zeros(1, np.float32))
            compute(lowering, out, [zero if bias is None else _row(out, bias)], (0,))
        return
    operands = {"a": a.place, "b": b.place, "c": bias, "out": out.place}
    operands |= factors(1.0, float(bias is not None))
    for program, words in prepared.steps(operands, lowering.scratch(prepared.scratch)):
        lowering.add(program, words)


def _gemm_by_copies(
    lowering: Lowering, a: View, b: View, out: View, bias: Place | None, by_columns: bool
) -> None:
    """As `gemm`, where the kernels cannot take operands as they lie, or would be slow."""
    target = lowering.fresh(out.tensor, (1, 0) if by_columns else None)
    gemm(lowering, plain(lowering, a), plain(lowering, b, (1, 0)), target)
    if bias is None:
        compute(lowering, out, [target], (0,))
        return
    compute(lowering, out, [target, _row(out, bias)], (0, 1, "add"))


def _row(out: View, bias: Place) -> View:
    return View(replace(out.tensor, shape=out.shape[1:]), bias, (1,))


def _facts(view: View) -> Facts:
    return _FLOAT32, view.shape, tuple(4 * stride for stride in view.strides)


def _matrix(view: View, shape: tuple[int, int], strides: tuple[int, int], distance: int) -> View:
    """Part of a tensor as a matrix, `distance` elements further."""
    return View(replace(view.tensor, shape=shape), view.place + 4 * distance, strides)


def _float32(lowering: Lowering, view: View, order: Sequence[int] | None = None) -> View:
    return converted(lowering, view, Tensor("float32", view.shape), order)


def _constant(lowering: Lowering, node: Node) -> Constant:
    """The weight of a product. NotImplementedError: it is no constant."""
    constant = lowering.graph.constants.get(node.inputs[1])
    if constant is None:
        raise NotImplementedError("weights are served where they are constants")
    return constant


def _weight(lowering: Lowering, node: Node) -> np.ndarray:
    return lowering.packed(_constant(lowering, node), _floats)


def _floats(constant: Constant) -> np.ndarray:
    return np.asarray(numbers(constant), np.float32)


def _columns(constant: Constant) -> np.ndarray:
    """Of [N, K], as [K, N]."""
    return np.ascontiguousarray(_floats(constant).T)


def _of_windows(constant: Constant, groups: int) -> tuple[np.ndarray, ...]:
    """Of a convolution, [taps · channels, outputs] for each group."""
    each = np.split(_floats(constant), groups)
    return tuple(np.ascontiguousarray(np.moveaxis(w, 1, -1).reshape(len(w), -1).T) for w in each)


def float_linear(lowering: Lowering, node: Node) -> None:
    """x [..., K] times weight [N, K], which may be of integers that stand for floats."""
    x = _float32(lowering, lowering.view(node.inputs[0]))
    weight = lowering.packed(_constant(lowering, node), _columns)
    m, (k, n) = math.prod(x.shape[:-1]), weight.shape
    _finished(lowering, node, None, [(_matrix(x, (m, k), (k, 1), 0), weight, 0, n)])


def float_conv(lowering: Lowering, node: Node) -> None:
    """Windows are brought to memory, as rows; then it is a product."""
    x, weight = lowering.view(node.inputs[0]), _constant(lowering, node)
    rank, outputs = len(x.shape), weight.shape[0]
    over, groups = convolution_windows(node, x.shape, weight.shape)
    x = _float32(lowering, x, channels_last(rank))
    if groups == x.shape[1] == outputs:
        _depthwise(lowering, node, x, _weight(lowering, node), over)
        return
    each, made = x.shape[1] // groups, outputs // groups
    parts = []
    matrices = lowering.packed(weight, _of_windows, groups=groups)
    for group, matrix in enumerate(matrices):
        rows = _windows(lowering, x, over, group * each, each)
        parts.append((rows, matrix, group * made, outputs))
    _finished(lowering, node, channels_last(rank), parts)


def _depthwise(lowering: Lowering, node: Node, x: View, weight: np.ndarray, over: Geometry) -> None:
    """Of every channel by itself: tap by tap, all channels at once."""
    order = channels_last(len(x.shape))
    padded = _padded(lowering, x, over)
    steps, ones = padded.strides[2:], (1,) * len(over.size)
    out = lowering.output(node.outputs[0], order)
    total = lowering.fresh(Tensor("float32", out.shape), order)
    strides = [stride * step for stride, step in zip(over.stride, steps, strict=True)]
    for number, tap in enumerate(product(*map(range, over.kernel))):
        at = sum(t * d * s for t, d, s in zip(tap, over.dilation, steps, strict=True))
        part = View(total.tensor, padded.place + 4 * at, (*padded.strides[:2], *strides))
        factor = lowering.known_view(weight[(slice(None), 0, *tap)].reshape(-1, *ones))
        inputs = [part, factor, total] if number else [part, factor]
        compute(lowering, total, inputs, (0, 1, "mul", 2, "add") if number else (0, 1, "mul"))
    _ended(lowering, node, total, out, bias_left=True)


def _windows(lowering: Lowering, x: View, over: Geometry, first: int, channels: int) -> View:
    """Rows [batch · pixels, taps · channels] of some channels of images that lie channels last."""
    batch, whole = x.shape[:2]
    size, taps = x.shape[2:], math.prod(over.kernel)
    pixels, out = over.pixels, over.output
    ones = all(n == 1 for n in (*over.kernel, *over.stride))
    if ones and not any((*over.before, *over.after)):
        return _matrix(x, (batch * pixels, channels), (whole, 1), first)
    padded = _padded(lowering, x, over)
    extents = padded.shape[2:]
    steps = strides_of((batch, *extents, whole))
    rows = lowering.fresh(Tensor("float32", (batch * pixels, taps * channels)))
    moved = [stride * step for stride, step in zip(over.stride, steps[1:-1], strict=True)]
    apart = [dilation * step for dilation, step in zip(over.dilation, steps[1:-1], strict=True)]
    whole_strides = strides_of((batch, *out, *over.kernel, channels))
    # As many axes of the windows in one step as its loops have room for.
    single = max(2 * len(size) + 2 - DIMENSIONS, 0)
    shape = (batch, *out, *over.kernel[single:], channels)
    tensor, first_axis = Tensor("float32", shape), 1 + len(size)
    for tap in product(*map(range, over.kernel[:single])):
        at = sum(t * step for t, step in zip(tap, apart, strict=False))
        to = sum(t * s for t, s in zip(tap, whole_strides[first_axis:], strict=False))
        source = View(
            tensor, padded.place + 4 * (first + at), (steps[0], *moved, *apart[single:], 1)
        )
        strides = (*whole_strides[:first_axis], *whole_strides[first_axis + single :])
        compute(lowering, View(tensor, rows.place + 4 * to, strides), [source], (0,))
    return rows


def _padded(lowering: Lowering, x: View, over: Geometry) -> View:
    """Images with zeros around them, as far as windows reach."""
    reach = [
        max(size + before, (out - 1) * stride + (kernel - 1) * dilation + 1)
        for size, before, out, stride, kernel, dilation in zip(
            x.shape[2:], over.before, over.output, over.stride, over.kernel, over.dilation,
            strict=True,
        )
    ]  # fmt: skip
    if tuple(reach) == x.shape[2:]:
        return x
    order = channels_last(len(x.shape))
    target = lowering.fresh(Tensor("float32", (*x.shape[:2], *reach)), order)
    compute(lowering, target, [lowering.known_view(np.zeros(1, np.float32))], (0,))
    distance = sum(b * s for b, s in zip(over.before, target.strides[2:], strict=True))
    inner = View(x.tensor, target.place + 4 * distance, target.strides)
    compute(lowering, inner, [x], (0,))
    return target


def float_transposed(lowering: Lowering, node: Node) -> None:
    """One product makes what each pixel adds to its surroundings; taps are then summed where they
    belong, in memory as large as all of it, of which the output is a part."""
    view, weight = lowering.view(node.inputs[0]), _weight(lowering, node)
    over, groups = transposed_windows(node, view.shape, weight.shape)
    rank, batch = len(view.shape), view.shape[0]
    order, each = channels_last(rank), weight.shape[1]
    x = _float32(lowering, view, order)
    size, count, taps = x.shape[2:], math.prod(x.shape[2:]), math.prod(over.kernel)
    channels, whole = each * groups, [
        max((n - 1) * s + (k - 1) * d + 1, b + o)
        for n, s, k, d, b, o in zip(
            size, over.stride, over.kernel, over.dilation, over.before, over.size, strict=True
        )
    ]  # fmt: skip
    made = lowering.fresh(Tensor("float32", (batch, channels, *whole)), order)
    zero = lowering.known_view(np.zeros(1, np.float32))
    apart = over.kernel == over.stride and not any(d > 1 for d in over.dilation)
    if not apart or math.prod(whole) != count * taps:
        compute(lowering, made, [zero], (0,))
    width = x.shape[1] // groups
    for group in range(groups):
        matrix = weight[group * width : (group + 1) * width]
        matrix = np.ascontiguousarray(np.moveaxis(matrix, 1, -1).reshape(width, -1))
        rows = _matrix(x, (batch * count, width), (x.shape[1], 1), group * width)
        parts = lowering.fresh(Tensor("float32", (batch * count, taps * each)))
        gemm(lowering, rows, lowering.known_view(matrix), parts)
        inner = strides_of((batch, *size, taps * each))
        for number, tap in enumerate(product(*map(range, over.kernel))):
            tensor = Tensor("float32", (batch, *size, each))
            one = View(tensor, parts.place + 4 * number * each, inner)
            steps = made.strides[2:]
            at = sum(t * d * s for t, d, s in zip(tap, over.dilation, steps, strict=True))
            moved = [s * step for s, step in zip(over.stride, steps, strict=True)]
            target = View(tensor, made.place + 4 * (at + group * each),
                          (made.strides[0], *moved, 1))  # fmt: skip
            compute(lowering, target, *(([one], (0,)) if apart else ([target, one], (0, 1, "add"))))
    distance = sum(b * s for b, s in zip(over.before, made.strides[2:], strict=True))
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    cut = View(replace(made.tensor, shape=shape), made.place + 4 * distance, made.strides)
    _ended(lowering, node, cut, lowering.output(node.outputs[0], order), bias_left=True)


def _finished(
    lowering: Lowering,
    node: Node,
    order: Sequence[int] | None,
    parts: Sequence[tuple[View, np.ndarray, int, int]],
) -> None:
    """Add products, each of rows, a weight [K, N], the first column it makes and the row stride of
    the output; then what follows them."""
    bias = (*node.inputs, "")[2]
    values = lowering.constant_bias(bias)
    steps = node.get("post_ops", ())
    out = lowering.output(node.outputs[0], order)
    target = out
    if steps or out.tensor.dtype != "float32":
        target = View(replace(out.tensor, dtype="float32", scale=None, zero_point=0),
                      lowering.scratch(4 * math.prod(out.shape)), out.strides)  # fmt: skip
    for rows, weight, column, stride in parts:
        m, n = rows.shape[0], weight.shape[1]
        right = lowering.known_view(weight)
        place = None if values is None else lowering.known(values[column : column + n].copy())
        gemm(lowering, rows, right, _matrix(target, (m, n), (stride, 1), column), place)
    if target is not out:
        _ended(lowering, node, target, out)


def _ended(
    lowering: Lowering, node: Node, target: View, out: View, bias_left: bool = False
) -> None:
    """Add what follows a product, element by element, and with it the bias if that is left."""
    _, _, bias, residual = (*node.inputs, "", "")[:4]
    expression: list[int | str] = [0]
    inputs, given = [target], list[float]()
    values = lowering.constant_bias(bias) if bias_left else None
    if values is not None:
        inputs.append(lowering.known_view(values.reshape(-1, *(1,) * (len(out.shape) - 2))))
        expression += [1, "add"]
    for name, *numbers_of in node.get("post_ops", ()):
        if name == "residual":
            inputs.append(lowering.view(residual))
            expression += [len(inputs) - 1, "add"]
        else:
            expression.append(name)
            given += numbers_of
    compute(lowering, out, inputs, expression, given)


@lowerings.register("MatMul")
def matmul(lowering: Lowering, node: Node) -> None:
    """Matrices of float32 that are no weights, one after another."""
    a, b = (
        in_format(lowering, view, Tensor("float32", view.shape))
        for view in map(lowering.view, node.inputs)
    )
    tensor = lowering.graph.tensors[node.outputs[0]]
    out = lowering.output(node.outputs[0])
    target = out
    if tensor.dtype != "float32":
        target = lowering.fresh(replace(tensor, dtype="float32", scale=None, zero_point=0))
    whole = target
    if len(a.shape) == 1:
        a, target = _wider(a, 0), _wider(target, max(len(target.shape) - 1, 0))
    if len(b.shape) == 1:
        b, target = _wider(b, 1), _wider(target, len(target.shape))
    leading = target.shape[:-2]
    left = broadcast(a, (*leading, *a.shape[-2:]))
    right = broadcast(b, (*leading, *b.shape[-2:]))
    for index in product(*map(range, leading)):
        at = [
            sum(i * s for i, s in zip(index, one, strict=False))
            for one in (left, right, target.strides)
        ]
        gemm(
            lowering,
            _matrix(a, a.shape[-2:], a.strides[-2:], at[0]),  # type: ignore[arg-type]
            _matrix(b, b.shape[-2:], b.strides[-2:], at[1]),  # type: ignore[arg-type]
            _matrix(target, target.shape[-2:], target.strides[-2:], at[2]),  # type: ignore[arg-type]
        )
    if whole is not out:
        compute(lowering, out, [whole], (0,))


def _wider(view: View, axis: int) -> View:
    """With one more axis, of one element."""
    shape, strides = list(view.shape), list(view.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 1)
    return View(replace(view.tensor, shape=tuple(shape)), view.place, tuple(strides))
