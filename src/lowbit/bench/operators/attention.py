"""Attention, forward and backward, beside every backend of scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowbit.bench.operators.registry import Call, OperatorCase, Work, chosen, drawn, operation
from lowbit.bench.operators.registry import case as _case
from lowbit.spec import Operation
from lowbit.spec.operations import attention as stated
from lowbit.torch import functional as ours

_BACKENDS = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_TOKENS, _HEADS, _SIZE = 16384, 16, 128
_CASES = [
    _case(
        {"B": _TOKENS // length, "heads": _HEADS, "length": length, "size": _SIZE},
        "bfloat16",
        causal=causal,
    )
    for length in (1024, 2048, 4096, 8192, 16384)
    for causal in (False, True)
]


def _drawn(case: OperatorCase, generator: Generator, count: int) -> list[Tensor]:
    shape = [case.sizes[name] for name in ("B", "heads", "length", "size")]
    return [drawn(case, generator, *shape) for _ in range(count)]


def _work(
    case: OperatorCase,
    calls: Mapping[str, Call],
    reference: Call,
    spec: Operation,
    moved: Sequence[Tensor],
) -> Work:
    sizes = {"Q": case.sizes["length"], "K": case.sizes["length"], "D": case.sizes["size"]}
    return Work(case, calls, reference, (chosen(spec, case),), sizes, tuple(moved))


def _through(backend: Any, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return forward


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In float32, some heads at a time: the scores of all would not fit."""
    parts: list[Tensor] = []
    for one in range(q.shape[0]):
        for head in range(q.shape[1]):
            q1, k1, v1 = (part[None, one, head].float() for part in (q, k, v))
            parts.append(_through(SDPBackend.MATH, causal)(q1, k1, v1))
    return torch.cat(parts).view_as(q)


@operation("attention", _CASES, copies=False, quick=4)
def attention(case: OperatorCase, generator: Generator) -> Work:
    """Forward."""
    q, k, v = _drawn(case, generator, 3)
    causal = bool(case.options["causal"])
    calls = {"lowbit": lambda: ours.attention(q, k, v, causal=causal)}
    for name, backend in _BACKENDS.items():
        calls[name] = partial(_through(backend, causal), q, k, v)
    reference = partial(_reference, q, k, v, causal)
    return _work(case, calls, reference, stated.attention, (q, q, k, v))


@operation("attention_backward", _CASES, copies=False, quick=4)
def attention_backward(case: OperatorCase, generator: Generator) -> Work:
    """The gradient of v is compared; all three are computed."""
    q, k, v, dz = _drawn(case, generator, 4)
    causal = bool(case.options["causal"])

    def of(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        inputs = [part.detach().requires_grad_() for part in (q, k, v)]
        kept: list[Tensor] = []  # made by the first call: not every backend takes every case

        def call() -> Tensor:
            if not kept:
                kept.append(forward(*inputs))
            return torch.autograd.grad(kept[0], inputs, dz, retain_graph=True)[2]

        return call

    calls = {"lowbit": of(lambda q, k, v: ours.attention(q, k, v, causal=causal))}
    calls |= {name: of(_through(backend, causal)) for name, backend in _BACKENDS.items()}

    def reference() -> Tensor:
        q1, k1, v1 = (part.detach().requires_grad_() for part in (q, k, v))
        return torch.autograd.grad(_reference(q1, k1, v1, causal), v1, dz.float())[0]

    # Of q and its gradient, k, v, the result, and its gradient.
    return _work(case, calls, reference, stated.attention_dq, (*(q, k, v) * 2, dz, dz))
