"""`QuantizedWeight`: the integer weight of a linear layer, as a tensor that a module can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics import unpack_nibbles
from lowbit.packed import PackedMatrix
from lowbit.torch.functional.linear import dequantize_weight
from lowbit.torch.weight_format import INT8, WeightFormat

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

aten = torch.ops.aten


class QuantizedWeight(Tensor):
    """A weight [out_features, in_features] of integers, and their scales, as `format` says.

    To PyTorch it has the shape and dtype of the float weight that it stands for. What it holds
    is the form that the kernels read, and nothing else (panels = ceil(out / 16)):

        panels       uint8 [panels, ceil(in / 64) * 16, 64], the packed values; of 4-bit integers
                     [panels, ceil(in / 64) * 8, 64]
        column_sums  the sum of each output channel: int32 [panels * 16] of its integers; float32
                     of its real values, if the integers have 4 bits
        scale        float32 [panels * 16], or [panels, groups, 16]; zero beyond out_features
        zero_points  int8 [panels, groups, 16], less 8; None if the format has none

    `int_values()`, `scales()` and `dequantize()` give it back in plain layout. It can be
    detached, cloned, copied, pickled, moved to shared memory and cast between floating dtypes
    (which changes the dtype it shows, not what it holds). Any other operation on it raises
    NotImplementedError: call the layer, or compute with `dequantize()`.
    """

    panels: Tensor
    column_sums: Tensor
    scale: Tensor
    # What is not in pickles from before there were other formats.
    zero_points: Tensor | None = None
    format: WeightFormat = INT8

    @staticmethod
    def __new__(
        cls,
        parts: dict[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        format: WeightFormat,
    ) -> QuantizedWeight:
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, strides=(shape[1], 1), dtype=dtype, device=parts["panels"].device
        )

    def __init__(
        self,
        parts: dict[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        format: WeightFormat,
    ) -> None:
        self.panels = parts["panels"]
        self.column_sums = parts["column_sums"]
        self.scale = parts["scale"]
        self.zero_points = parts.get("zero_points")
        self.format = format

    @classmethod
    def from_float(cls, weight: Tensor, format: WeightFormat = INT8) -> QuantizedWeight:
        """Quantize a float weight [out, in].

        Raises TypeError for a dtype other than float32, bfloat16 or float16, ValueError for a
        weight that is not a matrix on the CPU or holds NaN or infinity.
        """
        check_float_weight(weight)
        packed = format.quantize(weight.detach().to(torch.float32).numpy())
        return cls._of(packed, format, weight.dtype)

    @classmethod
    def from_stored(
        cls,
        parts: dict[str, Tensor],
        shape: Sequence[int],
        format: WeightFormat,
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedWeight:
        """Pack what `stored` gives, or a file; `dtype` is what the weight shows."""
        arrays = {name: part.numpy() for name, part in parts.items()}
        return cls._of(format.pack(arrays, shape[1]), format, dtype)

    @classmethod
    def _of(cls, packed: PackedMatrix, format: WeightFormat, dtype: torch.dtype) -> QuantizedWeight:
        arrays = {
            "panels": packed.panels,
            "column_sums": packed.column_sums,
            "scale": packed.scale,
            "zero_points": packed.zero_points,
        }
        # Copies, since the arrays of a PackedMatrix must never change.
        parts = {name: torch.tensor(part) for name, part in arrays.items() if part is not None}
        if format.zero_points and "zero_points" not in parts:  # all in the middle
            parts["zero_points"] = torch.zeros(parts["scale"].shape, dtype=torch.int8)
        return cls(parts, (packed.N, packed.K), dtype, format)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that this holds, by name."""
        parts = {"panels": self.panels, "column_sums": self.column_sums, "scale": self.scale}
        if self.zero_points is not None:
            parts["zero_points"] = self.zero_points
        return parts

    def stored(self) -> dict[str, Tensor]:
        """What `WeightFormat.stored` describes, in memory of its own."""
        out_features, in_features = self.shape
        parts = {name: part.numpy() for name, part in self.parts.items()}
        if parts["panels"].ctypes.data % 64:
            parts["panels"] = self.panels.clone().numpy()
        packed = PackedMatrix(
            **parts,
            K=in_features,
            N=out_features,
            dtype=self.format.integers,
            group_size=self.format.packed_group(in_features) or None,
        )
        arrays = self.format.unpack(packed)
        return {name: torch.from_numpy(part) for name, part in arrays.items()}

    def int_values(self) -> Tensor:
        """The quantized values, int8 or uint8 [out, in], in memory of their own."""
        values = self.stored()["values"]
        if not self.format.four_bits:
            return values
        length = self.shape[1]
        return torch.from_numpy(unpack_nibbles(values.numpy(), length, self.format.integers))

    def scales(self) -> Tensor:
        """The scales, float32: of int8 [out], of 4-bit integers [out, groups]."""
        return self.stored()["scale"]

    def dequantize(self) -> Tensor:
        """The float weight [out, in] that this stands for, in the dtype that this shows."""
        out_features, in_features = self.shape
        group = self.format.packed_group(in_features)
        values = dequantize_weight(
            self.panels, self.scale, self.zero_points, in_features, out_features, group
        )
        return values.to(self.dtype)

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

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.Size, torch.dtype, WeightFormat]]:
        return list(self.parts), (self.shape, self.dtype, self.format)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: tuple[torch.Size, torch.dtype, WeightFormat],
        outer_size: Any,
        outer_stride: Any,
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
            raise NotImplementedError(
                f"{func} is not defined on a QuantizedWeight; "
                f"call the layer that holds it, or compute with weight.dequantize()"
            )
        return operation(*args, **(kwargs or {}))


