"""Save and load models as safetensors files. Nothing is pickled or unpickled.

A file holds the model's state_dict. Of a quantized layer NAME it holds

                             8 bits             4 bits
    NAME.weight              int8 [out, in]     uint8 [out, ceil(in / 2)], the first of two low
    NAME.weight.scale        float32 [out]      float32 [out, groups]
    NAME.weight.zero_point                      uint8 [out, groups], unless it is symmetric

    NAME.weight.input_scale  float32 [in], of methods that have one (AWQ, SmoothQuant)

Real zero points (HQQ) are float32. Its metadata are

    format          "lowbit.torch"
    format_version  "4"; files of "1" to "3", which knew linear layers only, are read as well
    header_sha256, data_sha256      see lowbit.weights.tensor_file
    layers          JSON: the key of each quantized weight and its configuration
    weights         JSON: the same keys, and the weight's dtype, whether it is [in, out], and
                    whether its format is that of embeddings
    shared          JSON: keys whose tensor is stored under another key, and that key
    buffers         JSON: names of stored buffers that belong to no state_dict
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowbit.torch.experts import fused, fused_shape, parts_of, renamed
from lowbit.torch.header import (
    CODES,
    FILE,
    TORCH,
    Header,
    StoredWeight,
    part_key,
    read_header,
    stored_tensor,
)
from lowbit.torch.kinds import QuantizedModule, become_quantized, kind_of
from lowbit.torch.network import CompiledModule
from lowbit.torch.summary import some
from lowbit.torch.weight import QuantizedWeight, device_refusal, packing_of
from lowbit.weights.tensor_file import StoredTensor

# Buffers of a model on "meta" that belong to no state_dict: tables that its class computes.


def restore_buffers(
    model: nn.Module, stored: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Tensor]:
    """Values for the model's buffers that are on "meta" and belong to no state_dict.

    They are those of the file, where it has them, or what the model's own initialization gives, as
    transformers' models have it. ValueError: neither is there.
    """
    state = model.state_dict(keep_vars=True)
    needed = {n: b for n, b in model.named_buffers() if b.is_meta and n not in state}
    found = {n: stored[n] for n in needed if n in stored and stored[n].shape == needed[n].shape}
    for owner in {name.rpartition(".")[0] for name in needed if name not in found}:
        found |= _computed(model, owner)
    if missing := [name for name in needed if name not in found]:
        raise ValueError(
            f"the buffers {', '.join(map(repr, missing[:5]))} are on 'meta' and in no file: set "
            "them before load, or make the model outside of torch.device('meta')"
        )
    return found


def _computed(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The buffers of a module without parameters, as `_init_weights` of a model above sets them."""
    module = model.get_submodule(name)
    parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    above = (model.get_submodule(one) for one in (*parents, ""))
    initialize: Any = next((m._init_weights for m in above if hasattr(m, "_init_weights")), None)
    if initialize is None or module._parameters:
        return {}
    kept = dict(module._buffers)
    # What is never set shows, since it stays as it is here.
    unset = {n: _unset(one) for n, one in kept.items() if one is not None}
    try:
        module._buffers.update({n: one.clone() for n, one in unset.items()})
        with torch.no_grad():
            initialize(module)
        made = {n: one for n, one in module._buffers.items() if one is not None}
    finally:
        module._buffers.clear()
        module._buffers.update(kept)
    prefix = f"{name}." if name else ""
    return {
        f"{prefix}{n}": one
        for n, one in made.items()
        if not one.is_meta and not torch.equal(one.nan_to_num(-7.0), unset[n].nan_to_num(-7.0))
    }


