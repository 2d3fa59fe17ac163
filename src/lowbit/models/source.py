"""Networks to quantize, by what a command names: of the registry, of a Python function, ONNX."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph import Graph, Session, from_onnx, load
from lowbit.graph.evaluate import Compute
from lowbit.models.model import Array, Arrays, Model, Run, models, runner

if TYPE_CHECKING:
    from torch import nn

RANDOM = "random"
NETWORK = "network.safetensors"
"""The network in a folder that `lowbit quantize` wrote."""
_BATCHES, _BATCH = 4, 8


@dataclass(frozen=True)
class Source:
    """A float network with data.

    graph: of floats. batches: to calibrate with. sample: inputs by which values are compared, none
    of them in `batches` where the data are a model's own. data: what the data are, in words. run:
    the float network. model: of the registry, where its accuracy can be measured. compute: as of
    `evaluate`.
    """

    name: str
    graph: Graph
    batches: tuple[Mapping[str, Array], ...]
    sample: Mapping[str, Array]
    data: str
    run: Run
    model: Model | None = None
    compute: Mapping[str, Compute] | None = None


def find(
    what: str, data: str | None = None, weights: str | None = None, batches: int = _BATCHES
) -> Source:
    """The network that is called so.

    what: the name of a model of the registry; `module:function`, where the function returns a
    PyTorch module, or a pair of it and an example of its inputs; or FILE.onnx. data: FILE.npy with
    samples of the one input, FILE.npz with those of all in their order, "random", or None for a
    registered model's own, of which `batches` are taken to calibrate with. ValueError: there is
    no such thing, or the data do not fit.
    """
    if what.lower().endswith(".onnx"):
        return _of_file(Path(what).stem, Path(what), _given(data))
    if ":" in what:
        return _of_function(what, _given(data))
    model = models.get(what)
    if reason := model.absent():
        raise ModuleNotFoundError(reason)
    built = model.build(weights, for_speed=data == RANDOM)
    given, own = _given(data), None
    if data == RANDOM:
        given = [model.example((_BATCHES + 1) * _BATCH)]
    elif given is None:
        given, own = list(model.calibration(batches + 1, _BATCH)), model
        longest = [
            [max(n) for n in zip(*map(np.shape, each), strict=True)]
            for each in zip(*given, strict=True)
        ]
        given = [padded(one, longest) for one in given]
    if isinstance(built, Path):
        return _of_file(what, built, given, own)
    return _of_module(what, built, given, data or "of the model", own)


def compiled(path: Path) -> Graph:
    """What `lowbit quantize` wrote to a folder, a file of `lowbit.graph.save`, or FILE.onnx."""
    if path.suffix.lower() == ".onnx":
        return from_onnx(path)
    return load(path / NETWORK if path.is_dir() else path)


def padded(arrays: Arrays, shapes: Sequence[Sequence[int | str]]) -> Arrays:
    """Integers, which are tokens and their masks, with zeros up to the lengths of these shapes; the
    first size stays. ValueError: they are longer."""
    made = []
    for one, shape in zip(arrays, shapes, strict=True):
        pairs = zip(one.shape[1:], shape[1:], strict=True)
        more = [(0, 0 if isinstance(size, str) else size - n) for n, size in pairs]
        made.append(np.pad(one, [(0, 0), *more]) if one.dtype.kind in "iu" and any(more) else one)
    return tuple(made)


def _given(data: str | None) -> list[Arrays] | None:
    """The arrays of a file, as one batch; None for no file."""
    if data in (None, RANDOM):
        return None
    held = np.load(data, allow_pickle=False)
    if isinstance(held, np.ndarray):
        return [(held,)]
    with held:
        return [tuple(held[name] for name in held.files)]


def _of_file(
    name: str, path: Path, given: list[Arrays] | None, model: Model | None = None
) -> Source:
    graph = from_onnx(path)
    data = RANDOM if given is None else "of the model" if model else "a file"
    batches, sample = _batches(graph, given or [_drawn(graph)])
    return Source(name, graph, batches, sample, data, Session(graph), model)


def called(what: str) -> Any:
    """What `module:function` returns. ValueError: the module has no such function."""
    module, _, function = what.partition(":")
    if "" not in sys.path:  # a command finds what python -m would find
        sys.path.insert(0, "")
    made = getattr(importlib.import_module(module), function, None)
    if made is None:
        raise ValueError(f"{module} has no {function!r}")
    return made()


def _of_function(what: str, batches: list[Arrays] | None) -> Source:
    """What `module:function` returns."""
    from torch import nn

    from lowbit.torch.capture.export import bind

    function, made = what.rpartition(":")[2], called(what)
    network, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"{what} returns {type(network).__name__}: let it return a torch.nn.Module, or a pair "
            "(model, example)"
        )
    if batches is not None:
        return _of_module(function, network, batches, "a file")
    if example is None:
        raise ValueError(
            f"{what} says no inputs: give --data FILE.npy, or let it return (model, example)"
        )
    several, _ = bind(inspect.signature(network.forward), example)
    return _of_module(function, network, [_like(tuple(map(np.asarray, several)))], RANDOM)


def _of_module(
    name: str, network: nn.Module, given: list[Arrays], data: str, model: Model | None = None
) -> Source:
    import torch

    from lowbit.torch import compile
    from lowbit.torch.capture.compute import COMPUTE

    network = network.eval()
    example = tuple(torch.from_numpy(one[:1]) for one in given[0])
    graph = compile(network, example).graph
    batches, sample = _batches(graph, given)
    return Source(name, graph, batches, sample, data, runner(network), model, COMPUTE)


def _drawn(graph: Graph) -> Arrays:
    """Random inputs: normal floats, zeros of integers, which are in every range, and True."""
    rng, made = np.random.default_rng(0), []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        shape = [_BATCH if isinstance(size, str) else size for size in tensor.shape]
        dtype = np.dtype(tensor.dtype if tensor.scale is None else "float32")
        if dtype.kind == "f":
            made.append(rng.standard_normal(shape, np.float32).astype(dtype))
        else:
            made.append(np.full(shape, dtype.kind == "b", dtype))
    return tuple(made)


def _like(example: Arrays) -> Arrays:
    """As many samples as batches need: of random floats, and integers as the example has them."""
    rng, count = np.random.default_rng(0), _BATCH * (_BATCHES + 1)
    return tuple(
        rng.standard_normal((count, *one.shape[1:]), np.float32).astype(one.dtype)
        if one.dtype.kind == "f"
        else np.resize(one, (count, *one.shape[1:]))
        for one in example
    )


def _batches(
    graph: Graph, batches: list[Arrays]
) -> tuple[tuple[dict[str, Array], ...], dict[str, Array]]:
    """Batches of a size that the graph takes, and the sample: the last of several."""
    for arrays in batches:
        if len(arrays) != len(graph.inputs):
            raise ValueError(f"the inputs are {', '.join(graph.inputs)}; got {len(arrays)} arrays")
    cut, first = _samples(graph)
    parts = [
        dict(zip(graph.inputs, part, strict=True))
        for arrays in batches
        for part in _parts(arrays, cut, _BATCH if isinstance(first, str) else first)
    ]
    if not parts:
        raise ValueError("no data to calibrate with: there is not one whole batch")
    return tuple(parts[:-1] or parts), parts[-1]


def _samples(graph: Graph) -> tuple[list[bool], int | str]:
    """Which inputs have samples along their first axis, and how many; any number, if it has a name.
    Others, as tables, are the same for all samples."""
    shapes = [graph.tensors[name].shape for name in graph.inputs]
    firsts = [shape[0] for shape in shapes if shape]
    count = next((one for one in firsts if isinstance(one, str)), (*firsts, 1)[0])
    named = isinstance(count, str)  # files may name one size differently for each input
    cut = (bool(s) and (isinstance(s[0], str) if named else s[0] == count) for s in shapes)
    return list(cut), count


def _parts(arrays: Arrays, cut: Sequence[bool], size: int) -> Iterator[Arrays]:
    """Batches of `size`; one that is smaller only where there is no other, and any size does."""
    several = [one for one, samples in zip(arrays, cut, strict=True) if samples]
    if not several:
        yield arrays
        return
    if not all(one.ndim for one in several):
        raise ValueError("samples lie along the first axis of an array, and one has no axes")
    count = min(map(len, several))
    size = min(size, count) if size == _BATCH else size
    for start in range(0, count - size + 1, size):
        part = slice(start, start + size)
        yield tuple(one[part] if samples else one for one, samples in zip(arrays, cut, strict=True))


def few(graph: Graph, arrays: Mapping[str, Array], batch: int = 1) -> dict[str, Array]:
    """Of these inputs the first samples, where the graph leaves open how many there are."""
    cut, count = _samples(graph)
    open_ = isinstance(count, str)
    return {
        name: arrays[name][:batch] if samples and open_ else arrays[name]
        for name, samples in zip(graph.inputs, cut, strict=True)
    }


def random_inputs(graph: Graph, batch: int = 1) -> dict[str, Any]:
    """Inputs for a run without data, `batch` samples where the graph leaves that open."""
    return few(graph, dict(zip(graph.inputs, _drawn(graph), strict=True)), batch)
