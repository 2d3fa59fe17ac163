"""Operators on a GPU, beside whatever else can run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowbit.spec import Operation
from lowbit.spec.operations import attention as of_attention
from lowbit.spec.operations import convolution as of_convolution
from lowbit.spec.operations import products
from lowbit.spec.operations import rows as of_rows
from lowbit.torch import functional as ours
from lowbit_lab.bench.operators.registry import (
    Call,
    OperatorCase,
    OperatorProblem,
    chosen,
    drawn,
    operation,
)
from lowbit_lab.bench.operators.registry import case as _case

# Attention, forward and backward, beside every backend of scaled_dot_product_attention.

_BACKENDS = {
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_TOKENS, _HEADS, _SIZE = 16384, 16, 128
_ATTENTIONS = [
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
) -> OperatorProblem:
    sizes = {"Q": case.sizes["length"], "K": case.sizes["length"], "D": case.sizes["size"]}
    return OperatorProblem(case, calls, reference, (chosen(spec, case),), sizes, tuple(moved))


def _through(backend: Any, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

    return forward


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In float32, some heads at a time: the scores of all would not fit."""
    parts: list[Tensor] = []
    for one in range(q.shape[0]):
        for head in range(q.shape[1]):
            q1, k1, v1 = (part[None, one, head].float() for part in (q, k, v))
            parts.append(_through(SDPBackend.MATH, causal)(q1, k1, v1))
    return torch.cat(parts).view_as(q)


