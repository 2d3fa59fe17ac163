"""PyTorch's operators: layers as they are used, and any function by its name."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lowbit.lab.trace.subject import Asked, Opened, engines, matrix_product, product_sizes

if TYPE_CHECKING:
    import torch

_ROWS = 256


@engines.register("torch")
def torch_operator(asked: Asked) -> Opened:
    """`linear` and `quantized_linear` of a shape KxN or MxK:KxN, or any function of `torch` and
    `torch.nn.functional` of tensors of the shapes; `dtype=`, `compile=true`."""
    import torch

    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    compiled = asked.take("compile", False)
    made = _LAYERS.get(asked.name, _function)(asked)
    asked.nothing_left()
    inner = torch.compile(made.call) if compiled else made.call

    def run() -> object:
        with torch.inference_mode():
            return inner()

    return replace(made, call=run)


def _dtype(asked: Asked) -> torch.dtype:
    import torch

    name = asked.take("dtype", "float32")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name} is no dtype of torch; write float32, bfloat16, int8, ...")
    return found


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, shape).to(dtype)


def _linear(asked: Asked) -> Opened:
    import torch

    dtype = _dtype(asked)
    m, k, n = product_sizes(asked, asked.take("rows", _ROWS))
    layer = torch.nn.Linear(k, n, bias=asked.take("bias", True)).to(dtype)
    x = _tensor((m, k), dtype)
    name = str(dtype).removeprefix("torch.")
    return Opened(lambda: layer(x), f"torch linear {m}x{k}:{k}x{n} {name}", name, m * k * n)


def _quantized_linear(asked: Asked) -> Opened:
    import torch

    engine = asked.take("engine", torch.backends.quantized.engine)
    known = [one for one in torch.backends.quantized.supported_engines if one != "none"]
    if engine not in known:
        raise ValueError(f"engine={engine} is not one of this torch: {', '.join(known)}")
    torch.backends.quantized.engine = engine
    m, k, n = product_sizes(asked, asked.take("rows", _ROWS))
    dynamic = asked.take("dynamic", False)
    scales, zeros = torch.full((n,), 0.02), torch.zeros(n, dtype=torch.int64)
    operators: Any = torch.ops.quantized
    x = torch.randn(m, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these tensors will go
        weight = torch.quantize_per_channel(torch.randn(n, k), scales, zeros, 0, torch.qint8)
        packed = operators.linear_prepack(weight, torch.randn(n))
        levels = torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)
    if dynamic:
        call: Callable[[], object] = partial(operators.linear_dynamic.default, x, packed, True)
    else:
        call = partial(operators.linear.default, levels, packed, 0.5, 128)
    kind = "quantized linear, dynamic," if dynamic else "quantized linear"
    return Opened(call, f"torch {kind} {m}x{k}:{k}x{n} on {engine}", "int8", m * k * n)


_LAYERS = {"linear": _linear, "quantized_linear": _quantized_linear}


def _function(asked: Asked) -> Opened:
    import torch

    places = (torch.nn.functional, torch)
    found = next((getattr(p, asked.name) for p in places if hasattr(p, asked.name)), None)
    if not callable(found):
        raise ValueError(f"torch and torch.nn.functional have no function {asked.name!r}")
    if not asked.shapes:
        raise ValueError(f"torch:{asked.name} needs the shapes of its tensors: 64x64, or 2x3:3x4")
    dtype = _dtype(asked)
    tensors = [_tensor(shape, dtype) for shape in asked.shapes]
    call: Callable[[], Any] = partial(found, *tensors, **asked.options)
    asked.options.clear()
    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes)
    name = str(dtype).removeprefix("torch.")
    products = matrix_product(asked.shapes) if asked.name in ("matmul", "mm", "bmm") else None
    if re.fullmatch(r"conv[123]d", asked.name):
        result: Any = call()
        products = result.numel() * math.prod(asked.shapes[1][1:])
    return Opened(call, f"torch {asked.name} {shapes} {name}", name, products)
