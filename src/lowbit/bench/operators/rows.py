"""Softmax, sum, LayerNorm and RMSNorm over rows of 1k to 128k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from lowbit.bench.operators.registry import OperatorCase, Work, operation, work
from lowbit.bench.operators.registry import case as _case
from lowbit.spec import Operation
from lowbit.spec.operations import rows as stated
from lowbit.torch import functional as ours

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


def _data(case: OperatorCase, generator: Generator, *shape: int) -> Tensor:
    dtype = getattr(torch, case.dtype)
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def _rows(case: OperatorCase, generator: Generator) -> Tensor:
    return _data(case, generator, case.sizes["rows"], case.sizes["length"])


def _work(calls: Any, reference: Any, spec: Operation, case: OperatorCase) -> Work:
    return work(calls, reference, spec, case, N=case.sizes["rows"], T=case.sizes["length"])


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


@operation("softmax", [*_BOTH, *_ODD], copies=True, quick=4)
def softmax(case: OperatorCase, generator: Generator) -> Work:
    """Over rows, forward."""
    x = _rows(case, generator)
    compiled = _compiled(lambda x: torch.softmax(x, -1))
    calls = {
        "lowbit": lambda: ours.softmax(x),
        "torch": lambda: torch.softmax(x, -1),
        "torch.compile": lambda: compiled(x),
    }
    return _work(calls, lambda: torch.softmax(x.double(), -1), stated.softmax, case)


@operation("softmax_backward", _BOTH, copies=True, quick=4)
def softmax_backward(case: OperatorCase, generator: Generator) -> Work:
    """From the softmax and its gradient."""
    z = torch.softmax(_rows(case, generator), -1)
    dz = _rows(case, generator)
    plain, own = torch.ops.aten._softmax_backward_data, torch.ops.lowbit.softmax_backward
    calls = {"lowbit": lambda: own(z, dz), "torch": lambda: plain(dz, z, -1, z.dtype)}

    def reference() -> Tensor:
        return plain(dz.double(), z.double(), -1, torch.float64)

    return _work(calls, reference, stated.softmax_dx, case)


@operation("row_sum", [*_BOTH, *_ODD], copies=True, quick=4)
def row_sum(case: OperatorCase, generator: Generator) -> Work:
    """Reads rows, writes next to nothing."""
    x = _rows(case, generator)
    compiled = _compiled(lambda x: x.sum(-1))
    calls = {
        "lowbit": lambda: ours.sum(x),
        "torch": lambda: x.sum(-1),
        "torch.compile": lambda: compiled(x),
    }
    return _work(calls, lambda: x.double().sum(-1), stated.row_sum, case)


@operation("rms_norm", [*_BOTH, *_ODD], copies=True, quick=4)
def rms_norm(case: OperatorCase, generator: Generator) -> Work:
    """With a weight."""
    x, weight = _rows(case, generator), _data(case, generator, case.sizes["length"])
    shape = list(weight.shape)
    compiled = _compiled(lambda x, w: functional.rms_norm(x, shape, w, 1e-6))
    calls = {
        "lowbit": lambda: ours.rms_norm(x, weight, 1e-6),
        "torch": lambda: functional.rms_norm(x, shape, weight, 1e-6),
        "torch.compile": lambda: compiled(x, weight),
    }

    def reference() -> Tensor:
        return functional.rms_norm(x.double(), shape, weight.double(), 1e-6)

    return _work(calls, reference, stated.rms_norm, case)


@operation("layer_norm", _BOTH, copies=True, quick=4)
def layer_norm(case: OperatorCase, generator: Generator) -> Work:
    """With weight and bias."""
    x = _rows(case, generator)
    weight, bias = (_data(case, generator, case.sizes["length"]) for _ in range(2))
    shape = list(weight.shape)
    compiled = _compiled(lambda x, w, b: functional.layer_norm(x, shape, w, b))
    calls = {
        "lowbit": lambda: ours.layer_norm(x, weight, bias),
        "torch": lambda: functional.layer_norm(x, shape, weight, bias),
        "torch.compile": lambda: compiled(x, weight, bias),
    }

    def reference() -> Tensor:
        return functional.layer_norm(x.double(), shape, weight.double(), bias.double())

    return _work(calls, reference, stated.layer_norm, case)


_BACKWARD = [case for case in _BOTH if case.sizes["length"] <= 2**14]


@operation("layer_norm_backward", _BACKWARD, copies=True, quick=4)
def layer_norm_backward(case: OperatorCase, generator: Generator) -> Work:
    """All three gradients, of which that of x is compared."""
    x, dz = _rows(case, generator), _rows(case, generator)
    weight, bias = (_data(case, generator, case.sizes["length"]) for _ in range(2))
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
    return Work(calls, reference, 3 * x.nbytes + 3 * weight.nbytes, 14 * x.numel())
