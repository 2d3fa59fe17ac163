"""`QuantizedWeight`: the int8 weight of a linear layer, as a tensor that a module can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics import quantize
from lowbit.packing import panels_and_sums
from lowbit.torch.custom_ops import PANEL_COLUMNS, dequantize_weight, unpack_values

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

aten = torch.ops.aten


class QuantizedWeight(Tensor):
    """An int8 weight [out_features, in_features] with one float32 scale per output channel.

    To PyTorch it has the shape and dtype of the float weight that it stands for. What it holds
    is the form that the kernels read, and nothing else:

        panels       uint8 [ceil(out / 16), ceil(in / 64) * 16, 64], the packed values
        column_sums  int32 [ceil(out / 16) * 16], the sum of each output channel's values
        scale        float32 [ceil(out / 16) * 16], zero beyond out_features

    `int_values()`, `scales()` and `dequantize()` give it back in plain layout. It can be
    detached, cloned, copied, pickled, moved to shared memory and cast between floating dtypes
    (which changes the dtype it shows, not what it holds). Any other operation on it raises
    NotImplementedError: call the layer, or compute with `dequantize()`.
    """

    panels: Tensor
    column_sums: Tensor
    scale: Tensor

    _fields = ("panels", "column_sums", "scale")

    @staticmethod
    def __new__(
        cls,
        panels: Tensor,
        column_sums: Tensor,
        scale: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, strides=(shape[1], 1), dtype=dtype, device=panels.device
        )

    def __init__(
        self,
        panels: Tensor,
        column_sums: Tensor,
        scale: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.panels = panels
        self.column_sums = column_sums
        self.scale = scale

    @classmethod
    def from_float(cls, weight: Tensor) -> QuantizedWeight:
        """Quantize a float weight [out, in]: symmetric, one scale per output channel.

        Raises TypeError for a dtype other than float32, bfloat16 or float16, ValueError for a
        weight that is not a matrix on the CPU or holds NaN or infinity.
        """
        check_float_weight(weight)
        quantized = quantize(weight.detach().to(torch.float32).numpy(), "int8", axis=0)
        return cls.from_values(
            torch.from_numpy(quantized.values),
            torch.from_numpy(quantized.scale.reshape(-1)),
            weight.dtype,
        )

    @classmethod
    def from_values(
        cls, values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
    ) -> QuantizedWeight:
        """Pack int8 `values` [out, in] and their float32 `scale` [out]; dtype is what it shows."""
        panels, sums = panels_and_sums(values.numpy().T)
        padded = torch.zeros(scale.numel() + -scale.numel() % PANEL_COLUMNS)
        padded[: scale.numel()] = scale
        return cls(
            torch.from_numpy(panels),
            torch.from_numpy(sums),
            padded,
            tuple(values.shape),
            dtype,
        )

    def int_values(self) -> Tensor:
        """The quantized values, int8 [out, in], in memory of their own."""
        return unpack_values(self.panels, self.shape[1], self.shape[0])

    def scales(self) -> Tensor:
        """The scale of each output channel, float32 [out]."""
        return self.scale[: self.shape[0]]

    def dequantize(self) -> Tensor:
        """The float weight [out, in] that this stands for, in the dtype that this shows."""
        out_features, in_features = self.shape
        return dequantize_weight(self.panels, self.scale, in_features, out_features).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"QuantizedWeight(int8 {list(self.shape)}, one scale per row, shown as "
            f"{str(self.dtype).removeprefix('torch.')}, requires_grad={self.requires_grad})"
        )

    def share_memory_(self) -> QuantizedWeight:
        """Move what this holds to shared memory, as `Tensor.share_memory_` does."""
        for name in self._fields:
            getattr(self, name).share_memory_()
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.Size, torch.dtype]]:
        return list(self._fields), (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: tuple[torch.Size, torch.dtype],
        outer_size: Any,
        outer_stride: Any,
    ) -> QuantizedWeight:
        shape, dtype = context
        return cls(inner["panels"], inner["column_sums"], inner["scale"], shape, dtype)

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
    panels, column_sums, scale = (fn(getattr(weight, name)) for name in weight._fields)
    return QuantizedWeight(panels, column_sums, scale, weight.shape, dtype)


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
    if not isinstance(source, QuantizedWeight):
        source = QuantizedWeight.from_float(source)
    for name in target._fields:
        getattr(target, name).copy_(getattr(source, name))
    return target


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
}

# Lets torch.load(..., weights_only=True) read a pickled state_dict that holds such weights.
torch.serialization.add_safe_globals([QuantizedWeight])
