"""What language models have besides: attention over a cache of keys and values, gated units."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lowbit.graph.expression import POST_OPS
from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering
from lowbit.graph.lowering.elementwise import compute, format_of, in_format, plain
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.step import View
from lowbit.registry.locks import importing

if TYPE_CHECKING:
    from lowbit.kernels.cpu.attention.chunks import CachedForm
    from lowbit.kernels.cpu.attention.plan import AttentionPlan
    from lowbit.kernels.cpu.attention.plan import Sizes as AttentionSizes


def _cached(
    node: Node, q: Array, k: Array, v: Array, rotation: Array, positions: Array, cache: Array,
    slots: Array | None = None,
) -> Array:  # fmt: skip
    """Add keys and values of new tokens to a cache, in place, and attend to all up to each.

    q [rows, heads, size], k and v [rows, key heads, size]: of tokens at `positions` [rows], of
    which q and k are turned here, see `rotation_table` [positions, 2, n]. cache [slots, layers, 2,
    key heads, capacity, size]; of int8 [..., size + 4], where a row ends with its scale. Without
    `slots` [rows] rows are neighbours in slot 0. Attributes: layer; scale, 1/√size if left out;
    window: a token attends to so many at most, itself and those before; cap: scores become
    cap · tanh(score / cap).
    """
    layer, size = node.get("layer", 0), q.shape[-1]
    group, out = q.shape[1] // k.shape[1], np.zeros(q.shape, np.float64)
    turned, keys = (_turned(one, rotation[positions]) for one in (q, k))
    where = np.zeros(len(q), np.int64) if slots is None else slots
    for row, (slot, at) in enumerate(zip(where, positions, strict=True)):
        cache[slot, layer, :, :, at] = _stored(np.stack([keys[row], v[row]]), cache)
    for row, (slot, at) in enumerate(zip(where, positions, strict=True)):
        first = max(0, at + 1 - node.get("window", at + 1))
        known = np.repeat(_loaded(cache[slot, layer, :, :, first : at + 1]), group, 1)
        scores = np.einsum("hd,hsd->hs", turned[row].astype(np.float64), known[0])
        scores *= node.get("scale", size**-0.5)
        if cap := node.get("cap"):
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row] = np.einsum("hs,hsd->hd", weights / weights.sum(-1, keepdims=True), known[1])
    return out.astype(q.dtype)


def _stored(rows: Array, cache: Array) -> Array:
    """float32 rows as a cache has them."""
    if cache.dtype != np.int8:
        return rows
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(rows / np.where(scale == 0, np.float32(1), scale)).astype(np.int8)
    return np.concatenate([q, scale.view(np.int8)], -1)


def _loaded(rows: Array) -> Array:
    """Rows of a cache as float64."""
    if rows.dtype != np.int8:
        return rows.astype(np.float64)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4] * scale.astype(np.float64)


def _turned(x: Array, rotation: Array) -> Array:
    """Each pair of elements n apart, of the first 2n, turned by its angle."""
    n = rotation.shape[-1]
    cos, sin = rotation[:, :1], rotation[:, 1:]
    first, second = x[..., :n], x[..., n : 2 * n]
    parts = first * cos - second * sin, second * cos + first * sin, x[..., 2 * n :]
    return np.concatenate(parts, -1).astype(np.float32)


def _sizes(node: Node, q: Sizes, k: Sizes, v: Sizes, rotation: Sizes, *others: Sizes) -> Sizes:
    cache = others[1]
    fits = len(q) == len(k) == 3 and k == v and q[0] == k[0] and q[2] == k[2]
    fits = fits and len(cache) == 6 and cache[3] == k[1] and not q[1] % k[1]
    fits = fits and cache[5] - k[2] in (0, 4)  # a row of bytes has a scale
    fits = fits and node.get("window", 1) > 0 and node.get("cap", 1.0) > 0
    if not fits or node.get("layer", 0) >= cache[1] or 2 * rotation[2] > q[2]:
        raise ValueError(f"q {q}, k {k}, v {v}, rotation {rotation}, cache {cache} do not fit, or "
                         f"the window or the cap of {node.attributes} is not positive")  # fmt: skip
    return q


def _lower(lowering: Lowering, node: Node) -> None:
    with importing():  # not for networks without a cache
        from lowbit.kernels.cpu.attention import cached
        from lowbit.kernels.cpu.attention import chunks as cut
        from lowbit.kernels.cpu.attention import plan as plans
        from lowbit.kernels.cpu.attention.attention import attention

    q, k, v, rotation, positions, cache, *slots = map(lowering.view, node.inputs)
    (rows, all_heads, size), heads = q.shape, k.shape[1]
    _, layers, _, _, capacity, row = cache.shape
    window, cap = node.get("window", 0), float(node.get("cap", 0.0))
    stored = "s8" if cache.tensor.dtype == "int8" else format_of(cache.tensor)
    form = cut.CachedForm(stored, size, 2 * rotation.shape[2], all_heads // heads, window, cap)
    if why := cached.refusal(form):
        raise NotImplementedError(why)
    if row != form.row:
        raise ValueError(f"rows of a cache of {form.cache} have {form.row} elements, not {row}")
    new = [_rows(lowering, one) for one in (q, k, v)]
    element = cache.tensor.itemsize
    slot_stride = layers * 2 * heads * capacity * row
    keys = cache.place + node.get("layer", 0) * 2 * heads * capacity * row * element
    out = lowering.output(node.outputs[0])
    scale = float(node.get("scale", size**-0.5))
    parameters = lowering.known(plans.attention_parameters(scale))
    words = {
        "q": new[0].place, "key": new[1].place, "value": new[2].place,
        "rotation": rotation.place, "positions": positions.place, "cache": keys,
        "q_stride": new[0].strides[0], "k_stride": new[1].strides[0],
        "v_stride": new[2].strides[0], "rows": rows, "heads": heads, "capacity": capacity,
    }  # fmt: skip
    if slots:
        chunks = -(-min(capacity, window or capacity) // cut.CHUNK)
        lowering.add(cached.cached_attention.program(lowering.isa, form=form), {
            **words, "out": out.place, "slots": slots[0].place, "parameters": parameters,
            "scratch": lowering.scratch(4 * form.scores * lowering.threads),
            "parts": lowering.scratch(4 * rows * heads * chunks * form.group * form.part),
            "slot_stride": slot_stride, "chunks": chunks,
        })  # fmt: skip
        return
    dtype = "float32" if form.cache == "s8" else cache.tensor.dtype
    turned = lowering.fresh(Tensor(dtype, q.shape))
    words["turned"] = turned.place
    words["geometry"] = place = lowering.scratch(8 * plans.TABLE_LENGTH)
    sizes = plans.Sizes(1, all_heads, rows, capacity, size, size, heads)
    plan = _plan(lowering, form, sizes)
    words["table"] = lowering.known(plan.geometry)
    lowering.add(cached.append_rows.program(lowering.isa, form=form._replace(window=0, cap=0.0)),
                 words)  # fmt: skip
    lowering.add(attention.program(plan.isa, form=plan.form, micro=plan.micro), {
        "out": out.place, "q": turned.place, "key": keys,
        "value": keys + heads * capacity * row * element, "mask": None, "padding": None,
        "parameters": parameters, "geometry": place,
        "scratch": lowering.scratch(plan.scratch_bytes * lowering.threads), "items": plan.items,
    })  # fmt: skip


def _plan(lowering: Lowering, form: CachedForm, sizes: AttentionSizes) -> AttentionPlan:
    """Of rows of a prompt, whose keys and values are [1, heads, capacity, row] of the cache; how
    many there are, the kernel is told."""
    from lowbit.kernels.cpu.attention import plan as plans

    size, window = form.head_dim, form.window
    one = (0, size, sizes.heads * size)
    held = (0, sizes.keys * form.row, form.row)
    products = "f32" if form.cache == "f32" else "bf16"
    most = sizes.keys  # that are packed
    if window:
        step = plans.window_step(plans.micro_for(lowering.isa, products))
        most = min(most, window + sizes.queries + step)
    return plans.plan_attention(
        plans.AttentionForm(form.cache, "f32", window=window, cap=form.cap,
                            scaled_rows=form.cache == "s8"),
        replace(sizes, keys=most), [one, held, held, one], lowering.isa, products, 0,
        lowering.threads,
    )  # fmt: skip


def _rows(lowering: Lowering, view: View) -> View:
    """float32 [rows, heads, size], of which rows alone may lie apart."""
    view = in_format(lowering, view, Tensor("float32", view.shape))
    return view if view.strides[1:] == (view.shape[2], 1) else plain(lowering, view)


operators.add("CachedAttention", Operator(
    meaning=_cached, shape=_sizes, lowering=_lower, onnx=False, data=3,
    stays="both of its operands are activations",
))  # fmt: skip


def _gated(node: Node, x: Array) -> Array:
    """f(a) · b of x = [a, b], halves of the last axis. Attribute: function, its name among
    post-operations, "silu" if left out. (Shazeer 2020, arXiv:2002.05202.)"""
    a, b = np.split(x.astype(np.float64), 2, -1)
    return (POST_OPS[node.get("function", "silu")](a) * b).astype(x.dtype)


def _gated_sizes(node: Node, x: Sizes) -> Sizes:
    if x[-1] % 2:
        raise ValueError(f"{x} has no two halves")
    return *x[:-1], x[-1] // 2


def _lower_gated(lowering: Lowering, node: Node) -> None:
    x = lowering.view(node.inputs[0])
    half = x.shape[-1] // 2
    parts = [x.along(-1, first, half) for first in (0, half)]
    function = node.get("function", "silu")
    compute(lowering, lowering.output(node.outputs[0]), parts, (0, function, 1, "mul"))


operators.add("GatedUnit", Operator(
    meaning=_gated, shape=_gated_sizes, lowering=_lower_gated, onnx=False,
))  # fmt: skip