def _unset(tensor: Tensor) -> Tensor:
    unlikely = float("nan") if tensor.is_floating_point() else -1
    return torch.full(tensor.shape, unlikely, dtype=tensor.dtype, device="cpu")


Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of `model`, quantized or not, to the safetensors file `path`.

    The file appears complete or not at all; an older one is replaced. Tensors that share their
    memory are stored once, and one tensor at a time is brought into the file's form. TypeError if
    the state_dict holds something that is not a tensor, or a tensor that such a file cannot hold,
    or the model a compiled network. OSError if the file cannot be written.
    """
    if any(isinstance(one, CompiledModule) for one in model.modules()):
        raise TypeError(
            "a compiled network has no state: write it with lowbit.graph.save(network.graph, path)"
        )
    weights: dict[str, StoredWeight] = {}
    shared: dict[str, str] = {}
    first_key: dict[Any, str] = {}
    kept: dict[str, Tensor] = {}
    configs = dict(_configs(model))
    state = model.state_dict(keep_vars=True)
    buffers = {n: one for n, one in model.named_buffers() if n not in state and not one.is_meta}
    for key, value in (*state.items(), *buffers.items()):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key!r} in the state_dict is a {type(value).__name__}; only tensors can be saved"
            )
        original = first_key.setdefault(_identity(value), key)
        if isinstance(value, QuantizedWeight):
            config, facts = configs.get(key, value.config), value.facts
            if config is None:
                raise TypeError(
                    f"{key!r} is a QuantizedWeight of no configuration: make it with quantize_"
                )
            weights[key] = StoredWeight(config, facts.format, facts.transposed, facts.dtype)
        if original != key:
            shared[key] = original
        else:
            kept[key] = value
            if not isinstance(value, QuantizedWeight):
                _check_storable(key, value)
    header = Header(weights, shared, tuple(buffers))
    with FILE.writing(path, header.metadata(), described(kept, header)) as put:
        for key, value in kept.items():
            for name, stored in _stored(key, value):
                put(name, stored.data)


def described(tensors: dict[str, Tensor], header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of all that a file holds, for tensors on any device, "meta" too."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, tensor in tensors.items():
        if (one := header.weights.get(key)) is None:
            found[key] = CODES[tensor.dtype], tuple(tensor.shape)
            continue
        rows, depth = tensor.shape[::-1] if one.transposed else tensor.shape
        for part, (dtype, shape) in one.format.stored((rows, depth)).items():
            found[part_key(key, part)] = CODES[getattr(torch, dtype)], shape
    return found


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configurations of quantized layers, by the keys of their weights."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedModule):
            for one in module.weight_names(module):
                yield (f"{name}.{one}" if name else one), module.config


def _stored(key: str, tensor: Tensor) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(tensor, QuantizedWeight):
        for part, array in tensor.format.to_stored(tensor.record()).items():
            yield part_key(key, part), StoredTensor.of(array)
    else:
        yield key, stored_tensor(tensor)


def _check_storable(key: str, tensor: Tensor) -> None:
    if tensor.dtype not in CODES or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(
            f"{key!r} in the state_dict is a {tensor.layout} tensor of {tensor.dtype} on "
            f"{str(tensor.device)!r}, which a safetensors file cannot hold"
        )


def to_tensor(key: str, stored: StoredTensor) -> Tensor:
    """A tensor of a file, in the same memory. ValueError for a dtype that PyTorch lacks."""
    if stored.dtype not in TORCH:
        raise ValueError(f"{key!r} is of {stored.dtype}, which this PyTorch lacks")
    return torch.from_numpy(stored.data).view(TORCH[stored.dtype]).reshape(stored.shape)


def load(
    model: Model,
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    device: torch.device | str = "cpu",
) -> Model:
    """Load what `save` or `quantize_checkpoint` wrote into `model`, in place, and return it.

    `model` has the same architecture and is float, as its class makes it, or quantized already. Or
    it has been made under `torch.device("meta")` and takes no memory: it then gets that of what is
    loaded, on `device`, in the dtypes of the file. The layers that are quantized in the file become
    quantized in the model; experts that it has by number, and that the model holds in one
    parameter, become floats. The whole file is checked before the model is touched, with `verify`
    also its digest: ValueError for a file that is truncated, damaged, not of this format or of
    another version, for keys, shapes or dtypes that do not match the model, and for buffers of a
    meta model that no file holds. FileNotFoundError if there is none.
    """
    stored, header = opened(path, verify=verify)
    return put(model, path, stored, header, torch.device(device))


def opened(path: str | os.PathLike[str], *, verify: bool) -> tuple[dict[str, Tensor], Header]:
    """The tensors of a file, mapped, and what it says of them. ValueError: it is damaged."""
    # In memory that may be written, since PyTorch knows no other.
    metadata, tensors = FILE.read(path, verify=verify, writable=True)
    header = read_header(metadata, path)
    try:
        return {key: to_tensor(key, tensor) for key, tensor in tensors.items()}, header
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error}") from None


def put(
    model: Model, path: str | os.PathLike[str], stored: dict[str, Tensor], header: Header,
    device: torch.device,
) -> Model:  # fmt: skip
    """What `load` does with what a file holds."""
    own = model.state_dict(keep_vars=True)
    try:
        stored, header = _with_experts(own, stored, header)
        header = _with_ties(own, stored, header)
        _check_keys(own, stored, header)
        layers = _match_layers(model, own, stored, header, device)
        plain = {key: stored[header.source(key)] for key in own if key not in layers}
        _match_tensors(own, plain, header)
        buffers = restore_buffers(model, {key: stored[key] for key in header.buffers}, device)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} does not fit this model: {error}") from None
    # Everything that can fail comes before the first change.
    _put_weights(layers, own, stored, header, device)
    with torch.no_grad():
        made: dict[int, Tensor] = {}
        for key, tensor in (*plain.items(), *buffers.items()):
            target = own.get(key)
            if target is not None and not target.is_meta:
                target.copy_(tensor)
                continue
            if target is None or id(target) not in made:
                new = tensor.clone().to(device)
                if isinstance(target, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=target.requires_grad)
                made[id(key if target is None else target)] = new
            _set(model, key, made[id(key if target is None else target)])
    return model


def _set(model: nn.Module, key: str, tensor: Tensor) -> None:
    """Put a tensor in the place of one on "meta"."""
    owner, _, name = key.rpartition(".")
    module = model.get_submodule(owner)
    held: Any = module._parameters if name in module._parameters else module._buffers
    held[name] = tensor


def _with_ties(own: dict[str, Any], stored: dict[str, Tensor], header: Header) -> Header:
    """With the keys that a file lacks since the model holds one tensor under several."""
    known = {_identity(one): key for key, one in own.items() if key in stored}
    missing = (key for key in own if key not in stored and key not in header.shared)
    ties = {key: first for key in missing if (first := known.get(_identity(own[key])))}
    weights = {key: header.weights[one] for key, one in ties.items() if one in header.weights}
    return Header({**header.weights, **weights}, {**header.shared, **ties}, header.buffers)


def _with_experts(
    own: dict[str, Any], stored: dict[str, Tensor], header: Header
) -> tuple[dict[str, Tensor], Header]:
    """With the experts that a file has by number as the model's parameters of all of them, which
    are floats; and with routers under the model's names."""
    parts = header.parts()
    names = {key: renamed(key, own) for key in stored}
    stored = {names[key]: tensor for key, tensor in stored.items()}
    weights = dict(header.weights)
    for whole, keys in parts_of([*(stored.keys() - parts.keys()), *weights], own).items():
        matrices = [_matrix(key, stored, weights.get(key), own[whole].shape) for key in keys]
        for key in keys:
            taken = weights.pop(key, None)
            for part in () if taken is None else taken.format.parts:
                stored.pop(part_key(key, part))
            stored.pop(key, None)
        shapes = {key: matrix.shape for key, matrix in zip(keys, matrices, strict=True)}
        fused_shape(shapes, keys, whole)  # which are checked here
        stored[whole] = fused(matrices, whole)
    return stored, Header(weights, header.shared, header.buffers)


