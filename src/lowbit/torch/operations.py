"""What PyTorch's operators do where a QuantizedWeight is among their arguments.

A layer of any class, PyTorch's own attention for one, then computes with integers as soon as it
holds such a weight: its `F.linear` comes here as `aten.linear`, or as a product with a transposed
weight. Operators that are not here compute with `dequantize()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional

from lowbit.kernels.cpu.shared.layout import PANEL
from lowbit.torch.arguments import FLOATS
from lowbit.torch.functional.embedding import embedding
from lowbit.torch.functional.linear import linear
from lowbit.torch.weight import (
    FUNCTIONS,
    OPERATIONS,
    QuantizedWeight,
    device_refusal,
    packing_of,
)

aten = torch.ops.aten


def _serves(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator: says which operators a function is."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.update(dict.fromkeys(operators, function))
        return function

    return add


def _shows(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same for operators that give views, which are no inference tensors though made in that
    mode: PyTorch gives them the version of what they show."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        return _serves(*operators)(torch.inference_mode(False)(function))

    return add


def _mapped(
    fn: Callable[[Tensor], Tensor],
    weight: QuantizedWeight,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> QuantizedWeight:
    parts = {name: fn(part) for name, part in weight.parts.items()}
    return weight.with_parts(parts, dtype=dtype or weight.dtype)


_serves(aten.detach.default, aten.alias.default)(partial(_mapped, torch.detach))
_serves(aten.clone.default)(partial(_mapped, torch.clone))


@_serves(aten._to_copy.default)
def _to_copy(
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **layout: Any,
) -> QuantizedWeight:
    dtype = dtype or weight.dtype
    if dtype not in FLOATS:
        raise TypeError(
            f"a quantized weight can be shown as float32, bfloat16 or float16, not as {dtype}"
        )
    there = weight.device if device is None else torch.device(device)
    if refusal := device_refusal(there, weight.format, weight.in_features, weight.packing):
        raise NotImplementedError(f"{refusal}; keep the model where it is")
    packing = weight.packing
    if packing != "rows":
        packing = packing_of(there, weight.format, weight.activations)
    if packing == weight.packing:
        return _mapped(lambda part: part.to(there, copy=True), weight, dtype)
    facts = weight.facts._replace(dtype=dtype, packing=packing)
    return QuantizedWeight.of(weight.record(), facts, there)


@_serves(aten.copy_.default)
def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`, which is how load_state_dict works, where either is quantized."""
    if target.shape != source.shape:
        raise ValueError(
            f"cannot copy a weight of shape {list(source.shape)} into one of {list(target.shape)}"
        )
    if not isinstance(target, QuantizedWeight):
        assert isinstance(source, QuantizedWeight)  # or this would not have been dispatched here
        return target.copy_(source.dequantize())
    facts = target.facts
    if isinstance(source, QuantizedWeight) and (
        source.format.layout != target.format.layout or source.facts.transposed != facts.transposed
    ):
        source = source.dequantize()
    if not isinstance(source, QuantizedWeight):
        if facts.format.needs_activations:
            raise ValueError(
                f"a weight of {facts.format} cannot be quantized without data: load float weights "
                "into a float model and call quantize_(model, config, calibration=batches)"
            )
        source = QuantizedWeight.from_float(
            source.to(target.device), facts.format, facts.packing, transposed=facts.transposed
        )
    if source.packing != target.packing:
        source = QuantizedWeight.of(source.record(), facts, target.device)
    for ours, theirs in zip(target.parts.values(), source.parts.values(), strict=True):
        ours.copy_(theirs)
        increment_version(ours)  # which is not done here, below autograd; proofs go by it
    return target


def _whole_linear(x: Any, weight: Any, bias: Tensor | None = None) -> Any:
    """F.linear, with derivatives."""
    if not isinstance(weight, QuantizedWeight) or weight.facts.transposed:
        return NotImplemented
    if isinstance(x, QuantizedWeight):
        x = x.dequantize()
    return linear(x, weight, bias, weight.activations)


