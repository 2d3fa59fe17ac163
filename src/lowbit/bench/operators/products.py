"""Products of matrices: batched, and with weights of 4 bits, beside cuBLAS."""

from __future__ import annotations

import torch
from torch import Generator

from lowbit.bench.ops.registry import Case, Work, operation
from lowbit.torch import functional as ours

_BATCHED = [
    Case({"B": b, "M": m, "N": n, "K": k}, "bfloat16")
    for b, m, n, k in [
        (16, 2048, 2048, 2048),
        (64, 1024, 1024, 1024),
        (8, 4096, 4096, 4096),
        (128, 512, 512, 512),
    ]
]
_INT4 = [
    Case({"M": m, "N": n, "K": k}, "bfloat16", {"group_size": 128})
    for n, k in [(28672, 8192), (8192, 28672), (4096, 4096)]
    for m in (1, 16, 64, 512)
]


@operation("batched_matmul", _BATCHED, copies=False, quick=4)
def batched_matmul(case: Case, generator: Generator) -> Work:
    """Against torch.bmm."""
    b, m, n, k = (case.sizes[name] for name in ("B", "M", "N", "K"))
    dtype, device = getattr(torch, case.dtype), generator.device
    x = torch.randn(b, m, k, dtype=dtype, device=device, generator=generator)
    y = torch.randn(b, k, n, dtype=dtype, device=device, generator=generator)
    calls = {
        "lowbit": lambda: ours.bmm(x, y),
        "torch (cuBLAS)": lambda: torch.bmm(x, y),
    }
    moved = x.nbytes + y.nbytes + b * m * n * x.itemsize
    return Work(calls, lambda: torch.bmm(x.float(), y.float()), moved, 2 * b * m * n * k)


@operation("int4_matmul", _INT4, copies=False, quick=12)
def int4_matmul(case: Case, generator: Generator) -> Work:
    """Against the product with the dequantized weight in 16 bits."""
    m, n, k = (case.sizes[name] for name in ("M", "N", "K"))
    size = case.options["group_size"]
    dtype, device = getattr(torch, case.dtype), generator.device
    x = torch.randn(m, k, dtype=dtype, device=device, generator=generator)
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand(n, k // size, device=device, generator=generator).to(dtype)
    weight = ours.pack_int4(values, scale, group_size=size)
    w = ((values.float() - 8) * scale.float().repeat_interleave(size, 1)).to(dtype)
    calls = {
        "lowbit": lambda: ours.int4_matmul(x, weight),
        "torch (cuBLAS, 16 bits)": lambda: x @ w.T,
    }
    moved = weight.tiles.nbytes + weight.scale.nbytes + x.nbytes + m * n * x.itemsize
    return Work(calls, lambda: x.float() @ w.float().T, moved, 2 * m * n * k)
