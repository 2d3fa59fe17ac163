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
    samples of the one input, FILE.npz with those of all by their names, "random", or None for a
    registered model's own, of which `batches` are taken to calibrate with. ValueError: there is
    no such thing, the data do not fit, or there are none, of a network that brings none.
    """
    if what.lower().endswith(".onnx"):
        return _of_file(Path(what).stem, Path(what), None, data)
    if ":" in what:
        return _of_function(what, data)
    model = models.get(what)
    if reason := model.absent():
        raise ModuleNotFoundError(reason)
    built = model.build(weights, for_speed=data == RANDOM)
    if data not in (None, RANDOM):
        if isinstance(built, Path):
            return _of_file(what, built, None, data)
        return _of_module(what, built, [Samples.read(data).of_module(built)], "a file")
    if data == RANDOM:
        given, own = [model.example((_BATCHES + 1) * _BATCH)], None
    else:
        given, own = list(model.calibration(batches + 1, _BATCH)), model
        longest = [
            [max(n) for n in zip(*map(np.shape, each), strict=True)]
            for each in zip(*given, strict=True)
        ]
        given = [padded(one, longest) for one in given]
    if isinstance(built, Path):
        return _of_file(what, built, given, data, own)
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


@dataclass(frozen=True)
class Samples:
    """The arrays of a file, by name; in an .npy there is one, without a name."""

    path: str
    arrays: Mapping[str, Array]

    @classmethod
    def read(cls, path: str) -> Samples:
        """ValueError, OSError: it is none of NumPy's files, or holds objects."""
        held = np.load(path, allow_pickle=False)
        if isinstance(held, np.ndarray):
            return cls(path, {"": held})
        with held:
            return cls(path, {name: held[name] for name in held.files})

    def ordered(self, names: Sequence[str]) -> Arrays:
        """The arrays in the order of a network's inputs. ValueError: they are called otherwise."""
        if len(names) == 1 and len(self.arrays) == 1 and self._unnamed:
            return tuple(self.arrays.values())
        if set(names) != set(self.arrays):
            held = ", ".join(self.arrays) if "" not in self.arrays else "one array without a name"
            raise ValueError(
                f"{self.path} holds {held or 'nothing'}, and the network's inputs are "
                f"{', '.join(names)}: arrays are matched by name. Make it with {_savez(names)}"
            )
        return tuple(self.arrays[name] for name in names)

    @property
    def _unnamed(self) -> bool:
        """Whether its one array has no name, or the one that NumPy gives."""
        return next(iter(self.arrays)) in ("", "arr_0")

    def of_module(self, network: nn.Module) -> Arrays:
        """The arrays in the order of the parameters of a module's forward."""
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(network.forward).parameters.values()
        names = [one.name for one in parameters if one.kind in kinds]
        required = [one.name for one in parameters
                    if one.kind in kinds and one.default is inspect.Parameter.empty]  # fmt: skip
        return self.ordered(names[: max(len(required), min(len(self.arrays), len(names)))])


def fitted(graph: Graph, arrays: Arrays) -> Arrays:
    """Arrays as the inputs of a graph take them. ValueError: another number of them, or a shape or
    dtype that does not fit, by the input's name."""
    if len(arrays) != len(graph.inputs):
        raise ValueError(f"the inputs are {', '.join(graph.inputs)}; got {len(arrays)} arrays")
    return tuple(
        _fitted(graph, name, array) for name, array in zip(graph.inputs, arrays, strict=True)
    )


def _fitted(graph: Graph, name: str, array: Array) -> Array:
    tensor = graph.tensors[name]
    sizes = zip(tensor.shape[1:], array.shape[1:], strict=False)
    fits = array.ndim == len(tensor.shape) and all(
        isinstance(size, str) or size == n for size, n in sizes
    )
    dtype = np.dtype(tensor.dtype if tensor.scale is None else "float32")
    same = array.dtype == dtype or (
        array.dtype.kind in "iuf" and array.dtype.kind in ("f" if dtype.kind == "f" else "iu")
    )
    if not fits or not same:
        raise ValueError(
            f"input {name} is {described(graph, name)}, and its array is {array.dtype} "
            f"{list(array.shape)}"
        )
    if array.dtype == dtype:
        return array
    made = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(made, array):
        raise ValueError(f"input {name} is {dtype}, and its array of {array.dtype} has more")
    return made


def described(graph: Graph, name: str) -> str:
    """The dtype and shape of an input."""
    tensor = graph.tensors[name]
    dtype = tensor.dtype if tensor.scale is None else "float32"
    return f"{dtype} [{', '.join(map(str, tensor.shape))}]"


def _savez(names: Sequence[str]) -> str:
    return f"numpy.savez('FILE.npz', {', '.join(f'{name}=...' for name in names)})"


def _needs_data(what: str, inputs: Mapping[str, str]) -> ValueError:
    """What to say where there are no data. inputs: what is known of each, by name."""
    wanted = "; ".join(f"{name}: {text}".rstrip(": ") for name, text in inputs.items())
    return ValueError(
        f"{what} is calibrated with real samples of its inputs, {_BATCH} or more. Give --data "
        f"FILE.npz, whose arrays have their names ({wanted}), made with {_savez(list(inputs))}; "
        "or --data random, for speed alone: the network that it writes is not for use"
    )


def _of_file(
    name: str, path: Path, given: list[Arrays] | None, data: str | None, model: Model | None = None
) -> Source:
    graph = from_onnx(path)
    words = "of the model" if model else "a file"
    if data == RANDOM:
        given, words = given or [_drawn(graph)], RANDOM
    elif given is None and data is None:
        inputs = {each: described(graph, each) for each in graph.inputs}
        raise _needs_data(str(path), inputs)
    elif given is None:
        given = [Samples.read(str(data)).ordered(graph.inputs)]
    batches, sample = _batches(graph, [fitted(graph, arrays) for arrays in given or []])
    return Source(name, graph, batches, sample, words, Session(graph), model)


def called(what: str) -> Any:
    """What `module:function` returns. ValueError: the module has no such function."""
    module, _, function = what.partition(":")
    if "" not in sys.path:  # a command finds what python -m would find
        sys.path.insert(0, "")
    made = getattr(importlib.import_module(module), function, None)
    if made is None:
        raise ValueError(f"{module} has no {function!r}")
    return made()


def _of_function(what: str, data: str | None) -> Source:
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
    if data not in (None, RANDOM):
        arrays = Samples.read(data).of_module(network)
        return _of_module(function, network, [arrays], "a file")
    signature = inspect.signature(network.forward)
    if example is None and data == RANDOM:
        raise ValueError(
            f"{what} says no inputs: give --data FILE.npz, or let it return (model, example)"
        )
    leaves = () if example is None else tuple(map(np.asarray, bind(signature, example)[0]))
    if data is None:
        known = [f"{one.dtype} {list(one.shape)}, as the example's" for one in leaves]
        padding = [""] * len(signature.parameters)
        raise _needs_data(what, dict(zip(signature.parameters, known + padding, strict=False)))
    return _of_module(function, network, [_like(leaves)], RANDOM)


def _of_module(
    name: str, network: nn.Module, given: list[Arrays], data: str, model: Model | None = None
) -> Source:
    import torch

    from lowbit.torch import compile
    from lowbit.torch.capture.compute import COMPUTE

    network = network.eval()
    example = tuple(torch.from_numpy(one[:1]) for one in given[0])
    graph = compile(network, example).graph
    batches, sample = _batches(graph, [fitted(graph, arrays) for arrays in given])
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