def _whole_product(x: Any, weight: Any) -> Any:
    """torch.matmul, with derivatives."""
    if not isinstance(weight, QuantizedWeight) or not weight.facts.transposed:
        return NotImplemented
    return _whole_linear(x, _transposed(weight))


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any) -> Any:
    """The function behind nn.MultiheadAttention, for inputs that lie in their own order: only with
    those do its products leave a weight whole."""
    made = {id(one): one.contiguous() for one in (query, key, value)}  # the same stay the same
    inputs = [made[id(one)] for one in (query, key, value)]
    with torch._C.DisableTorchFunctionSubclass():
        return functional.multi_head_attention_forward(*cast(Any, inputs), *cast(Any, args), **how)


FUNCTIONS[functional.linear] = _whole_linear
FUNCTIONS[functional.multi_head_attention_forward] = _attention
for _function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
    FUNCTIONS[_function] = _whole_product


@_serves(aten.linear.default)
@torch.no_grad()  # autograd is above this, and derives what PyTorch's operator is
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _whole_linear(x, weight, bias)


@_serves(aten.mm.default, aten.matmul.default)
@torch.no_grad()
def _product(x: Tensor, weight: Tensor) -> Any:
    return _whole_product(x, weight)


@_serves(aten.addmm.default)
def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    made = _product(x, weight) if (beta, alpha) == (1, 1) else NotImplemented
    return made if made is NotImplemented else made + bias


@_shows(aten.t.default)
def _transposed(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.with_parts(weight.parts, transposed=not weight.facts.transposed)


@_shows(aten.transpose.int)
def _exchanged(weight: QuantizedWeight, first: int, second: int) -> QuantizedWeight:
    return _permuted(weight, (0, 1) if (first - second) % 2 == 0 else (1, 0))


@_shows(aten.permute.default)
def _permuted(weight: QuantizedWeight, axes: Sequence[int]) -> QuantizedWeight:
    return _transposed(weight) if axes[0] % 2 else _mapped(torch.detach, weight)


@_serves(aten.embedding.default)
def _embedding(weight: Tensor, indices: Tensor, *_: Any, **options: Any) -> Any:
    if not isinstance(weight, QuantizedWeight) or weight.facts.transposed:
        return NotImplemented
    return embedding(indices, weight)


def _rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Rows of [out, in]: of whole panels a view, else packed for themselves."""
    facts = weight.facts._replace(out_features=stop - start)
    if weight.packing == "panels" and start % PANEL == 0 and stop % PANEL == 0:
        cut = {
            name: part if name == "input_scale"
            else part[start:stop] if part.dim() == 1
            else part[start // PANEL : stop // PANEL]
            for name, part in weight.parts.items()
        }  # fmt: skip
        return QuantizedWeight(cut, facts)
    return QuantizedWeight.of(weight.record().rows(slice(start, stop)), facts, weight.device)


@_shows(aten.split_with_sizes.default)
def _split_with_sizes(weight: QuantizedWeight, sizes: Sequence[int], dim: int = 0) -> Any:
    if dim % 2 != int(weight.facts.transposed):
        return NotImplemented
    spans = list(pairwise(accumulate(sizes, initial=0)))
    owner = weight.scale
    if type(owner) is not Tensor or owner.is_inference():  # which do not say when they change
        return [_rows(weight, *span) for span in spans]
    state = [part._version for part in weight.parts.values()], spans
    kept = getattr(owner, "_lowbit_split", None)
    if kept is None or kept[0] != state:  # attention asks for the same in every call
        kept = state, [_rows(weight, *span) for span in spans]
        owner._lowbit_split = kept  # type: ignore[attr-defined]
    return [one.with_parts(one.parts) for one in kept[1]]


@_shows(aten.split.Tensor)
def _split(weight: QuantizedWeight, size: int, dim: int = 0) -> Any:
    count = weight.shape[dim]
    sizes = [min(size, count - start) for start in range(0, count, size)]
    return _split_with_sizes(weight, sizes, dim)


@_shows(aten.slice.Tensor)
def _slice(
    weight: QuantizedWeight, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    if dim % 2 != int(weight.facts.transposed) or step != 1 or last <= first:
        return NotImplemented
    return _rows(weight, first, last)
