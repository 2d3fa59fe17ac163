"""Linear layers whose weights are cut among the processes of a device mesh.

In short, in each process:

    mesh = init_device_mesh("cuda", (2,))
    plan = {"*.up_proj": "column", "*.down_proj": "row"}
    load_parallel(model, "model.safetensors", mesh, plan)     # of which it reads its part

Weights are cut where the neutral record of a quantized weight can be: between rows for "column"
(whose outputs are cut), between groups of columns for "row" (whose inputs are). Source of the two:
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lowbit.torch.all_reduce import all_reduced
from lowbit.torch.files import opened, put
from lowbit.torch.functional.linear import linear
from lowbit.torch.header import Header, part_key
from lowbit.torch.kinds import QuantizedLinear
from lowbit.torch.weight import QuantizedWeight
from lowbit.weights.format import Shape, WeightFormat

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "load_parallel", "parallelize"]

STYLES = ("column", "column+gather", "row", "scatter+row")
Model = TypeVar("Model", bound=nn.Module)
Plan = Mapping[str, str]


class _ParallelLinear(nn.Module):
    """What both have in common: a part of a layer, and the mesh whose processes have the others."""

    bias: nn.Parameter | None

    def __init__(self, part: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.weight = mesh, part.weight
        self.register_parameter("bias", part.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Of this process, in memory of its own."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                "parallel layers pass no gradients: call the model within torch.no_grad()"
            )
        if isinstance(self.weight, QuantizedWeight):
            return linear(x, self.weight, bias, self.weight.activations)
        return F.linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        rows, depth = self.weight.shape
        return f"{depth} to {rows} of {self.mesh.size()} processes"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each process has a part of the outputs.

    Input [..., in_features], whole. Output: this process's [..., out_features / processes], or with
    `gather` all of them, in each process. Made by `parallelize` or `of`.
    """

    def __init__(self, part: nn.Linear, mesh: DeviceMesh, gather: bool = False) -> None:
        """part: a layer of this process's outputs alone."""
        super().__init__(part, mesh)
        self.gather = gather

    @classmethod
    def of(cls, layer: nn.Linear, mesh: DeviceMesh, gather: bool = False) -> ColumnParallelLinear:
        """This process's part of a whole layer, nn.Linear or what `quantize_` made of it.

        TypeError for another; ValueError: its outputs cannot be cut evenly, or the mesh has more
        than one dimension."""
        return cls(_part(layer, 0, mesh), mesh, gather)

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x, self.bias)
        if not self.gather:
            return y
        parts = [torch.empty_like(y) for _ in range(self.mesh.size())]
        dist.all_gather(parts, y, group=self.mesh.get_group())
        return torch.cat(parts, -1)


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each process has a part of the inputs; their products are summed.

    Input: this process's [..., in_features / processes], or with `scatter` the whole, of which it
    takes its part. Output [..., out_features], in each process. Activations that are quantized row
    by row have a scale for each part of a row, so that results differ from those of one process as
    finer scales do. Made by `parallelize` or `of`.
    """

    def __init__(self, part: nn.Linear, mesh: DeviceMesh, scatter: bool = False) -> None:
        """part: a layer of this process's inputs alone, and the whole bias."""
        super().__init__(part, mesh)
        self.scatter = scatter

    @classmethod
    def of(cls, layer: nn.Linear, mesh: DeviceMesh, scatter: bool = False) -> RowParallelLinear:
        """This process's part of a whole layer, nn.Linear or what `quantize_` made of it.

        TypeError for another; ValueError: its inputs cannot be cut evenly, or within a group, or
        the mesh has more than one dimension."""
        return cls(_part(layer, 1, mesh), mesh, scatter)

    def forward(self, x: Tensor) -> Tensor:
        if self.scatter:
            x = x.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]
        y = self._product(x, None)
        y = all_reduced(y, self.mesh.get_group())
        return y if self.bias is None else y + self.bias.to(y.dtype)


def parallelize(model: Model, mesh: DeviceMesh, plan: Plan) -> Model:
    """Cut linear layers of a model among the processes of a mesh, in place, and return it.

    mesh: of one dimension; each of its processes calls this with an equal model. plan: by the names
    of layers, in which * stands for anything, "column" (outputs are left cut), "column+gather",
    "row" (inputs are cut already) or "scatter+row". Of names that fit a layer, the first counts.

    Heads of attention are cut by cutting their projections: the model must take the number of heads
    from the width that it is given. Where something does not fit, the model is unchanged: TypeError
    for a layer that is none of `nn.Linear`, ValueError for a name that fits none, a style that is
    unknown, and a weight that cannot be cut so, with the layer's name.
    """
    made: dict[str, nn.Module] = {}
    for name, (layer, style) in _planned(model, plan).items():
        try:
            made[name] = _styled(_part(layer, _axis(style), mesh), mesh, style)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    for name, module in made.items():
        model.set_submodule(name, module)
    return model