def _matrix(
    key: str, stored: dict[str, Tensor], weight: StoredWeight | None, whole: torch.Size
) -> Tensor:
    """An expert's matrix as floats. whole: the shape of the parameter that it goes to."""
    if weight is None:
        return stored[key]
    shape = len(stored[key]), whole[-1]
    _check_parts(key, stored, weight, shape)
    arrays = {part: stored[part_key(key, part)].numpy() for part in weight.format.parts}
    floats = weight.format.from_stored(arrays, shape).dequantize()
    return torch.from_numpy(floats).to(weight.dtype)


def _put_weights(
    layers: dict[str, tuple[nn.Module, str]],
    own: dict[str, Any],
    stored: dict[str, Tensor],
    header: Header,
    device: torch.device,
) -> None:
    """Make the layers quantized, weight by weight."""
    multiplied = {
        header.source(key)
        for key, (layer, _) in layers.items()
        if (kind := kind_of(layer)) and kind.multiplies
    }
    weights: dict[str, nn.Parameter] = {}
    for key, (layer, name) in layers.items():
        source, one = header.source(key), header.weights[key]
        if source not in weights:
            target = own[key]
            where = device if target.is_meta else target.device
            shown = one.dtype if target.is_meta else target.dtype
            facts = one.facts(target.shape, shown, "rows")
            if source in multiplied:
                packing = packing_of(where, facts.format, facts.activations)
                facts = facts._replace(packing=packing)
            arrays = {part: stored[part_key(source, part)].numpy() for part in one.format.parts}
            record = one.format.from_stored(arrays, (facts.out_features, facts.in_features))
            weight = QuantizedWeight.of(record, facts, where)
            weight.key = source
            weights[source] = nn.Parameter(weight, requires_grad=False)
        become_quantized(layer, {name: weights[source]}, one.config)


