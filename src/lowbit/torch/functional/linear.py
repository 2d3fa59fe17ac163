"""The linear layer with a quantized weight, on either device: the one place that chooses.

On the CPU it is one operator over panels, `torch.ops.lowbit.linear`. Its derivative is added around
the call and not in the library, where it would cost every call some microseconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from lowbit.kernels.cpu.shared.panel_format import UNPROVEN, PanelFormat, SplitFormat
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choosing
from lowbit.kernels.triton.fast.tiles import TiledWeight
from lowbit.product import requests
from lowbit.product.dispatch import threads_key, wants_proof, wants_split
from lowbit.product.prepare import KEPT
from lowbit.product.prepared import Prepared
from lowbit.torch.arguments import FLOATS
from lowbit.torch.functional.eight_bits import (
    int4_dynamic_matmul,
    quantize_rows,
    scaled_matmul,
)
from lowbit.torch.functional.int4 import weight_only_matmul
from lowbit.torch.registration import register
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.packings import Panels, Tiles
from lowbit.weights.panels import NIBBLE_MASK
from lowbit.weights.repacking import Split, largest_pair_of, split

if TYPE_CHECKING:
    from lowbit.torch.weight import QuantizedWeight

# Panels are 16 columns wide and the kernels read scale and bias in whole panels.
PANEL_COLUMNS = 16

_ALIGNMENT = 64
_ZEROS = {torch.int8: "s8", torch.float32: "f32"}


class _Proof(NamedTuple):
    """What is known of weights of 8 bits beyond their format: see PanelFormat."""

    largest_pair: int = UNPROVEN
    split: SplitFormat | None = None


def linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, activations: str = "dynamic"
) -> Tensor:
    """x · weightᵀ + bias: [..., in_features] by [out_features, in_features].

    x: float32, bfloat16 or float16, any strides, on the weight's device; the result is
    [..., out_features] of its dtype. activations: what becomes of x, "dynamic" or "symmetric" for 8
    bits, found row by row, or "float", which takes a 4-bit weight. Differentiable in x and bias, as
    if the weight were `weight.dequantize()`.

    On CUDA those of 4-bit weights have no zero points either way, and few rows stay as they are
    (`int4_dynamic_matmul`).

    ValueError for a shape that does not match; TypeError for another dtype.
    """
    if weight.input_scale is not None:
        x = x / weight.input_scale.to(x.dtype)
    if torch._C._is_any_autocast_enabled():
        kind = weight.device.type
        if torch.is_autocast_enabled(kind) and x.dtype in FLOATS:
            x = x.to(torch.get_autocast_dtype(kind))
    if weight.packing != "panels":
        return _without_panels(x, weight, bias, activations)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        # A trace of torch.jit records operators, not Python's derivatives.
        call: Any = linear_op if torch._C._get_tracing_state() else _StraightThrough.apply
    else:
        call = linear_op
    return call(
        x,
        weight.panels,
        weight.column_sums,
        weight.scale,
        weight.zero_points,
        bias,
        weight.in_features,
        weight.out_features,
        weight.group_size,
        activations,
    )


def _without_panels(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activations: str
) -> Tensor:
    _check_activation(x, weight.in_features)
    if weight.packing == "rows":  # an embedding's
        whole = weight.dequantize().to(x.dtype)
        return torch.nn.functional.linear(x, whole, None if bias is None else bias.to(x.dtype))
    if weight.packing == "bytes":
        return _with_bytes(x, weight, bias, activations)
    tiled = TiledWeight(
        weight.tiles, weight.words, weight.scale, weight.zero, weight.out_features,
        weight.in_features, weight.group_size, 4 if weight.format.four_bits else 8,
    )  # fmt: skip
    multiply = weight_only_matmul if activations == "float" else int4_dynamic_matmul
    return multiply(x, tiled, bias)


def _with_bytes(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activations: str
) -> Tensor:
    """Rows of x become int8 on the way; derivatives are those of `weight.dequantize()`."""
    flat = x.detach().reshape(-1, weight.in_features)
    q, scale, zero = quantize_rows(flat, symmetric=activations == "symmetric")
    out = scaled_matmul(
        q, weight.integers, scale, weight.scale, None if bias is None else bias.detach(),
        x_zero=zero, w_sum=None if zero is None else weight.sums, dtype=x.dtype,
    ).view(*x.shape[:-1], weight.out_features)  # fmt: skip
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        plain = None if bias is None else bias.to(x.dtype)
        exact = torch.nn.functional.linear(x, weight.dequantize().to(x.dtype), plain)
        out = out + (exact - exact.detach())
    return out


@choosing("linear")
def linear_choice(
    gpu: Gpu,
    M: int,
    N: int,
    K: int,
    itemsize: int,
    integers: str = "uint4",
    group_size: int | None = 128,
    activations: str = "float",
) -> Choice[Any]:
    """For x [M, K] by a weight [N, K] of these integers, in groups or None."""
    if not gpu.capability:
        return Choice("lowbit's product for CPUs", None, "serves CPU tensors; see `lowbit explain`")
    format = WeightFormat(integers, group_size)
    if activations != "float" and not format.four_bits:
        from lowbit.kernels.triton.fast.scaled import scaled_choice

        return scaled_choice(gpu, M, N, K, itemsize=itemsize)
    if refusal := Tiles().refusal(format, K):
        raise ValueError(f"no kernel serves it on {gpu}: {refusal}")
    from lowbit.kernels.triton.fast.eight_by_four import eight_by_four_choice
    from lowbit.kernels.triton.fast.weight_only import weight_only_choice

    bits, size = 4 if format.four_bits else 8, Tiles().group_size(format, K)
    if activations != "float":
        return eight_by_four_choice(gpu, M, N, K, itemsize, size)
    return weight_only_choice(gpu, M, N, K, bits, itemsize, size)


class _StraightThrough(torch.autograd.Function):
    """The operator with the derivative of the dequantized weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return linear_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *weight, bias, in_features, out_features, group_size, _ = inputs
        ctx.sizes = in_features, out_features, group_size
        ctx.save_for_backward(*weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = dequantize_weight(*ctx.saved_tensors, *ctx.sizes)
            for_x = (gradient.to(torch.float32) @ weight).to(gradient.dtype)
        if ctx.needs_input_grad[5]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            for_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return for_x, None, None, None, None, for_bias, None, None, None, None


def _check_activation(x: Tensor, in_features: int) -> None:
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"this layer takes input of shape [..., {in_features}], got {list(x.shape)}"
        )
    if x.dtype not in FLOATS:
        raise TypeError(
            f"a quantized linear layer takes float32, bfloat16 or float16 input, got {x.dtype}; "
            f"convert it with .float()"
        )


