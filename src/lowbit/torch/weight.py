"""`QuantizedWeight`: the integer weight of a layer, as a tensor that a module can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowbit.numerics import QTensor, methods
from lowbit.torch.arguments import FLOATS
from lowbit.torch.config import QuantizeConfig, configurations
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.packings import Bytes, Panels, Rows, Tiles

PACKINGS = {"panels": Panels(), "tiles": Tiles(), "bytes": Bytes(), "rows": Rows()}
_PART_NAMES = ("input_scale", *{part for one in PACKINGS.values() for part in one.parts})
PACKING_OF = {"cpu": "panels", "cuda": "tiles"}
"""By type of device: how its kernels take a weight that float activations are multiplied by."""


def packing_of(device: torch.device, format: WeightFormat, activations: str) -> str:
    """How the kernels of a device take a weight; KeyError if it has none."""
    name = PACKING_OF[device.type]
    return "bytes" if name == "tiles" and activations != "float" and not format.four_bits else name


SAVE = (
    "quantized weights have no memory of their own that other programs could write to a file: "
    "call lowbit.torch.save(model, path) in place of save_pretrained, SentenceTransformer.save or "
    "safetensors.torch.save_model; or, for save_pretrained of a model of transformers, "
    "lowbit.torch.transformers.prepare_save(model) before"
)


def device_refusal(
    device: torch.device,
    format: WeightFormat,
    in_features: int,
    packing: str = "",
    activations: str = "float",
) -> str | None:
    """Why such a weight cannot be on a device, in the usual packing or in "rows", or has no kernel
    there that multiplies such activations by it; or None."""
    if packing == "rows" and device.type in PACKING_OF:
        return None
    if device.type not in PACKING_OF:
        known = " and ".join(map(repr, PACKING_OF))
        return f"quantized layers run on {known}, so they cannot be moved to {str(device)!r}"
    name = packing_of(device, format, activations)
    refusal = PACKINGS[name].refusal(format, in_features)
    return f"a weight of {format} cannot be on {str(device)!r}: {refusal}" if refusal else None


class Facts(NamedTuple):
    """What a QuantizedWeight is, but for its numbers. `packing` is its name; `transposed`: whether
    it shows itself as [in, out]."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    format: WeightFormat
    packing: str
    config: QuantizeConfig | None = None
    transposed: bool = False

    @property
    def activations(self) -> str:
        """What products with it do to theirs."""
        by_format = "float" if self.format.four_bits else "dynamic"
        return self.config.activations if self.config else by_format

    @property
    def shown(self) -> tuple[int, int]:
        """The shape that PyTorch sees."""
        if self.transposed:
            return self.in_features, self.out_features
        return self.out_features, self.in_features


