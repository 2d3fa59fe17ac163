"""`QuantizedWeight`: the integer weight of a linear layer, as a tensor that a module can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lowbit.numerics import QTensor
from lowbit.torch.arguments import FLOATS
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.panels import Panels
from lowbit.weights.tiles import Tiles

PACKINGS = {"panels": Panels(), "tiles": Tiles()}
PACKING_OF = {"cpu": "panels", "cuda": "tiles"}
"""By type of device: how its kernels take a weight."""

aten = torch.ops.aten


def device_refusal(device: torch.device, format: WeightFormat, in_features: int) -> str | None:
    """Why such a weight cannot be on a device; None if it can."""
    name = PACKING_OF.get(device.type)
    if name is None:
        known = " and ".join(map(repr, PACKING_OF))
        return f"quantized layers run on {known}, so they cannot be moved to {str(device)!r}"
    if refusal := PACKINGS[name].refusal(format, in_features):
        return f"a weight of {format} cannot be on {str(device)!r}: {refusal}"
    return None


class QuantizedWeight(Tensor):
    """A weight [out_features, in_features] of integers, and their scales, as `format` says.

    To PyTorch it has the shape and dtype of the float weight that it stands for. What it holds are
    the `parts` of a `packing`, as the kernels of its device take them, and nothing else: on a CPU
    those of `lowbit.weights.panels`, on a GPU those of `lowbit.weights.tiles`. Moving it to another
    device packs it anew.

    `quantized()`, `int_values()`, `scales()` and `dequantize()` give it back in plain layout. It
    can be detached, cloned, copied, pickled, moved to shared memory and to devices whose kernels
    take its format, and cast between floating dtypes (which changes the dtype it shows, not what
    it holds). Any other operation on it raises NotImplementedError: call the layer, or compute
    with `dequantize()`.
    """

    format: WeightFormat
    packing: str  # its name
    group_size: int  # of the packing
    out_features: int
    in_features: int
    scale: Tensor
    panels: Tensor  # these of the one packing,
    column_sums: Tensor
    zero_points: Tensor | None
    tiles: Tensor  # and these of the other
    row_scale: Tensor
    zero: Tensor | None
    row_zero: Tensor | None

    @staticmethod
    def __new__(
        cls,
        parts: dict[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        format: WeightFormat,
        packing: str,
    ) -> QuantizedWeight:
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, strides=(shape[1], 1), dtype=dtype, device=parts["scale"].device
        )
        for name in PACKINGS[packing].parts:
            setattr(self, name, parts.get(name))
        self.format = format
        self.packing = packing
        # Plain numbers: to ask a tensor of a class of its own for its shape takes microseconds.
        self.out_features, self.in_features = shape
        self.group_size = PACKINGS[packing].group_size(format, shape[1])
        return self

    @classmethod
    def from_float(cls, weight: Tensor, format: WeightFormat = INT8) -> QuantizedWeight:
        """Quantize a float weight [out, in].

        Raises TypeError for a dtype other than float32, bfloat16 or float16, ValueError for a
        weight that is not a matrix, holds NaN or infinity, or is on a device whose kernels do not
        take the format.
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
        if refusal := device_refusal(weight.device, format, weight.shape[1]):
            raise ValueError(f"{refusal}; leave it out with filter_fn, or move the model")
        quantized = format.quantize(weight.detach().to("cpu", torch.float32).numpy())
        return cls.of(quantized, format, weight.dtype, weight.device)

    @classmethod
    def of(
        cls, quantized: QTensor, format: WeightFormat, dtype: torch.dtype, device: torch.device
    ) -> QuantizedWeight:
        """Pack a weight [out, in] of this format for a device; `dtype` is what it shows."""
        packing = PACKING_OF[device.type]
        arrays = PACKINGS[packing].pack(quantized)
        # Copies, since the arrays of a PackedMatrix must never change.
        parts = {name: torch.tensor(array).to(device) for name, array in arrays.items()}
        return cls(parts, quantized.shape, dtype, format, packing)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that this holds, by name."""
        parts = {name: getattr(self, name) for name in PACKINGS[self.packing].parts}
        return {name: part for name, part in parts.items() if part is not None}

    def quantized(self) -> QTensor:
        """The integers, scales and zero points [out, in], in memory of their own."""
        arrays = {name: part.detach().cpu().numpy() for name, part in self.parts.items()}
        rows, depth = self.shape
        return PACKINGS[self.packing].unpack(arrays, self.format, (rows, depth))

    def int_values(self) -> Tensor:
        """The quantized values, int8 or uint8 [out, in]."""
        return torch.from_numpy(self.quantized().values).contiguous()

    def scales(self) -> Tensor:
        """The scales, float32: of int8 [out], of 4-bit integers [out, groups]."""
        return torch.from_numpy(self.quantized().scale).contiguous()

    def dequantize(self) -> Tensor:
        """The float weight [out, in] that this stands for, in the dtype that this shows."""
        values = torch.from_numpy(self.quantized().dequantize()).contiguous()
        return values.to(self.device, self.dtype)

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

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.parts), (self.shape, self.dtype, self.format, self.packing)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedWeight:
        return cls(inner, *context)

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
        operation = _OPERATIONS.get(func)
        if operation is None:
            # In inference mode, what consists of others (`to`) comes here whole.
            parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            raise NotImplementedError(
                f"{func} is not defined on a QuantizedWeight; "
                f"call the layer that holds it, or compute with weight.dequantize()"
            )
        return operation(*args, **(kwargs or {}))


def _mapped(
    fn: Callable[[Tensor], Tensor],
    weight: QuantizedWeight,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> QuantizedWeight:
    parts = {name: fn(part) for name, part in weight.parts.items()}
    shown = dtype or weight.dtype
    return QuantizedWeight(parts, weight.shape, shown, weight.format, weight.packing)


def _to_copy(
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **layout: Any,
) -> QuantizedWeight:
    dtype = dtype or weight.dtype
    if dtype not in FLOATS:
        raise TypeError(
            f"a quantized weight can be shown as float32, bfloat16 or float16, not as {dtype}"
        )
    there = weight.device if device is None else torch.device(device)
    if refusal := device_refusal(there, weight.format, weight.shape[1]):
        raise NotImplementedError(f"{refusal}; keep the model where it is")
    if PACKING_OF[there.type] == weight.packing:
        return _mapped(lambda part: part.to(there, copy=True), weight, dtype)
    return QuantizedWeight.of(weight.quantized(), weight.format, dtype, there)


def _copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`, which is how load_state_dict works, where either is quantized."""
    if target.shape != source.shape:
        raise ValueError(
            f"cannot copy a weight of shape {list(source.shape)} into one of {list(target.shape)}"
        )
    if not isinstance(target, QuantizedWeight):
        assert isinstance(source, QuantizedWeight)  # or this would not have been dispatched here
        return target.copy_(source.dequantize())
    if isinstance(source, QuantizedWeight) and source.format.layout != target.format.layout:
        source = source.dequantize()
    if not isinstance(source, QuantizedWeight):
        source = QuantizedWeight.from_float(source.to(target.device), target.format)
    if source.packing != target.packing:
        source = QuantizedWeight.of(source.quantized(), source.format, source.dtype, target.device)
    for ours, theirs in zip(target.parts.values(), source.parts.values(), strict=True):
        ours.copy_(theirs)
        increment_version(ours)  # which is not done here, below autograd; proofs go by it
    return target


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: partial(_mapped, torch.detach),
    aten.alias.default: partial(_mapped, torch.detach),
    aten.clone.default: partial(_mapped, torch.clone),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
}

# Lets torch.load(..., weights_only=True) read a pickled state_dict that holds such weights.
torch.serialization.add_safe_globals([QuantizedWeight, WeightFormat])