def _padded_bias(bias: Tensor, out_features: int) -> Tensor:
    padded = bias.new_zeros(out_features + -out_features % PANEL_COLUMNS, dtype=torch.float32)
    padded[:out_features] = bias
    return padded


@lru_cache(maxsize=KEPT)
def _prepared(
    rows: int,
    stride: int,
    in_features: int,
    out_features: int,
    activations: str,
    bfloat16: bool,
    group_size: int,
    zero_points: str,
    proof: _Proof,
    biased: bool,
    threads: int,
) -> Prepared:
    """The product that such a layer is; `stride` is from row to row."""
    dtype = np.dtype(ml_dtypes.bfloat16 if bfloat16 else np.float32)
    b = PanelFormat(
        k=in_features,
        n=out_features,
        dtype="int4" if group_size else "int8",
        scaled=True,
        zero_points=zero_points,
        group_size=group_size,
        largest_pair=2 * NIBBLE_MASK if group_size else proof.largest_pair,
        split=proof.split,
    )
    strides = stride * dtype.itemsize, dtype.itemsize
    out_dtype = "bfloat16" if bfloat16 else "float32"
    left = (rows, in_features), strides, dtype
    output = biased, False, None, out_dtype
    return requests.floats(left, b, threads, None, activations, 0, *output)[0]


def _known_of(panels: Tensor) -> tuple[_Proof, Split | None]:
    """What is proven about weights of 8 bits, kept with their tensor until that changes, and the
    split weights if a kernel could want them."""
    if panels.is_inference():  # which do not say when they change
        return _Proof(), None
    state = panels._version, panels.data_ptr(), wants_split(None)
    known = getattr(panels, "_lowbit_known", None)
    if known is None or known[0] != state:
        proof, parts = _Proof(), None
        if not panels.is_shared():  # what other processes may change is proven for no time
            values = panels.numpy()
            parts = split(values) if wants_split(None) else None
            proof = _Proof(largest_pair_of(values), parts.format if parts else None)
        known = state, proof, parts
        panels._lowbit_known = known  # type: ignore[attr-defined]
    return known[1:]


