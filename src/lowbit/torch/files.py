"""Save and load models as safetensors files. Nothing is pickled or unpickled.

A file holds the model's state_dict. Of a quantized layer NAME it holds

                             8 bits             4 bits
    NAME.weight              int8 [out, in]     uint8 [out, ceil(in / 2)], the first of two low
    NAME.weight.scale        float32 [out]      float32 [out, groups]
    NAME.weight.zero_point                      uint8 [out, groups], unless it is symmetric

Its metadata are

    format          "lowbit.torch"
    format_version  "3"; files of "1" and "2", which had no digests, are read as well
    header_sha256, data_sha256      see lowbit.weights.tensor_file
    layers          JSON: the name of each quantized layer and its configuration
    shared          JSON: keys whose tensor is stored under another key, and that key
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowbit.torch.config import QuantizeConfig, config_from_json
from lowbit.torch.linear import QuantizedLinear, become_quantized
from lowbit.torch.quantize import is_plain_linear
from lowbit.torch.weight import QuantizedWeight, device_refusal
from lowbit.weights.format import WeightFormat
from lowbit.weights.tensor_file import DTYPES, StoredTensor, TensorFile

FILE = TensorFile("lowbit.torch", "model of lowbit.torch.save", "3", older=("1", "2"))
_DTYPES = {code: found for code, n in DTYPES.items() if (found := getattr(torch, n, None))}
_CODES = {dtype: name for name, dtype in _DTYPES.items()}

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class _Header:
    configs: dict[str, QuantizeConfig]  # by the key of the layer's weight
    shared: dict[str, str]

    def source(self, key: str) -> str:
        """The key under which a key's tensor is stored."""
        return self.shared.get(key, key)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of `model`, quantized or not, to the safetensors file `path`.

    The file appears complete or not at all; an older one is replaced. Tensors that share their
    memory are stored once. TypeError if the state_dict holds something that is not a tensor, or a
    tensor that such a file cannot hold. OSError if the file cannot be written.
    """
    configs = {
        _weight_key(name): module.config
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantizedLinear)
    }
    tensors: dict[str, StoredTensor] = {}
    shared: dict[str, str] = {}
    first_key: dict[Any, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{key!r} in the state_dict is a {type(value).__name__}; only tensors can be saved"
            )
        original = first_key.setdefault(_identity(value), key)
        if original != key:
            shared[key] = original
        elif isinstance(value, QuantizedWeight):
            for part, array in value.format.to_stored(value.quantized()).items():
                tensors[_part_key(key, part)] = StoredTensor.of(array)
        else:
            tensors[key] = _stored(key, value)
    metadata = {
        "layers": json.dumps({key: json.loads(c.to_json()) for key, c in configs.items()}),
        "shared": json.dumps(shared),
    }
    FILE.write(path, metadata, tensors)


def _stored(key: str, tensor: Tensor) -> StoredTensor:
    if tensor.dtype not in _CODES or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(
            f"{key!r} in the state_dict is a {tensor.layout} tensor of {tensor.dtype} on "
            f"{str(tensor.device)!r}, which a safetensors file cannot hold"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(_CODES[tensor.dtype], tuple(tensor.shape), data)


def _tensor(key: str, stored: StoredTensor) -> Tensor:
    if stored.dtype not in _DTYPES:
        raise ValueError(f"{key!r} is of {stored.dtype}, which this PyTorch lacks")
    return torch.from_numpy(stored.data).view(_DTYPES[stored.dtype]).reshape(stored.shape)


def load(model: Model, path: str | os.PathLike[str], *, verify: bool = True) -> Model:
    """Load what `save` wrote into `model`, in place, and return it.

    `model` has the same architecture and is float, as its class makes it, or quantized already.
    The layers that are quantized in the file become quantized in the model. The whole file is
    checked before the model is touched, with `verify` also its digest: ValueError for a file that
    is truncated, damaged, not of this format or of another version, and for keys, shapes or dtypes
    that do not match the model. FileNotFoundError if there is none.
    """
    # In memory that may be written, since PyTorch knows no other.
    metadata, tensors = FILE.read(path, verify=verify, writable=True)
    header = _read_header(metadata, path)
    own = model.state_dict(keep_vars=True)
    try:
        stored = {key: _tensor(key, tensor) for key, tensor in tensors.items()}
        _check_keys(own, stored, header)
        layers = _match_layers(model, own, stored, header)
        plain = {key: stored[header.source(key)] for key in own if key not in layers}
        _match_tensors(own, plain, header)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} does not fit this model: {error}") from None
    # Everything that can fail comes before the first change.
    weights: dict[str, nn.Parameter] = {}
    for key, layer in layers.items():
        source = header.source(key)
        if source not in weights:
            form, shape = header.configs[source].weight_format, own[key].shape
            arrays = {part: stored[_part_key(source, part)].numpy() for part in form.parts}
            quantized = form.from_stored(arrays, shape)
            own_weight = layer.weight
            weight = QuantizedWeight.of(quantized, form, own_weight.dtype, own_weight.device)
            weights[source] = nn.Parameter(weight, requires_grad=False)
    for key, layer in layers.items():
        become_quantized(layer, weights[header.source(key)], header.configs[key])
    with torch.no_grad():
        for key, tensor in plain.items():
            own[key].copy_(tensor)
    return model


def _read_header(metadata: dict[str, str], path: str | os.PathLike[str]) -> _Header:
    try:
        layers, shared = json.loads(metadata["layers"]), json.loads(metadata["shared"])
        configs = {key: config_from_json(json.dumps(config)) for key, config in layers.items()}
        if not all(isinstance(key, str) for key in shared.values()):
            raise TypeError("'shared' does not map keys to keys")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} has damaged metadata: {error!r}") from None
    return _Header(configs, shared)


def _check_keys(own: dict[str, Any], stored: dict[str, Tensor], header: _Header) -> None:
    """Raise unless the file says something about each key of the model, and of no other."""
    sources = {key for key in header.configs if key not in header.shared}
    parts = {
        _part_key(key, part) for key in sources for part in header.configs[key].weight_format.parts
    }
    content = (stored.keys() - (parts - sources)) | header.shared.keys()
    problems = []
    if missing := own.keys() - content:
        problems.append(f"missing in the file: {_some(missing)}")
    if unexpected := content - own.keys():
        problems.append(f"not in the model: {_some(unexpected)}")
    referred = parts | set(header.shared.values())
    if dangling := referred - stored.keys():
        problems.append(f"referred to in the file but not stored: {_some(dangling)}")
    if problems:
        raise ValueError("; ".join(problems))


def _match_layers(
    model: nn.Module, own: dict[str, Any], stored: dict[str, Tensor], header: _Header
) -> dict[str, nn.Linear]:
    """The layers of `model` that are quantized in the file, by the key of their weight."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[str, nn.Linear] = {}
    for key in header.configs:
        layer = modules.get(key.removesuffix("weight").removesuffix("."))
        if layer is None or not (is_plain_linear(layer) or isinstance(layer, QuantizedLinear)):
            raise ValueError(
                f"{key!r} is quantized in the file, but in the model it is not the weight of "
                f"a torch.nn.Linear"
            )
        assert isinstance(layer, nn.Linear)
        source = header.source(key)
        if source not in header.configs:
            raise ValueError(f"{key!r} shares {source!r}, which is not quantized in the file")
        form = header.configs[key].weight_format
        if form.layout != header.configs[source].weight_format.layout:
            raise ValueError(f"{key!r} shares {source!r}, which is quantized to another format")
        if refusal := device_refusal(layer.weight.device, form, layer.in_features):
            raise ValueError(f"{key!r}: {refusal}; move the model to 'cpu'")
        _check_parts(source, stored, form, own[key].shape)
        layers[key] = layer
    return layers


