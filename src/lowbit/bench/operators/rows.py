"""Softmax, sum, LayerNorm and RMSNorm over rows of 1k to 128k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

from lowbit.bench.operators.registry import OperatorCase, Work, chosen, drawn, operation
from lowbit.bench.operators.registry import case as _case
from lowbit.spec import Operation
from lowbit.spec.operations import rows as stated
from lowbit.torch import functional as ours

Function = Callable[..., Tensor]

_ELEMENTS = 2**28
"""Of a tensor: half a gigabyte in bfloat16, well past any cache."""
_LENGTHS = [2**power for power in range(10, 18)]
_BOTH = [
    _case({"rows": _ELEMENTS // length, "length": length}, dtype)
    for dtype in ("bfloat16", "float32")
    for length in _LENGTHS
]
# Lengths that are no powers of two: a hidden size, a vocabulary whose rows begin anywhere.
_ODD = [
    _case({"rows": _ELEMENTS // length, "length": length}, "bfloat16") for length in (5120, 50257)
]


def _rows(case: OperatorCase, generator: Generator) -> Tensor:
    return drawn(case, generator, case.sizes["rows"], case.sizes["length"])


def _weights(case: OperatorCase, generator: Generator, count: int) -> list[Tensor]:
    return [drawn(case, generator, case.sizes["length"]) for _ in range(count)]


def _sizes(case: OperatorCase) -> dict[str, int]:
    """As the specification calls them."""
    return {"N": case.sizes["rows"], "T": case.sizes["length"]}


def _forward(
    case: OperatorCase, spec: Operation, own: Function, plain: Function, *tensors: Tensor
) -> Work:
    """lowbit's function beside one of torch, which is compiled too and in float64 the reference."""
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    calls = {
        "lowbit": lambda: own(*tensors),
        "torch": lambda: plain(*tensors),
        "torch.compile": lambda: compiled(*tensors),
    }

    def reference() -> Tensor:
        return plain(*(one.double() for one in tensors))

    return Work(case, calls, reference, (chosen(spec, case),), _sizes(case))


@operation("softmax", [*_BOTH, *_ODD], copies=True, quick=4)
def softmax(case: OperatorCase, generator: Generator) -> Work:
    """Over rows, forward."""
    x = _rows(case, generator)
    return _forward(case, stated.softmax, ours.softmax, lambda x: torch.softmax(x, -1), x)


@operation("softmax_backward", _BOTH, copies=True, quick=4)
def softmax_backward(case: OperatorCase, generator: Generator) -> Work:
    """From the softmax and its gradient."""
    z = torch.softmax(_rows(case, generator), -1)
    dz = _rows(case, generator)
    plain, own = torch.ops.aten._softmax_backward_data, torch.ops.lowbit.softmax_backward
    calls = {"lowbit": lambda: own(z, dz), "torch": lambda: plain(dz, z, -1, z.dtype)}

    def reference() -> Tensor:
        return plain(dz.double(), z.double(), -1, torch.float64)

    return Work(case, calls, reference, (chosen(stated.softmax_dx, case),), _sizes(case))


@operation("row_sum", [*_BOTH, *_ODD], copies=True, quick=4)
def row_sum(case: OperatorCase, generator: Generator) -> Work:
    """Reads rows, writes next to nothing."""
    return _forward(case, stated.row_sum, ours.sum, lambda x: x.sum(-1), _rows(case, generator))


@operation("rms_norm", [*_BOTH, *_ODD], copies=True, quick=4)
def rms_norm(case: OperatorCase, generator: Generator) -> Work:
    """With a weight."""
    x, (weight,) = _rows(case, generator), _weights(case, generator, 1)
    shape = list(weight.shape)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, weight, 1e-6)

    return _forward(
        case, stated.rms_norm, lambda x, weight: ours.rms_norm(x, weight, 1e-6), plain, x, weight
    )


@operation("layer_norm", _BOTH, copies=True, quick=4)
def layer_norm(case: OperatorCase, generator: Generator) -> Work:
    """With weight and bias."""
    x, (weight, bias) = _rows(case, generator), _weights(case, generator, 2)
    shape = list(weight.shape)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias)

    return _forward(case, stated.layer_norm, ours.layer_norm, plain, x, weight, bias)


_BACKWARD = [case for case in _BOTH if case.sizes["length"] <= 2**14]


@operation("layer_norm_backward", _BACKWARD, copies=True, quick=4)
def layer_norm_backward(case: OperatorCase, generator: Generator) -> Work:
    """All three gradients, of which that of x is compared."""
    x, dz = _rows(case, generator), _rows(case, generator)
    weight, bias = _weights(case, generator, 2)
    shape = list(weight.shape)
    _, mean, rstd = torch.ops.lowbit.norm(x, weight, bias, 1e-5, True)
    plain = torch.ops.aten.native_layer_norm_backward

    def backward() -> Tensor:
        dx = torch.ops.lowbit.norm_backward(dz, x, weight, mean, rstd, True)
        torch.ops.lowbit.norm_weight_backward(dz, x, mean, rstd, x.dtype, True)
        return dx

    kept = (mean[:, None], rstd[:, None])
    wanted = [True, True, True]

    def reference() -> Tensor:
        wide = [one.double() for one in (dz, x)]
        both = [one.double() for one in (*kept, weight, bias)]
        return plain(*wide, shape, *both, wanted)[0]

    calls = {
        "lowbit": backward,
        "torch": lambda: plain(dz, x, shape, *kept, weight, bias, wanted)[0],
    }
    gradients = (stated.layer_norm_dx, stated.layer_norm_dweight, stated.layer_norm_dbias)
    specs = tuple(chosen(one, case) for one in gradients)
    # Results are as large as what they are the gradients of.
    moved = (x, weight, bias, x, weight, dz)
    return Work(case, calls, reference, specs, _sizes(case), moved)
