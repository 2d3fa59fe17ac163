"""`quantize_checkpoint`: from a float checkpoint to a quantized file, with neither in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lowbit.torch.arguments import FLOATS
from lowbit.torch.config import QuantizeConfig
from lowbit.torch.experts import fused_shape, is_router, parts_of, renamed
from lowbit.torch.files import described, to_tensor
from lowbit.torch.header import CODES, FILE, Header, StoredWeight, part_key
from lowbit.torch.plan import Filter, plan
from lowbit.torch.progress import Progress, check_progress, told
from lowbit.torch.summary import LayerSummary, Summary, some
from lowbit.weights.tensor_file import Put, StoredTensor, forget, read_tensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BLOCK = 1 << 20  # elements that are quantized, or copied, at a time

Path_ = str | os.PathLike[str]


@dataclass(frozen=True)
class _Wanted:
    """What becomes of a checkpoint: header, reasons by key, and by class how layers are called."""

    header: Header
    why: Mapping[str, str]
    layers: Mapping[str, str]


def quantize_checkpoint(
    source: Path_,
    target: Path_,
    config: QuantizeConfig,
    model: nn.Module | None = None,
    filter_fn: Filter | None = None,
    *,
    rename: Callable[[str], str] | None = None,
    progress: Progress = None,
) -> Summary:
    """Quantize a safetensors checkpoint without loading it, into a file that `load` reads.

    source: a file, a folder with model.safetensors or model.safetensors.index.json, or such an
    index. target: the file to write, which appears complete or not at all. model: what the
    checkpoint belongs to, best made under `torch.device("meta")`, where it takes no memory; it says
    what each tensor is, and which are tied. Without one, each matrix called NAME.weight is taken
    for that of an nn.Linear, but for those that choose experts, which stay floats, and filter_fn,
    which is given layers, cannot be. Experts by number that the model holds in one parameter stay
    floats; without a model they are quantized, and `load` makes floats of them where it has to.
    rename: what the
    model calls a tensor of the checkpoint, where that is called otherwise. config, filter_fn and
    progress are those of `quantize_`; methods that need data cannot be had here.

    Memory: some blocks of 2²⁰ numbers, and all of one weight that lies as [in, out]. Returns what
    became of each tensor. FileNotFoundError if there is no checkpoint; ValueError for a damaged
    file, keys or shapes that do not fit the model, NaN and infinity, with the tensor's name, and
    if there is nothing to quantize; TypeError for a dtype that cannot be quantized.
    """
    check_progress(progress)
    if not isinstance(config, QuantizeConfig):
        raise TypeError(f"expected a configuration such as Int8DynamicConfig(), got {config!r}")
    if config.weight_format.needs_activations:
        raise ValueError(
            f"{config!r} needs data, which a checkpoint does not run on: choose method='nearest' "
            "or 'hqq', or quantize_ a model in memory with calibration=batches"
        )
    if model is None and filter_fn is not None:
        raise ValueError("filter_fn is given layers, so it needs model=")
    stored = _stored(_files(source), rename or str, model)
    try:
        tensors = {key: to_tensor(key, one) for key, one in stored.items()}
        wanted = (
            _by_model(model, tensors, config, filter_fn)
            if model is not None
            else _by_name(tensors, config)
        )
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: {error}") from None
    header = wanted.header
    kept = {key: one for key, one in tensors.items() if key not in header.shared}
    with FILE.writing(target, header.metadata(), described(kept, header)) as put:
        for key in told("Quantizing tensors", kept, len(kept), progress):
            one = header.weights.get(key)
            if one is None:
                _copy(put, key, stored[key])
            else:
                _quantize(put, key, tensors[key], stored[key], one)
            forget(stored[key].data)
    return Summary(tuple(_lines(tensors, wanted)))


def _stored(
    files: list[Path], called: Callable[[str], str], model: nn.Module | None
) -> dict[str, StoredTensor]:
    """The tensors of files, by the model's names."""
    own = () if model is None else model.state_dict().keys()
    return {
        renamed(called(key), own): tensor
        for file in files
        for key, tensor in read_tensors(file, writable=True).items()
    }