def load_parallel(
    model: Model, path: str | os.PathLike[str], mesh: DeviceMesh, plan: Plan, *,
    verify: bool = False, device: torch.device | str | None = None,
) -> Model:  # fmt: skip
    """Load what `lowbit.torch.save` or `quantize_checkpoint` wrote, each process its part, as
    `load` and `parallelize` together would; the other parts of the file are not read.

    model: float, best made under `torch.device("meta")`. verify: read the whole file for its
    digest. device: where it goes, if it is on "meta"; that of the mesh, if left out. Errors are
    those of both; ValueError also for a layer of the plan that shares its weight.
    """
    stored, header = opened(path, verify=verify)
    layers = _planned(model, plan)
    parts: dict[str, nn.Linear] = {}
    for name, (layer, style) in layers.items():
        try:
            parts[name] = _stored_part(name, layer, stored, header, _axis(style), mesh)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    for name, part in parts.items():
        model.set_submodule(name, part)
    if device is None:
        of_cuda = mesh.device_type == "cuda"
        device = f"cuda:{torch.cuda.current_device()}" if of_cuda else mesh.device_type
    try:
        put(model, path, stored, header, torch.device(device))
    except BaseException:
        for name, (layer, _) in layers.items():
            model.set_submodule(name, layer)
        raise
    for name, (_, style) in layers.items():
        part = model.get_submodule(name)
        assert isinstance(part, nn.Linear)
        model.set_submodule(name, _styled(part, mesh, style))
    return model


def _planned(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Linear, str]]:
    """The layers of a plan and their styles, by name."""
    if unknown := sorted(set(plan.values()) - set(STYLES)):
        raise ValueError(f"style {unknown[0]!r} is unknown; known are {', '.join(STYLES)}")
    found: dict[str, tuple[nn.Linear, str]] = {}
    unused = set(plan)
    for name, module in model.named_modules():
        fitting = [pattern for pattern in plan if fnmatchcase(name, pattern)]
        unused -= {*fitting}
        if not fitting:
            continue
        if type(module) not in (nn.Linear, QuantizedLinear):
            raise TypeError(f"layer {name!r} is a {type(module).__name__}; give names of nn.Linear")
        assert isinstance(module, nn.Linear)
        found[name] = module, plan[fitting[0]]
    if unused:
        raise ValueError(f"no layer is called {sorted(unused)[0]!r}")
    return found


def _axis(style: str) -> int:
    return int(style.endswith("row"))


def _styled(part: nn.Linear, mesh: DeviceMesh, style: str) -> nn.Module:
    if _axis(style):
        return RowParallelLinear(part, mesh, scatter=style.startswith("scatter"))
    return ColumnParallelLinear(part, mesh, gather=style.endswith("gather"))


def _span(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """What of a size is this process's."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions; give one of them, mesh['name']")
    each, rest = divmod(size, mesh.size())
    if rest:
        raise ValueError(f"{size} cannot be cut evenly among {mesh.size()} processes")
    at = mesh.get_local_rank() * each
    return at, at + each


def _cut(
    format: WeightFormat, arrays: Mapping[str, Any], shape: Shape, axis: int, span: tuple[int, int]
) -> dict[str, Any]:
    """`WeightFormat.cut`, refused by all processes if it is by one."""
    format.cut(arrays, shape, axis, 0, span[1] - span[0])
    return format.cut(arrays, shape, axis, *span)


def _part(layer: nn.Linear, axis: int, mesh: DeviceMesh) -> nn.Linear:
    """A layer of this process's outputs (axis 0) or inputs (1), in memory of its own."""
    if type(layer) not in (nn.Linear, QuantizedLinear):
        raise TypeError(f"a {type(layer).__name__} cannot be cut; give an nn.Linear")
    weight, bias = layer.weight, layer.bias
    start, stop = _span(weight.shape[axis], mesh)
    if isinstance(weight, QuantizedWeight):
        facts, shape = weight.facts, (weight.out_features, weight.in_features)
        arrays = weight.format.to_stored(weight.record())
        arrays = _cut(weight.format, arrays, shape, axis, (start, stop))
        shape = (stop - start, shape[1]) if axis == 0 else (shape[0], stop - start)
        record = weight.format.from_stored(arrays, shape)
        facts = facts._replace(out_features=shape[0], in_features=shape[1])
        cut = QuantizedWeight.of(record, facts, weight.device)
    else:
        cut = weight.detach().narrow(axis, start, stop - start).clone()
    made = _empty(cut.shape, bias is not None and axis == 0)
    made.weight = nn.Parameter(cut, requires_grad=False)
    if bias is not None:
        own = bias.detach()[start:stop].clone() if axis == 0 else bias.detach()
        made.bias = nn.Parameter(own, requires_grad=False)
    return made


def _empty(shape: tuple[int, ...], biased: bool) -> nn.Linear:
    """A layer that takes no memory."""
    return nn.Linear(shape[1], shape[0], biased, device="meta")


def _stored_part(
    name: str, layer: nn.Linear, stored: dict[str, Tensor], header: Header, axis: int,
    mesh: DeviceMesh,
) -> nn.Linear:  # fmt: skip
    """A layer without memory of this process's part, to which what is stored of the layer is cut.

    ValueError: the weight is shared, is not of the layer's shape, or cannot be cut."""
    key, shape = f"{name}.weight", (layer.out_features, layer.in_features)
    if key in header.shared or key in header.shared.values():
        raise ValueError("it shares its weight with another layer: leave it out of the plan")
    start, stop = _span(shape[axis], mesh)
    one = header.weights.get(key)
    if one is None:
        if key in stored and stored[key].shape == shape:
            stored[key] = stored[key].narrow(axis, start, stop - start)
    else:
        keys = {part: part_key(key, part) for part in one.format.parts}
        known = {part: stored[held] for part, held in keys.items() if held in stored}
        for part, value in _cut(one.format, known, shape, axis, (start, stop)).items():
            stored[keys[part]] = value
    if axis == 0 and f"{name}.bias" in stored:
        stored[f"{name}.bias"] = stored[f"{name}.bias"][start:stop]
    cut = (stop - start, shape[1]) if axis == 0 else (shape[0], stop - start)
    return _empty(cut, layer.bias is not None)
