"""Mixtures of experts: rows sorted by their experts, products with the experts' weights, and sums
of what a row's experts made. The meaning is that of the networks for CPUs (`Route`, `RoutedLinear`
and `RoutedSum` in lowbit.graph.operators). Sizes depend on nothing that a GPU computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.triton.fast.tiles import (
    ACTIVATIONS,
    GATES,
    Extra,
    TiledWeight,
    by_expert,
    columns_of,
    finished,
)
from lowbit.torch.arguments import check_shape, check_tensor
from lowbit.torch.functional.int4 import WEIGHT_FIELDS, check_extra, check_operands
from lowbit.torch.registration import register

_torch_grouped: Any = getattr(torch.nn.functional, "grouped_mm", None)
"""What PyTorch 2.10 and later have."""


def top_experts(scores: Tensor, top: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """The `top` experts of each row, the best first, int64 [rows, top], and before them their
    shares, float32: of a softmax over these alone if they are normalized, else over all.

    scores: float32 [rows, experts]. TypeError for another dtype; ValueError for another number of
    dimensions, and for more than there are.
    """
    check_tensor("top_experts", "scores", scores, (torch.float32,))
    if scores.dim() != 2 or not 0 < top <= scores.shape[1]:
        raise ValueError(f"top_experts: no {top} experts of each row of {list(scores.shape)}")
    return _top_op(scores, top, normalized)


def route(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of rows and their experts, in the order of the experts, then of the rows.

    experts: int64 [rows, k], each from 0 to count - 1. Of the pairs in that order, int32: their
    rows [rows · k]; where each pair is [rows, k]; and where those of each expert end [count].
    """
    return _route_op(experts, count)


def grouped_matmul(
    x: Tensor,
    weight: TiledWeight | Tensor,
    ends: Tensor,
    rows: Tensor | None = None,
    *,
    activation: str = "",
) -> Tensor:
    """activation(x · weightᵀ), of each row by the weight of its expert: [M, K] to [M, N].

    x: [M, K], bfloat16, float16 or float32, sorted by expert; or, with rows, int32 [M], x[rows] is
    taken. ends: int32 [experts], where the rows of each expert end. weight: from `pack_int4` or
    `pack_int8` of [experts, N, K]; or floats like x, [experts, N, K], by PyTorch's own grouped
    product where that waits for nothing (bfloat16 on Hopper). Other floats, and float32 on a GPU,
    are multiplied expert by expert. activation: as of `weight_only_matmul`. Not differentiable.

    TypeError and ValueError as of `weight_only_matmul`.
    """
    name = "grouped_matmul"
    if isinstance(weight, Tensor):
        x = x if rows is None else x.index_select(0, rows)
        return finished(_of_floats(x, weight, ends), Extra(activation=activation))
    check_operands(name, x, weight)
    check_tensor(name, "ends", ends, (torch.int32,))
    check_shape(name, "ends", ends, (weight.experts,))
    M = len(x if rows is None else rows)
    extra = Extra(activation=activation)
    check_extra(name, extra, (M, weight.N), (*ACTIVATIONS, *GATES))
    return _grouped_op(x, *vars(weight).values(), ends, rows, activation)


def routed_sum(x: Tensor, places: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
    """residual + Σ_k shares[:, k] · x[places[:, k]], summed in float32 in this order.

    x: floats [pairs, width]; places: int32, shares: float32 [rows, k]; residual: [rows, width].
    """
    return _routed_sum_op(x, places, shares, residual)


def _of_floats(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    even = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])
    on_gpu = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    if _torch_grouped and on_gpu and even and x.dtype == torch.bfloat16 and len(x):
        return _torch_grouped(x, weight.mT, offs=ends)
    return by_expert(x, ends, weight.shape[1], weight.__getitem__)


def _top(scores: Tensor, top: int, normalized: bool) -> tuple[Tensor, Tensor]:
    scores = scores if normalized else scores.softmax(1)
    shares, experts = scores.topk(top)
    return (shares.softmax(1) if normalized else shares), experts


def _sorted(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    counted = torch.arange(count, device=order.device)
    ends = torch.searchsorted(pairs, counted, right=True, out_int32=True)
    return (order // max(experts.shape[1], 1)).int(), places.view(experts.shape), ends


def _route_fake(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (experts.numel(),), experts.shape, (count,)
    rows, places, ends = (experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return rows, places, ends


def _grouped_reference(x: Tensor, *parts: Any) -> Tensor:
    weight, (ends, rows, activation) = TiledWeight(*parts[:8]), parts[8:]
    wide = (x if rows is None else x[rows]).double()
    z = by_expert(wide, ends, weight.N, lambda index: weight.expert(index).dequantized())
    return finished(z, Extra(activation=activation)).to(x.dtype)


def _grouped_fake(x: Tensor, *parts: Any) -> Tensor:
    *_, rows, activation = parts
    columns = columns_of(TiledWeight(*parts[:8]).N, activation)
    return x.new_empty(len(x if rows is None else rows), columns)


def _sum_reference(x: Tensor, places: Tensor, shares: Tensor, residual: Tensor | None) -> Tensor:
    total = (x.double()[places] * shares.double()[..., None]).sum(1)
    return (total if residual is None else residual.double() + total).to(x.dtype)


_top_op = register(
    "top_experts(Tensor scores, int top, bool normalized) -> (Tensor, Tensor)",
    kernel="routing.top_experts",
    cpu=_top,
)
_route_op = register(
    "route(Tensor experts, int count) -> (Tensor, Tensor, Tensor)",
    kernel="routing.route",
    cpu=_sorted,
    fake=_route_fake,
)
_grouped_op = register(
    f"grouped_matmul(Tensor x, {WEIGHT_FIELDS}, Tensor ends, Tensor? rows, str activation) "
    "-> Tensor",
    kernel="grouped.grouped_matmul",
    cpu=_grouped_reference,
    fake=_grouped_fake,
)
_routed_sum_op = register(
    "routed_sum(Tensor x, Tensor places, Tensor shares, Tensor? residual) -> Tensor",
    kernel="routing.routed_sum",
    cpu=_sum_reference,
    fake=lambda x, places, *_: x.new_empty(len(places), x.shape[1]),
)
