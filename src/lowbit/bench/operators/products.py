"""Products of matrices: batched, and with weights of 4 bits, beside cuBLAS."""

from __future__ import annotations

import torch
from torch import Generator

from lowbit.bench.operators.registry import OperatorCase, Work, chosen, drawn, operation
from lowbit.bench.operators.registry import case as _case
from lowbit.spec.operations import products
from lowbit.torch import functional as ours

_BATCHED = [
    _case({"B": b, "M": m, "N": n, "K": k}, "bfloat16")
    for b, m, n, k in [
        (16, 2048, 2048, 2048),
        (64, 1024, 1024, 1024),
        (8, 4096, 4096, 4096),
        (128, 512, 512, 512),
    ]
]
_INT4 = [
    _case({"M": m, "N": n, "K": k}, "bfloat16", group_size=128)
    for n, k in [(28672, 8192), (8192, 28672), (4096, 4096)]
    for m in (1, 16, 64, 512)
]


@operation("batched_matmul", _BATCHED, copies=False, quick=4)
def batched_matmul(case: OperatorCase, generator: Generator) -> Work:
    """Against torch.bmm."""
    b, m, n, k = (case.sizes[name] for name in ("B", "M", "N", "K"))
    x, y = drawn(case, generator, b, m, k), drawn(case, generator, b, k, n)
    calls = {
        "lowbit": lambda: ours.bmm(x, y),
        "torch (cuBLAS)": lambda: torch.bmm(x, y),
    }
    spec = chosen(products.batched_matmul, case)
    return Work(case, calls, lambda: torch.bmm(x.float(), y.float()), (spec,), case.sizes)


@operation("int4_matmul", _INT4, copies=False, quick=12)
def int4_matmul(case: OperatorCase, generator: Generator) -> Work:
    """Against the product with the dequantized weight in 16 bits."""
    m, n, k = (case.sizes[name] for name in ("M", "N", "K"))
    size = case.options["group_size"]
    x, device = drawn(case, generator, m, k), generator.device
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand(n, k // size, device=device, generator=generator).to(x.dtype)
    weight = ours.pack_int4(values, scale, group_size=size)
    w = ((values.float() - 8) * scale.float().repeat_interleave(size, 1)).to(x.dtype)
    calls = {
        "lowbit": lambda: ours.int4_matmul(x, weight),
        "torch (cuBLAS, 16 bits)": lambda: x @ w.T,
    }
    spec = chosen(products.int4_matmul, case)
    return Work(case, calls, lambda: x.float() @ w.float().T, (spec,), case.sizes)