class QuantizedWeight(Tensor):
    """A weight [out_features, in_features] of integers, and their scales, as `format` says.

    To PyTorch it has the shape and dtype of the float weight that it stands for; of layers that
    hold theirs as [in, out], that shape. What it holds are the `parts` of a `packing`, as what uses
    it takes them, and nothing else (see `lowbit.weights.packings`): kernels on a CPU take panels,
    on a GPU tiles, embeddings rows. Moving it to another device packs it anew.

    `quantized()`, `int_values()`, `scales()` and `dequantize()` give it back in plain layout;
    `nbytes` are the bytes held. It can be detached, cloned, copied, pickled, moved to shared memory
    and to devices whose kernels take its format, and cast between floating dtypes (which changes
    the dtype it shows, not what it holds). Products with it, `F.linear(x, weight)` for one, are
    those of its layer; F.embedding and slices of its rows work on the integers; other functions
    compute with `dequantize()`. What would change it, or show a part of its memory, raises
    NotImplementedError.
    """

    facts: Facts
    key: str  # how a model calls it, if it is in one
    format: WeightFormat
    packing: str
    config: QuantizeConfig | None  # that it was quantized with
    activations: str  # what products with it do to theirs
    group_size: int  # of the packing
    out_features: int
    in_features: int
    input_scale: Tensor | None  # inputs are divided by it
    scale: Tensor
    panels: Tensor  # these of one packing,
    column_sums: Tensor
    zero_points: Tensor | None
    tiles: Tensor  # these of another,
    words: Tensor
    zero: Tensor | None
    integers: Tensor  # and these of the others
    sums: Tensor
    zero_point: Tensor | None

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], facts: Facts) -> QuantizedWeight:
        strides = (1, facts.in_features) if facts.transposed else (facts.in_features, 1)
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, facts.shown, strides=strides, dtype=facts.dtype, device=parts["scale"].device
        )
        # All names in all weights: torch.export takes the first one's for everyone's.
        for name in _PART_NAMES:
            setattr(self, name, parts.get(name))
        self.facts = facts
        self.key = ""
        # Plain attributes: to ask a tensor of a class of its own for its shape takes microseconds.
        self.format, self.packing, self.config = facts.format, facts.packing, facts.config
        self.out_features, self.in_features = facts.out_features, facts.in_features
        self.group_size = PACKINGS[facts.packing].group_size(facts.format, facts.in_features)
        self.activations = facts.activations
        return self

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        format: WeightFormat = INT8,
        packing: str | None = None,
        seen: methods.Activations | None = None,
        config: QuantizeConfig | None = None,
        transposed: bool = False,
    ) -> QuantizedWeight:
        """Quantize a float weight [out, in]; [in, out], if `transposed`.

        packing: that of the weight's device, if not given. seen: the inputs of its layer, for
        formats that need them. Raises TypeError for a dtype other than float32, bfloat16 or
        float16, ValueError for a weight that is not a matrix, holds NaN or infinity, or is on a
        device whose kernels do not take the format.
        """
        if weight.dtype not in FLOATS:
            raise TypeError(
                f"expected a float32, bfloat16 or float16 weight, got {weight.dtype}; "
                f"convert the model with .float()"
            )
        if weight.dim() != 2:
            raise ValueError(f"expected a weight of shape [out, in], got {list(weight.shape)}")
        if weight.is_meta:
            raise ValueError("the weight is on 'meta'; load the model's weights first")
        rows = weight.detach().T if transposed else weight.detach()
        kind = config.activations if config else "float"
        refusal = device_refusal(weight.device, format, rows.shape[1], "", kind)
        if packing is None and refusal:
            raise ValueError(f"{refusal}; leave it out with filter_fn, or move the model")
        found = format.quantize(rows.to("cpu", torch.float32).contiguous().numpy(), seen)
        packing = packing or packing_of(weight.device, format, kind)
        facts = Facts(
            rows.shape[0], rows.shape[1], weight.dtype, format, packing, config, transposed
        )
        return cls.of(found, facts, weight.device)

    @classmethod
    def of(
        cls, quantized: methods.QuantizedWeight, facts: Facts, device: torch.device
    ) -> QuantizedWeight:
        """Pack a weight [out, in] that these are the facts of, on a device."""
        arrays = PACKINGS[facts.packing].pack(quantized)
        if quantized.input_scale is not None:
            arrays["input_scale"] = quantized.input_scale
        # Copies, since the arrays of a PackedMatrix must never change.
        parts = {name: torch.tensor(array).to(device) for name, array in arrays.items()}
        return cls(parts, facts)

    def with_parts(self, parts: dict[str, Tensor], **changed: Any) -> QuantizedWeight:
        """The same of other parts, with some facts changed."""
        made = QuantizedWeight(parts, self.facts._replace(**changed))
        made.key = self.key
        return made

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that this holds, by name."""
        names = (*PACKINGS[self.packing].parts, "input_scale")
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bytes held: of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def record(self) -> methods.QuantizedWeight:
        """All that there is to know of the weight [out, in], in memory of its own."""
        arrays = {name: part.detach().cpu().numpy() for name, part in self.parts.items()}
        factors = arrays.pop("input_scale", None)
        shape = self.out_features, self.in_features
        found = PACKINGS[self.packing].unpack(arrays, self.format, shape)
        copied = None if factors is None else factors.copy()
        return methods.QuantizedWeight(found.weight, found.zero_point, copied)

    def quantized(self) -> QTensor:
        """The integers [out, in], scales and nearest zero points, in memory of their own."""
        return self.record().weight

    def int_values(self) -> Tensor:
        """The quantized values, int8 or uint8 [out, in]."""
        return torch.from_numpy(self.quantized().values).contiguous()

    def scales(self) -> Tensor:
        """The scales, float32: of int8 [out], of 4-bit integers [out, groups]."""
        return torch.from_numpy(self.quantized().scale).contiguous()

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight but for `input_scale`, by an operator, which can be traced."""
        parts = [part for name, part in self.parts.items() if name != "input_scale"]
        return torch.ops.lowbit.embedding.default(
            indices, parts, self.packing, self.format.dtype, self.format.group_size,
            self.group_size, self.out_features, self.in_features, dtype,
        )  # fmt: skip

    def dequantize(self) -> Tensor:
        """The float weight that this stands for, in the shape and dtype that this shows."""
        if self.packing == "panels":  # by an operator, which can be traced
            parts = self.panels, self.column_sums, self.scale, self.zero_points
            values = torch.ops.lowbit.dequantize_weight.default(
                *parts, self.in_features, self.out_features, self.group_size
            )
        elif self.packing in ("rows", "bytes"):
            values = self.rows(torch.arange(self.out_features, device=self.device), torch.float32)
        else:
            values = torch.from_numpy(self.record().dequantize()).contiguous()
        if self.input_scale is not None and self.packing != "tiles":
            values = values / self.input_scale
        values = values.to(self.device, self.dtype)
        return values.T if self.facts.transposed else values

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"QuantizedWeight({list(self.shape)} of {self.format}, shown as "
            f"{str(self.dtype).removeprefix('torch.')}, requires_grad={self.requires_grad})"
        )

    def share_memory_(self) -> QuantizedWeight:
        """Move what this holds to shared memory, as `Tensor.share_memory_` does."""
        for part in self.parts.values():
            part.share_memory_()
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Facts]:
        return list(self.parts), self.facts

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], facts: Facts, outer_size: Any, outer_stride: Any
    ) -> QuantizedWeight:
        return cls(inner, facts)

    # An enabled __torch_function__ is also what tells nn.TransformerEncoderLayer to call its
    # layers instead of handing their weights to a fused float kernel.
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OF_MEMORY:
            raise NotImplementedError(SAVE)
        if (function := FUNCTIONS.get(func)) is not None:
            made = function(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        operation = OPERATIONS.get(func)
        if operation is not None:
            made = operation(*args, **named)
            if made is not NotImplemented:
                return made
        # In inference mode, what consists of others (`to`) comes here whole.
        elif (made := func.decompose(*args, **named)) is not NotImplemented:
            return made
        if _touches_memory(func):
            raise NotImplementedError(_outside(func, (*args, *named.values())))
        plain = pytree.tree_map_only(QuantizedWeight, QuantizedWeight.dequantize, (args, named))
        return func(*plain[0], **plain[1])


def _outside(func: Any, args: Sequence[Any]) -> str:
    """What to do about a use of a weight that is none of its layer's."""
    given = (one for one in pytree.tree_leaves(args) if isinstance(one, QuantizedWeight))
    key = next((one.key for one in given if one.key), "")
    layer = key.rpartition(".")[0]
    stays = f"lambda module, name: name != {layer!r}" if key else "..."
    return (
        f"{func} is not defined on a quantized weight{f', which {key!r} is' * bool(key)}: keep its "
        f"layer in float, quantize_(model, config, filter_fn={stays}), call the layer, or compute "
        "with weight.dequantize()"
    )


FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The same for PyTorch's functions, before they fall apart into operators of ATen."""

OPERATIONS: dict[Any, Callable[..., Any]] = {}
"""What is done without `dequantize()`, by ATen's operator; NotImplemented: these arguments, not."""

_OF_MEMORY = {Tensor.storage, Tensor.data_ptr}


def _touches_memory(func: Any) -> bool:
    """Whether an operator changes an argument, or gives a view of one."""
    schema = func._schema
    return any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))


# Lets torch.load(..., weights_only=True) read a pickled state_dict that holds such weights.
torch.serialization.add_safe_globals([QuantizedWeight, WeightFormat, Facts, *configurations])