@operation("attention", _ATTENTIONS, copies=False, quick=4)
def attention(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """Forward."""
    q, k, v = _drawn(case, generator, 3)
    causal = bool(case.options["causal"])
    calls = {"lowbit": lambda: ours.attention(q, k, v, causal=causal)}
    for name, backend in _BACKENDS.items():
        calls[name] = partial(_through(backend, causal), q, k, v)
    reference = partial(_reference, q, k, v, causal)
    return _work(case, calls, reference, of_attention.attention, (q, q, k, v))


# One query of each sequence: batch, heads, key heads, keys, head size.
_CACHES = [(1, 32, 8, 8192, 128), (1, 32, 8, 65536, 128), (1, 32, 32, 8192, 128)]
_CACHES += [(16, 32, 8, 4096, 64), (16, 32, 8, 4096, 128), (64, 32, 8, 2048, 128)]
_DECODES = [
    _case(dict(zip(("B", "heads", "key_heads", "length", "size"), one, strict=True)), "bfloat16")
    for one in _CACHES
]


@operation("attention_decode", _DECODES, copies=False)
def attention_decode(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """One query, over a cache in one tensor."""
    batch, heads, key_heads, length, size = case.sizes.values()
    q = drawn(case, generator, batch, heads, 1, size)
    k, v = (drawn(case, generator, batch, key_heads, length, size) for _ in "kv")
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    calls: dict[str, Call] = {"lowbit": lambda: ours.attention_decode(q, k, v, lengths)}
    for name, backend in _BACKENDS.items():
        calls[name] = partial(_through(backend, causal=False), q, k, v)
    wide = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
    reference = partial(_reference, q, *wide, causal=False)
    sizes = {"Q": 1, "K": length, "D": size}
    spec = chosen(of_attention.attention_decode, case)
    return OperatorProblem(case, calls, reference, (spec,), sizes, (q, q, k, v))


@operation("attention_backward", _ATTENTIONS, copies=False, quick=4)
def attention_backward(case: OperatorCase, generator: Generator) -> OperatorProblem:
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
    return _work(case, calls, reference, of_attention.attention_dq, (*(q, k, v) * 2, dz, dz))


# Convolutions of ResNet-50, in both memory formats.

# Batch, channels, size, output channels, kernel, stride.
_LAYERS = [(64, 3, 224, 64, 7, 2), (64, 64, 56, 64, 3, 1), (64, 128, 28, 128, 3, 1)]
_LAYERS += [(64, 256, 14, 1024, 1, 1), (64, 512, 14, 512, 3, 2)]
_NAMES = ("B", "C", "H", "O", "K", "stride")
_CONVOLUTIONS = [
    _case(dict(zip(_NAMES, layer, strict=True)), dtype, last=last)
    for dtype, last in (("bfloat16", True), ("bfloat16", False), ("float32", True))
    for layer in _LAYERS
]


@operation("conv2d", _CONVOLUTIONS, copies=False, quick=4)
def conv2d(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """Against cuDNN, which torch calls; neither rounds float32 to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    b, c, h, o, k, stride = (case.sizes[name] for name in _NAMES)
    memory = torch.channels_last if case.options["last"] else torch.contiguous_format
    x, weight = (
        drawn(case, generator, *shape).contiguous(memory_format=memory)
        for shape in ((b, c, h, h), (o, c, k, k))
    )

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(x, weight, stride=stride, padding=k // 2)

    calls = {
        "lowbit": lambda: ours.conv2d(x, weight, stride=stride, padding=k // 2),
        "torch (cuDNN)": lambda: plain(x, weight),
    }
    result = plain(x.to("meta"), weight.to("meta"))
    sizes = {"B": b, "C": c, "H": h, "W": h, "O": o, "KH": k, "KW": k}
    specs = (chosen(of_convolution.conv2d, case),)
    return OperatorProblem(
        case,
        calls,
        lambda: plain(x.double(), weight.double()),
        specs,
        sizes,
        (result, x, weight),
    )


# Batched products of matrices, beside cuBLAS; `bench linear` has those with quantized weights.

_BATCHED = [
    _case({"B": b, "M": m, "N": n, "K": k}, "bfloat16")
    for b, m, n, k in [
        (16, 2048, 2048, 2048),
        (64, 1024, 1024, 1024),
        (8, 4096, 4096, 4096),
        (128, 512, 512, 512),
    ]
]


@operation("batched_matmul", _BATCHED, copies=False, quick=4)
def batched_matmul(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """Against torch.bmm."""
    b, m, n, k = (case.sizes[name] for name in ("B", "M", "N", "K"))
    x, y = drawn(case, generator, b, m, k), drawn(case, generator, b, k, n)
    calls = {
        "lowbit": lambda: ours.bmm(x, y),
        "torch (cuBLAS)": lambda: torch.bmm(x, y),
    }
    spec = chosen(products.batched_matmul, case)
    return OperatorProblem(
        case, calls, lambda: torch.bmm(x.float(), y.float()), (spec,), case.sizes
    )


# Softmax, sum, LayerNorm and RMSNorm over rows of 1k to 128k.

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
) -> OperatorProblem:
    """lowbit's function beside one of torch, which is compiled too and in float64 the reference."""
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    calls = {
        "lowbit": lambda: own(*tensors),
        "torch": lambda: plain(*tensors),
        "torch.compile": lambda: compiled(*tensors),
    }

    def reference() -> Tensor:
        return plain(*(one.double() for one in tensors))

    return OperatorProblem(case, calls, reference, (chosen(spec, case),), _sizes(case))


@operation("softmax", [*_BOTH, *_ODD], copies=True, quick=4)
def softmax(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """Over rows, forward."""
    x = _rows(case, generator)
    return _forward(case, of_rows.softmax, ours.softmax, lambda x: torch.softmax(x, -1), x)


@operation("softmax_backward", _BOTH, copies=True, quick=4)
def softmax_backward(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """From the softmax and its gradient."""
    z = torch.softmax(_rows(case, generator), -1)
    dz = _rows(case, generator)
    plain, own = torch.ops.aten._softmax_backward_data, torch.ops.lowbit.softmax_backward
    calls = {"lowbit": lambda: own(z, dz), "torch": lambda: plain(dz, z, -1, z.dtype)}

    def reference() -> Tensor:
        return plain(dz.double(), z.double(), -1, torch.float64)

    return OperatorProblem(
        case, calls, reference, (chosen(of_rows.softmax_dx, case),), _sizes(case)
    )


@operation("row_sum", [*_BOTH, *_ODD], copies=True, quick=4)
def row_sum(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """Reads rows, writes next to nothing."""
    return _forward(case, of_rows.row_sum, ours.sum, lambda x: x.sum(-1), _rows(case, generator))


@operation("rms_norm", [*_BOTH, *_ODD], copies=True, quick=4)
def rms_norm(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """With a weight."""
    x, (weight,) = _rows(case, generator), _weights(case, generator, 1)
    shape = list(weight.shape)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, weight, 1e-6)

    return _forward(
        case, of_rows.rms_norm, lambda x, weight: ours.rms_norm(x, weight, 1e-6), plain, x, weight
    )


@operation("layer_norm", _BOTH, copies=True, quick=4)
def layer_norm(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """With weight and bias."""
    x, (weight, bias) = _rows(case, generator), _weights(case, generator, 2)
    shape = list(weight.shape)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, shape, weight, bias)

    return _forward(case, of_rows.layer_norm, ours.layer_norm, plain, x, weight, bias)


_BACKWARD = [case for case in _BOTH if case.sizes["length"] <= 2**14]


@operation("layer_norm_backward", _BACKWARD, copies=True, quick=4)
def layer_norm_backward(case: OperatorCase, generator: Generator) -> OperatorProblem:
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
    gradients = (of_rows.layer_norm_dx, of_rows.layer_norm_dweight, of_rows.layer_norm_dbias)
    specs = tuple(chosen(one, case) for one in gradients)
    # Results are as large as what they are the gradients of.
    moved = (x, weight, bias, x, weight, dz)
    return OperatorProblem(case, calls, reference, specs, _sizes(case), moved)