def _files(source: Path_) -> list[Path]:
    """All files of a checkpoint. FileNotFoundError names what is missing."""
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in (_SINGLE, _INDEX) if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds neither {_SINGLE} nor {_INDEX}")
        path = found[0]
    if path.suffix != ".json":
        return [path]
    try:
        names = json.loads(path.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no index of a checkpoint: {error!r}") from None
    return [path.parent / name for name in dict.fromkeys(names)]


def _by_model(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    config: QuantizeConfig,
    filter_fn: Filter | None,
) -> _Wanted:
    """What the layers of a model say. ValueError: the checkpoint does not fit it."""
    own = model.state_dict(keep_vars=True)
    by_id: dict[int, list[str]] = {}
    for key, one in own.items():
        by_id.setdefault(id(one), []).append(key)
    shared: dict[str, str] = {}
    experts = parts_of(tensors.keys(), own)
    numbered = {key for keys in experts.values() for key in keys}
    for keys in by_id.values():
        there = [key for key in keys if key in tensors or key in experts]
        if not there:
            raise ValueError(
                f"there is no {keys[0]!r}, which the model has; where it has another name there, "
                "pass rename="
            )
        shared |= {key: there[0] for key in keys if key != there[0]}
    if unknown := tensors.keys() - own.keys() - numbered:
        raise ValueError(f"the model has no {some(map(repr, sorted(unknown)))}")
    shapes = {key: one.shape for key, one in tensors.items()}
    sizes = {key: list(shape) for key, shape in shapes.items() if key not in numbered}
    sizes |= {whole: fused_shape(shapes, keys, whole) for whole, keys in experts.items()}
    for key, size in sizes.items():
        if size != list(own[key].shape):
            raise ValueError(f"{key!r} is {size}, in the model {list(own[key].shape)}")
    made = plan(model, config, filter_fn)
    weights: dict[str, StoredWeight] = {}
    for group in made.weights:
        keys = by_id[id(group.weight)]
        taken = {place.key for place in group.places}
        if apart := [key for key in keys if key not in taken]:
            raise ValueError(
                f"{apart[0]!r} shares its weight with {min(taken)!r} and would stay in float: "
                "leave both out with filter_fn, or neither"
            )
        dtype = tensors[shared.get(keys[0], keys[0])].dtype
        weights |= dict.fromkeys(keys, StoredWeight(config, group.format, group.transposed, dtype))
    names = {
        f"{name}.{one}".lstrip("."): type(module).__name__
        for name, module in model.named_modules()
        for one in (*module._parameters, *module._buffers)
    }
    why = {key: made.stays.get(key.rpartition(".")[0], "") for key in own}
    why |= dict.fromkeys(numbered, "the model holds all experts in one parameter")
    return _Wanted(Header(weights, shared), why, names)


def _by_name(tensors: Mapping[str, Tensor], config: QuantizeConfig) -> _Wanted:
    """What the names and shapes of tensors say."""
    weights = {
        key: StoredWeight(config, config.weight_format, False, one.dtype)
        for key, one in tensors.items()
        if one.dim() == 2 and one.numel() and one.dtype in FLOATS and _is_weight(key)
        and not is_router(key)
    }  # fmt: skip
    if not weights:
        raise ValueError("nothing to quantize: no matrix of floats is called NAME.weight")
    why = {key: "it chooses experts" for key in tensors if is_router(key)}
    return _Wanted(Header(weights), why, {})


def _is_weight(key: str) -> bool:
    return key == "weight" or key.endswith(".weight")


def _copy(put: Put, key: str, stored: StoredTensor) -> None:
    step = 4 * _BLOCK
    for start in range(0, stored.data.nbytes, step):
        put(key, stored.data[start : start + step])
        forget(stored.data)


def _quantize(put: Put, key: str, tensor: Tensor, stored: StoredTensor, one: StoredWeight) -> None:
    """Write the parts of a weight, some of its rows after the other."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{key!r} is {tensor.dtype}; weights of float32, bfloat16 and float16 can be quantized"
        )
    rows = tensor.T if one.transposed else tensor
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step].to(torch.float32, copy=True).contiguous().numpy()
        if not one.transposed:
            forget(stored.data)
        try:
            found = one.format.quantize(block)
        except ValueError as error:
            raise ValueError(f"{key!r}, in rows from {start}: {error}") from None
        for part, array in one.format.to_stored(found).items():
            put(part_key(key, part), StoredTensor.of(array).data)


def _lines(tensors: Mapping[str, Tensor], wanted: _Wanted) -> Iterator[LayerSummary]:
    header = wanted.header
    for key, tensor in tensors.items():
        layer = wanted.layers.get(key, "")
        if key in header.shared:
            yield LayerSummary(key, layer, key in header.weights, "",
                               f"shares {header.shared[key]}", 0, 0)  # fmt: skip
            continue
        size = tensor.numel() * tensor.element_size()
        if (one := header.weights.get(key)) is None:
            dtype = CODES[tensor.dtype]
            yield LayerSummary(key, layer, False, dtype, wanted.why.get(key, ""), size, size)
            continue
        rows, depth = tensor.shape[::-1] if one.transposed else tensor.shape
        parts = one.format.stored((rows, depth)).values()
        after = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in parts)
        yield LayerSummary(key, layer, True, str(one.format), "", size, after)