def _check_parts(
    key: str, stored: dict[str, Tensor], form: WeightFormat, shape: tuple[int, int]
) -> None:
    """Raise unless the parts of the quantized weight `key` are what `form` says."""
    for part, (dtype, expected) in form.stored(shape).items():
        name = _part_key(key, part)
        _check_tensor(name, stored[name], torch.Size(expected), getattr(torch, dtype))
    scale = stored[_part_key(key, "scale")]
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"{_part_key(key, 'scale')!r} must be positive and finite")
    zero_point = stored.get(_part_key(key, "zero_point"))
    if form.zero_points and zero_point is not None and bool((zero_point > 15).any()):
        raise ValueError(f"{_part_key(key, 'zero_point')!r} must lie between 0 and 15")


def _match_tensors(own: dict[str, Any], plain: dict[str, Tensor], header: _Header) -> None:
    """Raise unless each tensor of `plain` can be copied into the model's tensor of that key."""
    source_of: dict[Any, str] = {}
    for key, tensor in plain.items():
        target = own[key]
        if isinstance(target, QuantizedWeight):
            raise ValueError(f"{key!r} is quantized in the model but not in the file")
        if not isinstance(target, Tensor):
            raise ValueError(f"{key!r} is a {type(target).__name__} in the model, not a tensor")
        if target.is_meta:
            raise ValueError(f"{key!r} is on 'meta'; give the model memory first (to_empty)")
        _check_tensor(key, tensor, target.shape, target.dtype)
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


def _weight_key(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _part_key(weight_key: str, part: str) -> str:
    # Cannot clash: a module cannot have a parameter and a submodule, both called "weight".
    return weight_key if part == "values" else f"{weight_key}.{part}"


def _some(keys: Iterable[str], most: int = 5) -> str:
    ordered = sorted(keys)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(map(repr, ordered[:most])) + more