def _linear_cpu(
    x: Tensor,
    panels: Tensor,
    column_sums: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    activations: str,
) -> Tensor:
    dtype = x.dtype
    shape = x.shape
    bfloat16 = False
    if dtype is not torch.float32 or len(shape) == 0 or shape[-1] != in_features:
        _check_activation(x, in_features)
        bfloat16 = dtype is torch.bfloat16 and activations == "float"
        if not bfloat16:
            x = x.to(torch.float32)
    if x.is_contiguous():
        stride = in_features
    elif len(shape) == 2 and x.stride(1) == 1:
        stride = x.stride(0)
    else:
        x = x.contiguous()
        stride = in_features
    if bias is not None and (
        out_features % PANEL_COLUMNS or bias.dtype is not torch.float32 or not bias.is_contiguous()
    ):
        bias = _padded_bias(bias, out_features)
    wanted = not group_size and wants_proof(None)
    proof, parts = _known_of(panels) if wanted else (_Proof(), None)
    if panels.data_ptr() % _ALIGNMENT:
        # PyTorch's CPU allocator aligns to 64 bytes, so this is memory of foreign origin.
        panels = panels.clone()
    out = x.new_empty(*shape[:-1], out_features)
    if rows := x.numel() // in_features:
        prepared = _prepared(
            rows,
            stride,
            in_features,
            out_features,
            activations,
            bfloat16,
            group_size,
            "" if zero_points is None else _ZEROS[zero_points.dtype],
            proof,
            bias is not None,
            threads_key(None),
        )
        operands = {
            "a": x, "panels": panels, "column_sum": column_sums, "column_zero": zero_points,
            "column_scale": scale, "bias": bias, "out": out,
        }  # fmt: skip
        given = {name: None if one is None else one.data_ptr() for name, one in operands.items()}
        if parts and prepared.plan.shape.summed:
            given["panels"] = parts.memory.ctypes.data
        prepared.run(given)
    return out if out.dtype is dtype else out.to(dtype)


def _dequantize_weight_cpu(*arguments: Any) -> Tensor:
    *parts, in_features, out_features, group_size = arguments
    named = zip(Panels.parts, parts, strict=True)
    arrays = {name: part.numpy() for name, part in named if part is not None}
    # The zero points of uint4 are relative to its middle, as those of int4 are.
    format = WeightFormat("int4", group_size) if group_size else INT8
    quantized = Panels().unpack(arrays, format, (out_features, in_features))
    return torch.from_numpy(quantized.dequantize()).contiguous()


def _linear_fake(x: Tensor, *rest: Any) -> Tensor:
    in_features, out_features = rest[5:7]
    _check_activation(x, in_features)
    return x.new_empty((*x.shape[:-1], out_features))


linear_op = register(
    "linear(Tensor x, Tensor panels, Tensor column_sums, Tensor scale, Tensor? zero_points, "
    "Tensor? bias, int in_features, int out_features, int group_size, str activations) -> Tensor",
    cpu=_linear_cpu,
    fake=_linear_fake,
)
dequantize_weight = register(
    "dequantize_weight(Tensor panels, Tensor column_sums, Tensor scale, Tensor? zero_points, "
    "int in_features, int out_features, int group_size) -> Tensor",
    cpu=_dequantize_weight_cpu,
    fake=lambda panels, sums, scale, zeros, k, n, group_size: scale.new_empty((n, k)),
)


def _linear_vmap(info: Any, axes: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """Over x alone: rows are rows. NotImplementedError for a batch of weights or biases."""
    if any(axis is not None for axis in axes[1:]):
        raise NotImplementedError(
            "vmap over the weights of a quantized layer is not possible: they are integers in one "
            "layout; map over inputs only (in_dims=None for parameters)"
        )
    return linear_op(x.movedim(axes[0], 0), *rest), 0


torch.library.register_vmap("lowbit::linear", _linear_vmap)
