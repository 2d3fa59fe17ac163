"""`LowbitConfig`: language models of transformers that are quantized while they are loaded.

    from lowbit.torch.transformers import LowbitConfig

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=LowbitConfig("w4a8"))
    model.save_pretrained(folder)

To import this module is what makes transformers know `quant_method` "lowbit". The folder holds each
quantized weight as lowbit.weights.folder says, and config.json this configuration.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# What is overridden is annotated by what it returns there, which is nothing.
from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from lowbit.registry.extras import require

require("lowbit.torch.transformers", "demo", "transformers")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.core_model_loading import ConversionOps, WeightConverter  # noqa: E402
from transformers.quantizers.auto import (  # noqa: E402
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from lowbit.numerics import methods  # noqa: E402
from lowbit.torch.config import (  # noqa: E402
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
)
from lowbit.torch.kinds import STAYS, QuantizedModule, become_quantized, kind_of  # noqa: E402
from lowbit.torch.plan import plan  # noqa: E402
from lowbit.torch.summary import some, summary  # noqa: E402
from lowbit.torch.weight import (  # noqa: E402
    Facts,
    QuantizedWeight,
    device_refusal,
    packing_of,
)
from lowbit.weights import folder  # noqa: E402
from lowbit.weights.format import WeightFormat  # noqa: E402
from lowbit.weights.tensor_file import read_tensors  # noqa: E402

_log = logging.getLogger(__name__)

SCHEMES: dict[str, type[QuantizeConfig]] = {
    "w4a8": Int4DynamicConfig,
    "w4a16": Int4WeightOnlyConfig,
    "w8a8": Int8DynamicConfig,
}
"""Bits of weights and of activations, where 16 are floats as they come."""

_DEFAULTS = {"group_size": 32, "embeddings": None}  # where they are not those of `quantize_`
_DEEP = 1 << 16  # inputs, more than a group has


class LowbitConfig(QuantizationConfigMixin):
    """What `from_pretrained(..., quantization_config=)` makes of the linear layers of a model.

    - scheme: "w4a8", "w4a16" or "w8a8": bits of weights and of activations; 8 of these are found
      for each token, 16 are floats as they come.
    - modules_to_not_convert: names of modules that stay in float, or their ends, or patterns, as in
      transformers' other configurations; None: the head, and what shares its weight.
    - options: fields of Int4DynamicConfig ("w4a8"), Int4WeightOnlyConfig ("w4a16") or
      Int8DynamicConfig ("w8a8"). Groups have 32 elements if `group_size` is left out, and
      embeddings stay in float unless `embeddings` is given.

    ValueError: an unknown scheme, or an option that is not one or has a wrong value.
    """

    def __init__(
        self,
        scheme: str = "w4a8",
        modules_to_not_convert: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        said = {key: options.pop(key, value) for key, value in folder.CONFIG.items()}
        if said != folder.CONFIG:
            raise ValueError(f"this lowbit reads folders of {folder.CONFIG}, got {said}")
        if scheme not in SCHEMES:
            known = ", ".join(map(repr, SCHEMES))
            raise ValueError(f"unknown scheme {scheme!r}; there are {known}")
        names = modules_to_not_convert
        if names is not None and (
            isinstance(names, str) or not all(isinstance(one, str) for one in names)
        ):
            raise TypeError(f"modules_to_not_convert must be a list of names, got {names!r}")
        kind = SCHEMES[scheme]
        known = [one.name for one in fields(kind)]
        if unknown := options.keys() - known:
            raise ValueError(
                f"{scheme!r} has no option {min(unknown)!r}; it has {', '.join(known)}, which are "
                f"those of {kind.__name__}"
            )
        own = {key: value for key, value in _DEFAULTS.items() if key in known}
        # Plain data, which transformers writes to config.json.
        self.quant_method = said["quant_method"]
        self.format_version = said["format_version"]
        self.scheme = scheme
        self.modules_to_not_convert = None if names is None else list(names)
        self.__dict__ |= asdict(kind(**{**own, **options}))

    @property
    def layers(self) -> QuantizeConfig:
        """The configuration of layers."""
        kind = SCHEMES[self.scheme]
        return kind(**{one.name: getattr(self, one.name) for one in fields(kind)})


class LowbitQuantizer(HfQuantizer):
    """What transformers asks while it loads and saves a model. Not constructed by users.

    wanted: of weights that are to be quantized, by name, format, packing and orientation. stored:
    names of those that the folder holds quantized, as the folder calls them.
    """

    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config.layers
        self.wanted: dict[str, tuple[WeightFormat, str | None, bool]] = {}
        self.stored: frozenset[str] = frozenset()

    # Of loading

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """ValueError: weights would be where no kernel takes them, or methods need data."""
        if not self.pre_quantized and self.config.weight_format.needs_activations:
            raise ValueError(
                f"method={self.config.weight_format.method!r} needs data: load the model in float, "
                "quantize_(model, config, calibration=batches), then prepare_save(model)"
            )
        places = device_map.values() if isinstance(device_map, dict) else ()
        if isinstance(device_map, str) and torch.cuda.is_available():  # "auto" and others like it
            places = ("cuda",)
        for place in places:
            if place == "disk":
                raise ValueError("quantized layers run from memory: device_map must not say 'disk'")
            device = torch.device("cuda" if isinstance(place, int) else place)
            format, activations = self.config.weight_format, self.config.activations
            if refusal := device_refusal(device, format, _DEEP, "", activations):
                raise ValueError(refusal)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            files = [one for one in checkpoint_files or () if str(one).endswith(".safetensors")]
            self.stored = frozenset(_quantized_in(files))
            if self.get_load_operations() and not hasattr(HfQuantizer, "serialized_names"):
                raise NotImplementedError("quantized experts are loaded by transformers >= 5.23")
            return
        names = self.quantization_config.modules_to_not_convert
        kept = self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
        if unknown := [one for one in names or () if not _names_some(model, one)]:
            _log.warning("modules_to_not_convert: no module is called %s", some(unknown))

        def taken(module: nn.Module, name: str) -> bool:
            return not isinstance(module, nn.MultiheadAttention) and should_convert_module(
                name, kept
            )

        for one, other in model.all_tied_weights_keys.items():  # which are not yet one
            owner, _, own = one.rpartition(".")
            if isinstance(held := model.get_parameter_or_buffer(other), nn.Parameter):
                model.get_submodule(owner).register_parameter(own, held)
        made = plan(model, self.config, taken)
        for name in made.stays:
            why = (
                "modules_to_not_convert"
                if not should_convert_module(name, kept)
                else made.stays[name]
            )
            setattr(model.get_submodule(name), STAYS, why)
        for shared in made.weights:
            own = shared.format, shared.packing, shared.transposed
            self.wanted |= {place.key: own for place in shared.places}
        for one, other in model.all_tied_weights_keys.items():
            if (one in self.wanted) != (other in self.wanted):
                raise ValueError(
                    f"{one} and {other} are one weight, of which {self.config!r} takes one side: "
                    "leave both out with modules_to_not_convert, or take both with embeddings=8"
                )
        if fused := list(_fused_experts(model)):
            _log.warning(
                "experts stay in float, since transformers holds them in parameters, not in "
                "layers: %s", some(fused),
            )  # fmt: skip

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter becomes integers."""
        return param_name in self.wanted or param_name in self.stored

    @property
    def quantized_element_size(self) -> float:
        """Bytes for each element of a quantized weight."""
        format = self.config.weight_format
        beside = 5 / format.group_size if format.group_size else 0
        return 0.5 + beside if format.four_bits else 1

    def get_quantize_ops(self) -> ConversionOps:
        """What quantizes a weight when it has been read."""
        return _Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        """In what a weight is stored."""
        return {"weight": list(folder.NAMES)} if self.pre_quantized else {}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """What makes floats of what is stored: of experts, which are fused."""
        experts = any(".experts." in one for one in self.stored)
        return {"dequantize": _Dequantize} if experts else {}

    def get_weight_conversions(self) -> list[Any]:
        """What makes a weight of what is stored."""
        if not self.pre_quantized:
            return []
        return [WeightConverter(list(folder.NAMES), "weight", [_Deserialize(self)])]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for module in model.modules():
            kind = kind_of(module)
            if kind is None or isinstance(module, QuantizedModule):
                continue
            for name in kind.weight_names(module):
                held: Any = module._parameters.get(name)
                if isinstance(held, QuantizedWeight):
                    become_quantized(module, {name: held}, held.config or self.config)  # type: ignore[dict-item]
        # `get_state_dict_and_metadata` is what writes the weights.
        known = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [one for one in known if not _is_own(one)]
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", summary(model))

    # Of saving

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of a folder; the metadata are transformers' own."""
        state: dict[str, Tensor] = {}
        known: set[int] = set()
        ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
        for name, value in sorted(
            model.state_dict(keep_vars=True).items(), key=lambda one: one[0] in ties
        ):
            if not isinstance(value, QuantizedWeight):
                state[name] = value.detach() if isinstance(value, Tensor) else value
            elif id(value) not in known:
                known.add(id(value))
                state |= _parts(name, value)
        return state, {}

    def is_serializable(self, **kwargs: Any) -> bool:
        """That it can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integers are not."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Layers are operators that torch.compile takes."""
        return True