def _check_keys(own: dict[str, Any], stored: dict[str, Tensor], header: Header) -> None:
    """Raise unless the file says something about each key of the model, and of no other."""
    sources = {key for key in header.weights if key not in header.shared}
    parts = set(header.parts())
    content = (stored.keys() - (parts - sources) - set(header.buffers)) | header.shared.keys()
    referred = parts | set(header.shared.values()) | set(header.buffers)
    found = {
        "missing in the file": own.keys() - content,
        "not in the model": content - own.keys(),
        "referred to in the file but not stored": referred - stored.keys(),
    }
    problems = [f"{what}: {some(map(repr, sorted(keys)))}" for what, keys in found.items() if keys]
    if problems:
        raise ValueError("; ".join(problems))


def _match_layers(
    model: nn.Module,
    own: dict[str, Any],
    stored: dict[str, Tensor],
    header: Header,
    device: torch.device,
) -> dict[str, tuple[nn.Module, str]]:
    """The layers of `model` that are quantized in the file, by the key of their weight, and how
    they call it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[str, tuple[nn.Module, str]] = {}
    for key, one in header.weights.items():
        owner, _, name = key.rpartition(".")
        layer = modules.get(owner)
        kind = None if layer is None else kind_of(layer)
        if layer is None or kind is None or name not in kind.weight_names(layer):
            raise ValueError(
                f"{key!r} is quantized in the file, but in the model it is not the weight of "
                f"a layer of a kind that can be quantized, such as a torch.nn.Linear"
            )
        if kind.transposed != one.transposed:
            places = ("file", "model") if one.transposed else ("model", "file")
            raise ValueError(
                f"{key!r} is [in, out] in the {places[0]} and [out, in] in the {places[1]}: give "
                "quantize_checkpoint the model"
            )
        source = header.source(key)
        if source not in header.weights:
            raise ValueError(f"{key!r} shares {source!r}, which is not quantized in the file")
        if one.format.layout != header.weights[source].format.layout:
            raise ValueError(f"{key!r} shares {source!r}, which is quantized to another format")
        where = device if own[key].is_meta else own[key].device
        rows, depth = own[key].shape[::-1] if one.transposed else own[key].shape
        packing = "" if kind.multiplies else "rows"
        if refusal := device_refusal(where, one.format, depth, packing):
            raise ValueError(f"{key!r}: {refusal}; move the model to 'cpu'")
        _check_parts(source, stored, one, (rows, depth))
        layers[key] = layer, name
    return layers


def _check_parts(
    key: str, stored: dict[str, Tensor], one: StoredWeight, shape: tuple[int, int]
) -> None:
    """Raise unless the parts of the quantized weight `key` are what its format says."""
    for part, (dtype, expected) in one.format.stored(shape).items():
        name = part_key(key, part)
        _check_tensor(name, stored[name], torch.Size(expected), getattr(torch, dtype))
    for part in ("scale", "input_scale"):
        scale = stored.get(part_key(key, part))
        if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
            raise ValueError(f"{part_key(key, part)!r} must be positive and finite")
    zero_point = stored.get(part_key(key, "zero_point"))
    if one.format.zero_points and zero_point is not None:
        if zero_point.dtype is torch.float32 and not bool(zero_point.isfinite().all()):
            raise ValueError(f"{part_key(key, 'zero_point')!r} must be finite")
        if zero_point.dtype is torch.uint8 and bool((zero_point > 15).any()):
            raise ValueError(f"{part_key(key, 'zero_point')!r} must lie between 0 and 15")


def _match_tensors(own: dict[str, Any], plain: dict[str, Tensor], header: Header) -> None:
    """Raise unless each tensor of `plain` can be copied into the model's tensor of that key."""
    source_of: dict[Any, str] = {}
    for key, tensor in plain.items():
        target = own[key]
        if isinstance(target, QuantizedWeight):
            raise ValueError(f"{key!r} is quantized in the model but not in the file")
        if not isinstance(target, Tensor):
            raise ValueError(f"{key!r} is a {type(target).__name__} in the model, not a tensor")
        _check_tensor(key, tensor, target.shape, tensor.dtype if target.is_meta else target.dtype)
        source = header.source(key)
        other = source_of.setdefault(_identity(target), source)
        if other != source:
            raise ValueError(f"{key!r} and {other!r} are one tensor in the model, two in the file")


def _check_tensor(key: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{key!r} is {tensor.dtype} {list(tensor.shape)} in the file, "
            f"expected {dtype} {list(shape)}"
        )


def _identity(tensor: Tensor) -> Any:
    """Equal for two tensors if and only if they are the same memory, read in the same way."""
    if isinstance(tensor, QuantizedWeight):
        return tensor.scale.data_ptr()
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
