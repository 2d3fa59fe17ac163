"""What became of each layer of a model: in integers or in float, why, and how many bytes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.graph.operator import operators
from lowbit.kernels.triton import require_triton
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choices, gpu_of
from lowbit.numerics import QTensor
from lowbit.torch.kinds import STAYS, QuantizedModule, kind_of, kinds
from lowbit.torch.network import CompiledModule
from lowbit.torch.weight import QuantizedWeight


@dataclass(frozen=True)
class LayerSummary:
    """A layer that holds parameters or buffers of its own, or a product of a compiled network.

    - name, layer: how the model calls it, and its class. quantized: whether its weight is integers.
    - what: what its weight is. why: the reason why it is in float, or with what it is shared; "".
    - bytes_before, bytes_after: of all its tensors, with the weight in float and as it is; 0 for
      those that a layer above in the list has counted.
    """

    name: str
    layer: str
    quantized: bool
    what: str
    why: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Summary:
    """All layers of a model, in its order. `str` of it is a table."""

    layers: tuple[LayerSummary, ...]

    @property
    def bytes_before(self) -> int:
        return sum(one.bytes_before for one in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(one.bytes_after for one in self.layers)

    def __str__(self) -> str:
        small = [one for one in self.layers if not one.quantized and one.what == _VECTORS]
        shown = [one for one in self.layers if one not in small]
        rows = [("layer", "class", "weight", "before", "after", "")]
        for one in shown:
            sizes = size(one.bytes_before), size(one.bytes_after)
            rows.append((one.name or "(the model)", one.layer, one.what, *sizes, one.why))
        if small:
            names = ", ".join(dict.fromkeys(one.layer for one in small))
            held = size(sum(one.bytes_after for one in small))
            rows.append((f"{len(small)} others", names, "float", held, held, _VECTORS))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        count = sum(one.quantized for one in self.layers)
        share = f", {self.bytes_before / self.bytes_after:.1f} times less" if count else ""
        lines.append(
            f"{count} layers quantized, {len(self.layers) - count} in float; "
            f"{size(self.bytes_before)} before, {size(self.bytes_after)} after{share}"
        )
        return "\n".join(lines)


_VECTORS = "vectors and scalars"


def summary(model: nn.Module) -> Summary:
    """What became of each layer of a model that `quantize_` or `load` has been at, or neither."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    counted: dict[int, str] = {}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, CompiledModule):
            found += _products(name, module)
        tensors = {
            **{n: one for n, one in module._parameters.items() if one is not None},
            **{n: one for n, one in module._buffers.items() if one is not None},
        }
        if tensors:
            found.append(_layer(name, module, tensors, counted))
    return Summary(tuple(found))


def _products(name: str, module: CompiledModule) -> Iterator[LayerSummary]:
    """What became of the products of a compiled network."""
    whys = {one.node: one.why for one in module.report}
    for node in module.graph.nodes:
        held = [module.graph.constants.get(one) for one in node.inputs]
        matrices = [one for one in held if one is not None and len(one.shape) > 1]
        record = operators.get(node.op)
        if not (record.weight or record.stays) or not matrices:
            continue
        weight = matrices[0]
        whole = isinstance(weight, QTensor)
        what = weight.format.name if isinstance(weight, QTensor) else str(weight.dtype)
        own = ".".join(filter(None, (name, node.name)))
        sizes = 4 * math.prod(weight.shape), weight.nbytes
        yield LayerSummary(own, node.op, whole, what, whys.get(node.name, ""), *sizes)


def _layer(
    name: str, module: nn.Module, tensors: dict[str, Tensor], counted: dict[int, str]
) -> LayerSummary:
    before = after = 0
    shares = ""
    for one, tensor in tensors.items():
        own = f"{name}.{one}".lstrip(".")
        if (first := counted.setdefault(id(tensor), own)) != own:
            shares = f"shares {first}" if tensor.dim() > 1 else shares
            continue
        before += tensor.numel() * tensor.element_size()
        after += tensor.nbytes
    weights = [one for one in tensors.values() if isinstance(one, QuantizedWeight)]
    if weights:
        what = _described(module, weights[0])
        return LayerSummary(name, _class(module), True, what, shares, before, after)
    matrices = [one for one in tensors.values() if one.dim() > 1 and one.is_floating_point()]
    if not matrices:
        return LayerSummary(name, _class(module), False, _VECTORS, "", before, after)
    dtype = str(matrices[0].dtype).removeprefix("torch.")
    why = "; ".join(filter(None, (_why(module), shares)))
    return LayerSummary(name, _class(module), False, dtype, why, before, after)


def _class(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Quantized" * isinstance(module, QuantizedModule))


def _described(module: nn.Module, weight: QuantizedWeight) -> str:
    kind = kind_of(module)
    if kind is not None and not kind.multiplies:
        return str(weight.format)
    own = module if isinstance(module, QuantizedModule) else weight
    inputs = {"float": "float", "dynamic": "8-bit", "symmetric": "symmetric 8-bit"}
    return f"{weight.format}; {inputs[own.activations]} inputs"


def _why(module: nn.Module) -> str:
    """Why a layer with a matrix is in float."""
    if (reason := vars(module).get(STAYS)) is not None:
        return reason
    if (kind := kind_of(module)) is not None:
        return kind.refusal(module) or "not quantized"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution: StaticInt8Config quantizes it"
    for name in kinds.names():
        base = getattr(nn, name, None)
        if base is not None and isinstance(module, base):
            return f"a subclass of nn.{name}, which may need floats"
    return "of no kind that is quantized"


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def some(names: Iterable[str], most: int = 5) -> str:
    """The first of some names, each once, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


# Which kernel serves an operator, how it is cut, and why.


def explain(
    operator: str,
    *,
    device: torch.device | str | Gpu = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    **sizes: Any,
) -> Choice[Any]:
    """Which kernel serves an operator of `lowbit.torch.functional`, how it is cut, and why others
    do not; as text, by `str`.

    operator: its name, "softmax", or that of its backward, "softmax_backward". device: where the
    tensors are; a Gpu(capability, multiprocessors) of one that is not here. sizes: what decides, by
    name, such as `length` of rows; those that do not may be given too. Of "linear": M, N, K, the
    weight's `integers` and `group_size`, and `activations`, as a configuration has them.

    ValueError for an unknown operator, with the known ones, for a size that is missing, and where
    no kernel can serve; RuntimeError for a GPU that PyTorch does not find; ModuleNotFoundError
    without Triton.
    """
    require_triton()
    choose = choices.get(operator)
    given = {**sizes, "itemsize": dtype.itemsize}
    given["gpu"] = gpu = device if isinstance(device, Gpu) else gpu_of(torch.device(device))
    wanted = inspect.signature(choose).parameters
    missing = [n for n, p in wanted.items() if n not in given and p.default is p.empty]
    if missing:
        raise ValueError(f"{operator} is chosen by {', '.join(missing)} too; give numbers for it")
    choice = choose(**{name: given[name] for name in wanted if name in given})
    if gpu.capability or operator == "linear":  # which has kernels for CPUs
        return choice
    here = "the tensors are on the CPU; within lowbit_lab.interpreter() it runs there too"
    refused = (*choice.refused, (choice.kernel, here))
    return Choice("PyTorch in float64", None, "serves CPU tensors", refused)