class _Operation(ConversionOps):
    """What becomes of tensors when they have been read."""

    def __init__(self, hf_quantizer: LowbitQuantizer) -> None:
        self.hf_quantizer = hf_quantizer


class _Quantize(_Operation):
    """Makes a QuantizedWeight of a float tensor: the only float that is there at a time."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: self._converted(name, value) for name, value in input_dict.items()}

    def _converted(self, name: str, value: Any) -> Any:
        tensor = value[0] if isinstance(value, list) else value
        if name not in self.hf_quantizer.wanted:
            return tensor
        format, packing, transposed = self.hf_quantizer.wanted[name]
        config = self.hf_quantizer.config
        weight = QuantizedWeight.from_float(tensor, format, packing, None, config, transposed)
        return _parameter(name, weight)


class _Deserialize(_Operation):
    """Makes a QuantizedWeight of the tensors of a folder."""

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        model: Any,
        full_layer_name: str,
        **kwargs: Any,
    ) -> dict[str, Any]:
        record = _record({name: parts[0] for name, parts in input_dict.items()})
        layer = model.get_submodule(full_layer_name.rpartition(".")[0])
        kind = kind_of(layer)
        if kind is None:
            raise NotImplementedError(f"a quantized weight has no place in {type(layer).__name__}")
        tied = model.all_tied_weights_keys
        names = {full_layer_name, tied.get(full_layer_name, full_layer_name)}
        names |= {one for one, other in tied.items() if other in names}
        owners = (kind_of(model.get_submodule(one.rpartition(".")[0])) for one in names)
        multiplied = any(one is not None and one.multiplies for one in owners)
        config, format = _described(record, self.hf_quantizer.config, multiplied)
        device, shown = input_dict[folder.VALUES][0].device, layer.weight
        packing = packing_of(device, format, config.activations) if multiplied else "rows"
        rows, depth = record.weight.shape
        if refusal := device_refusal(device, format, depth, packing, config.activations):
            raise ValueError(refusal)
        facts = Facts(
            rows, depth, shown.dtype, format, packing, config, kind.transposed
        )  # fmt: skip
        if facts.shown != tuple(shown.shape):
            raise ValueError(f"the folder has {facts.shown}, the model {tuple(shown.shape)}")
        weight = QuantizedWeight.of(record, facts, device)
        return {full_layer_name: _parameter(full_layer_name, weight)}


class _Dequantize(_Operation):
    """Makes floats of the stored tensors of experts, before transformers fuses them."""

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any, **kwargs: Any
    ) -> dict[str, Any]:
        made: dict[str, list[Tensor]] = {}
        for pattern in [one for one in input_dict if one.endswith(f".{folder.VALUES}")]:
            stem = pattern.removesuffix(folder.VALUES)
            parts = {n: input_dict[stem + n] for n in folder.NAMES if stem + n in input_dict}
            each = [
                dict(zip(parts, some, strict=True)) for some in zip(*parts.values(), strict=True)
            ]
            # Under a pattern of the source, by which what follows goes.
            made[pattern] = [
                torch.from_numpy(_record(one).dequantize()).to(
                    one[folder.VALUES].device, model.dtype
                )
                for one in each
            ]
        return made


def prepare_save(model: Any) -> None:
    """Let `save_pretrained` write a model of transformers that `quantize_` has quantized: with a
    method that needs data, for one.

    ValueError: it has no quantized layer, or one of a configuration that is no scheme of
    LowbitConfig. What the layers are is taken from their weights.
    """
    found = [one.config for one in model.modules() if isinstance(one, QuantizedModule)]
    if not found:
        raise ValueError(f"this {type(model).__name__} has no layer that quantize_ has quantized")
    most = max(dict.fromkeys(found), key=found.count)
    names = [name for name, kind in SCHEMES.items() if type(most) is kind]
    if not names:
        raise ValueError(f"there is no scheme of {most!r}; there are {', '.join(SCHEMES)}")
    kept = [n for n, one in model.named_modules() if type(one) in (nn.Linear, nn.Embedding)]
    config = LowbitConfig(names[0], kept, **asdict(most))
    model.hf_quantizer = LowbitQuantizer(config, pre_quantized=True)
    model.hf_quantizer.postprocess_model(model)


def _parameter(name: str, weight: QuantizedWeight) -> nn.Parameter:
    weight.key = name
    return nn.Parameter(weight, requires_grad=False)


def _parts(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    stem, _, own = name.rpartition(".")
    if own != "weight":
        raise TypeError(f"{name} is quantized, and folders hold such weights of linear layers only")
    arrays = folder.to_tensors(weight.record())
    return {f"{stem}.{part}": torch.from_numpy(array) for part, array in arrays.items()}


def _record(parts: Mapping[str, Tensor]) -> methods.QuantizedWeight:
    names = {name.rpartition(".")[2]: one.detach().cpu().numpy() for name, one in parts.items()}
    return folder.from_tensors(names)


def _described(
    record: methods.QuantizedWeight, config: QuantizeConfig, multiplied: bool
) -> tuple[QuantizeConfig, WeightFormat]:
    """The configuration and the format of a stored weight: those of the folder where they fit."""
    q, depth = record.weight, record.weight.shape[1]
    four_bits, scaled = q.format.bits == 4, record.input_scale is not None
    size = min(q.group_size, depth) if q.group_size else None
    real = record.zero_point is not None
    own = config.weight_format if multiplied else config.embedding_format
    for format in (own, config.weight_format):
        if format is not None and (format.dtype, format.group_of(depth), *format.layout[2:]) == (
            q.format.name, size, real, scaled,
        ):  # fmt: skip
            return config, format
    if not four_bits:
        if size is not None:
            raise NotImplementedError(
                "8-bit weights in groups have no layer here; lowbit.lm.LanguageModel runs them"
            )
        config = Int8DynamicConfig(method="smoothquant" if scaled else "nearest")
        return config, config.weight_format
    kind = type(config) if isinstance(config, Int4WeightOnlyConfig) else Int4DynamicConfig
    method = "hqq" if real else "awq" if scaled else "nearest"
    whole = size if size is not None and size < depth else None
    config = replace(
        kind(), group_size=whole, symmetric_weight=q.format.signed, method=method, embeddings=4
    )
    return config, config.weight_format


def _quantized_in(files: Sequence[str]) -> Iterator[str]:
    """The names of weights that files hold quantized."""
    for file in files:
        for name in read_tensors(file):
            stem, _, part = name.rpartition(".")
            if part == folder.VALUES:
                yield f"{stem}.weight"


def _fused_experts(model: nn.Module) -> Iterator[str]:
    for name, one in model.named_parameters():
        if one.dim() == 3 and "experts" in name:
            yield name


def _names_some(model: nn.Module, pattern: str) -> bool:
    return not all(should_convert_module(name, [pattern]) for name, _ in model.named_modules())


def _is_own(conversion: Any) -> bool:
    return any(
        isinstance(one, _Deserialize | _Dequantize) for one in getattr(conversion, "operations", ())
    )


register_quantization_config("lowbit")(LowbitConfig)
register_quantizer("lowbit")(LowbitQuantizer)
