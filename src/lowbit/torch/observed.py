"""What the inputs of a model's weights are, seen while data runs through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.numerics.methods import Activations
from lowbit.torch.capture.export import bind, evaluating
from lowbit.torch.plan import Shared
from lowbit.torch.progress import Progress, told

_MOST = 2 << 30  # bytes of means of products that are kept at a time

aten = torch.ops.aten


class _Watch(TorchDispatchMode):
    """Sees every product with one of the weights, whichever layer or function makes it."""

    def __init__(self, weights: Sequence[Shared]) -> None:
        super().__init__()
        self.by_memory = {one.weight.untyped_storage().data_ptr(): one for one in weights}
        self.seen: dict[int, Activations] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default):
            x, weight = args[-2:] if func is not aten.linear.default else args[:2]
            found = self.by_memory.get(weight.untyped_storage().data_ptr())
            if found is not None:
                self._add(found, x)
        return func(*args, **(kwargs or {}))

    def _add(self, shared: Shared, x: Tensor) -> None:
        key = id(shared.weight)
        try:
            new = Activations.of(x.detach().to("cpu", torch.float32).numpy())
        except ValueError as error:
            raise ValueError(f"the input of layer {shared.places[0].name!r}: {error}") from None
        self.seen[key] = self.seen[key] + new if key in self.seen else new


def observed(
    model: nn.Module, weights: Sequence[Shared], batches: Iterable[Any] | None, progress: Progress
) -> Iterator[tuple[list[Shared], dict[int, Activations]]]:
    """Weights, some at a time, and the inputs of each, by the `id` of its parameter.

    As many at a time as their means of products, [K, K] in float64, fit into 2 GiB; the batches
    are run anew for each time. Weights that need no data (embeddings) come with the first.
    ValueError: there is no batch, an input is NaN or infinite, or a layer is never reached.
    """
    data = list(batches or ())
    if not data:
        raise ValueError("no data to calibrate with: give at least one batch as calibration")
    free = [one for one in weights if not one.format.needs_activations]
    for some in _portions([one for one in weights if one.format.needs_activations]):
        watch = _Watch(some)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # which hides its products
        try:
            with evaluating(model), watch:
                for batch in told("Running calibration data", data, len(data), progress):
                    _call(model, batch)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        missing = [one.places[0].name for one in some if id(one.weight) not in watch.seen]
        if missing:
            raise ValueError(
                f"the calibration data never reach {', '.join(map(repr, missing[:5]))}: leave them "
                "out with filter_fn, or give data that do"
            )
        yield free + some, watch.seen
        free = []


def _call(model: nn.Module, batch: Any) -> None:
    import inspect

    args, kwargs = bind(inspect.signature(model.forward), batch)
    model(*args, **kwargs)


def _portions(weights: Sequence[Shared]) -> Iterator[list[Shared]]:
    portion: list[Shared] = []
    held = 0
    for one in weights:
        each = 8 * one.weight.shape[0 if one.transposed else 1] ** 2
        if portion and held + each > _MOST:
            yield portion
            portion, held = [], 0
        portion.append(one)
        held += each
    yield portion