def check_float_weight(weight: Tensor) -> None:
    """Raise unless `weight` is a matrix in the CPU's memory, of a dtype that can be quantized."""
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(
            f"expected a float32, bfloat16 or float16 weight, got {weight.dtype}; "
            f"convert the model with .float()"
        )
    if weight.device.type != "cpu":
        raise ValueError(
            f"expected a weight on the CPU, got one on {str(weight.device)!r}; "
            + (
                "load the model's weights first"
                if weight.device.type == "meta"
                else "move the model with .cpu()"
            )
        )
    if weight.dim() != 2:
        raise ValueError(f"expected a weight of shape [out, in], got {list(weight.shape)}")


def _map(
    fn: Callable[[Tensor], Tensor], weight: QuantizedWeight, dtype: torch.dtype
) -> QuantizedWeight:
    parts = {name: fn(part) for name, part in weight.parts.items()}
    return QuantizedWeight(parts, weight.shape, dtype, weight.format)


def _detach(weight: QuantizedWeight) -> QuantizedWeight:
    return _map(torch.detach, weight, weight.dtype)


def _clone(weight: QuantizedWeight, memory_format: Any = None) -> QuantizedWeight:
    return _map(torch.clone, weight, weight.dtype)


def _to_copy(
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **layout: Any,
) -> QuantizedWeight:
    if device is not None and torch.device(device).type != "cpu":
        raise NotImplementedError(
            f"quantized layers run on the CPU, so they cannot be moved to {str(device)!r}; "
            f"move the float model before it is quantized, or keep the quantized one on the CPU"
        )
    dtype = dtype or weight.dtype
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(
            f"a quantized weight can be shown as float32, bfloat16 or float16, not as {dtype}"
        )
    return _map(torch.clone, weight, dtype)


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
        source = QuantizedWeight.from_float(source, target.format)
    for ours, theirs in zip(target.parts.values(), source.parts.values(), strict=True):
        ours.copy_(theirs)
    return target


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
}

# Lets torch.load(..., weights_only=True) read a pickled state_dict that holds such weights.
torch.serialization.add_safe_globals([QuantizedWeight, WeightFormat])
