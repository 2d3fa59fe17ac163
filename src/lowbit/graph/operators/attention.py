"""Attention as one operator, so that its scores need never be kept whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering
from lowbit.graph.lowering.elementwise import (
    affine,
    broadcast,
    compute,
    format_of,
    in_format,
    plain,
)
from lowbit.graph.lowering.movement import reshaped
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.step import Place, View
from lowbit.registry.locks import importing

_HEADS_TOGETHER = {3: (1, 0, 2), 4: (0, 2, 1, 3)}
"""The order in memory of an output, by its rank: most readers want all heads of a query at once."""


def _attention(node: Node, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """softmax(q @ kᵀ · scale + mask) @ v, in float64, rounded once: an operator of lowbit's own.

    q [..., H, L, D], k [..., G, S, D] and v [..., G, S, E], where each of the G heads serves H / G
    neighbours of q; the result is [..., H, L, E]. mask, which broadcasts to [..., H, L, S]: what is
    added to the scores, or booleans that are true where a key takes part. Attributes: scale, which
    is 1/√D if left out; is_causal: row i attends to the keys 0 to i + diagonal, which is that of
    `causal_diagonal` if left out, and 0 in ONNX and PyTorch. A row that attends to no key is all
    zeros. (Vaswani et al. 2017, arXiv:1706.03762.)
    """
    with importing():  # not for networks that only run
        from lowbit.spec.attention import attention_weights

    _check(q.shape, k.shape, v.shape)
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (np.repeat(one.astype(np.float64), group, -min(one.ndim, 3)) for one in (k, v))
    scores = np.matmul(q.astype(np.float64), k.swapaxes(-1, -2))
    scores *= float(node.get("scale", q.shape[-1] ** -0.5))
    if mask is not None:
        scores = scores + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask)
    weights = attention_weights(scores, diagonal_of(node, *scores.shape[-2:]))
    return np.matmul(weights, v).astype(q.dtype)


def diagonal_of(node: Node, queries: int, keys: int) -> int | None:
    """Query i attends to the keys 0 to i + this; None: to all."""
    if not node.get("is_causal"):
        return None
    with importing():  # not for networks without
        from lowbit.spec.attention import causal_diagonal

    return node.get("diagonal", causal_diagonal(queries, keys))


def _sizes(node: Node, q: Sizes, k: Sizes, v: Sizes, mask: Sizes | None = None) -> Sizes:
    _check(q, k, v)
    return *q[:-1], v[-1]


def _check(q: Sizes, k: Sizes, v: Sizes) -> None:
    """ValueError unless the shapes fit together."""
    fits = len(q) == len(k) == len(v) >= 2 and q[-1] == k[-1] and k[:-1] == v[:-1]
    heads = (q[-3], k[-3]) if fits and len(q) > 2 else (1, 1)
    if not fits or q[:-3] != k[:-3] or not heads[1] or heads[0] % heads[1]:
        raise ValueError(f"attention of q {q}, k {k} and v {v}, which do not fit together")


def _operand(lowering: Lowering, view: View) -> View:
    """[batch, heads, rows, size], the last axis dense."""
    if view.strides[-1] != 1 and view.shape[-1] > 1:
        view = plain(lowering, view)
    shape = view.shape
    if len(shape) <= 4:
        ones = 4 - len(shape)
        return view.part((1,) * ones + shape, (0,) * ones + view.strides)
    return reshaped(lowering, view, (math.prod(shape[:-3]), *shape[-3:]))


def _mask(lowering: Lowering, view: View, shape: tuple[int, ...]) -> View:
    """A mask of float32 or of bytes as the kernel reads it: broadcast, the last axis dense."""
    if view.tensor.dtype != "bool":
        view = in_format(lowering, view, Tensor("float32", view.shape))
    if view.shape[-1] != shape[-1] or view.strides[-1] != 1:
        target = lowering.fresh(replace(view.tensor, shape=(*view.shape[:-1], shape[-1])))
        compute(lowering, target, [view], (0,))
        view = target
    wide = view.part(shape, broadcast(view, shape))
    if len(shape) <= 4:
        return _operand(lowering, wide)
    flat = (math.prod(shape[:-3]), *shape[-3:])
    if not any(wide.strides[:-3]):
        return wide.part(flat, (0, *wide.strides[-3:]))
    return reshaped(lowering, plain(lowering, wide), flat)


def _lower_attention(lowering: Lowering, node: Node) -> None:
    """Bytes are multiplied as bfloat16, which holds them, and float32 as float32."""
    with importing():  # not for networks without attention
        from lowbit.kernels.cpu.attention import plan as plans
        from lowbit.kernels.cpu.attention.attention import attention

    views = [lowering.view(name) for name in node.inputs[:3]]
    formats = {one.tensor.dtype if one.tensor.scale is not None else "" for one in views}
    if len(formats) > 1 or formats == {""}:
        wanted = "bfloat16" if {one.tensor.dtype for one in views} == {"bfloat16"} else "float32"
        views = [in_format(lowering, one, Tensor(wanted, one.shape)) for one in views]
    q, k, v = (_operand(lowering, one) for one in views)
    rank = len(lowering.graph.tensors[node.outputs[0]].shape)
    out = _operand(lowering, lowering.output(node.outputs[0], _HEADS_TOGETHER.get(rank)))
    name = node.inputs[3] if len(node.inputs) > 3 else ""
    strides = [one.strides[:3] for one in (q, k, v, out)]
    places: dict[str, Place | None] = {"mask": None, "padding": None}
    if name:
        mask = _mask(lowering, lowering.view(name), (*views[0].shape[:-1], k.shape[2]))
        kind = "padding" if mask.tensor.dtype == "bool" else "mask"
        places[kind] = mask.place
        strides.append(mask.strides[:3])
    form = plans.AttentionForm(format_of(q.tensor), format_of(out.tensor),
                         places["mask"] is not None, places["padding"] is not None)  # fmt: skip
    (batch, heads, queries, size), (_, key_heads, keys, _) = q.shape, k.shape
    sizes = plans.Sizes(batch, heads, queries, keys, size, v.shape[3], key_heads)
    plan = plans.plan_attention(
        form, sizes, strides, lowering.isa, "f32" if form.inputs == "f32" else "bf16",
        diagonal_of(node, queries, keys), lowering.threads,
    )  # fmt: skip
    scale = float(node.get("scale", size**-0.5))
    given = [affine(one.tensor) for one in (q, k, v, out)]
    lowering.add(attention.program(plan.isa, form=form, micro=plan.micro), {
        "out": out.place, "q": q.place, "key": k.place, "value": v.place, **places,
        "parameters": lowering.known(plans.attention_parameters(scale, *given)),
        "geometry": lowering.known(plan.geometry),
        "scratch": lowering.scratch(plan.scratch_bytes * lowering.threads),
        "items": plan.items,
    })  # fmt: skip


def _multiply_adds(node: Node, q: Sizes, k: Sizes, *others: Sizes) -> int:
    """Of scores, then of sums of values."""
    return (math.prod(q) + math.prod(others[-1])) * k[-2]


operators.add("Attention", Operator(
    meaning=_attention, shape=_sizes, lowering=_lower_attention, positions="kept",
    stays="both of its operands are activations", multiply_adds=_multiply_adds,
))  # fmt: skip
