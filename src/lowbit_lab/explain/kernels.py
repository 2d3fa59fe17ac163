"""lowbit's own matrix product as kernels to check and to look at, one for each instruction set.

They are the text that runs, product.py with the micro-kernel of the set, on a right operand that is
packed already. Scratch is no tensor: what lies there is checked for bounds, but not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

import lowbit
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, padded_k
from lowbit.spec import Sizes
from lowbit.spec.operations.products import matmul
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.languages.lowbit import CpuKernel
from lowbit_lab.run.bind import Packed
from lowbit_lab.run.tensor import POISON


@cache
def product_kernels() -> dict[str, Request]:
    """The product of each instruction set, by its name."""
    found: dict[str, Request] = {}
    for micro in micro_kernels():
        if not micro.refuses(KernelQuery(LINE, LINE, LINE)):  # fewer rows than some take
            found.setdefault(micro.isa.name, _request(micro))
    return dict(sorted(found.items()))


def _request(micro: MicroKernel) -> Request:
    def query(sizes: Mapping[str, int]) -> KernelQuery:
        return KernelQuery(sizes["M"], sizes["N"], sizes["K"])

    def step_bytes(sizes: Sizes) -> int:
        shape, rows = micro.shape(query(sizes))
        return rows * shape.row_blocks * padded_k(sizes["K"])

    def static(numbers: Mapping[str, Any]) -> dict[str, Any]:
        asked = KernelQuery(numbers["m"], numbers["n"], numbers["k_size"])
        fixed = {"a_format": Bytes(), "epilogue": Epilogue(), "fused": True}
        return {"micro": micro, "shape": replace(micro.shape(asked)[0], span=0), **fixed}

    # What is not named here is the operation's, by its name (a, out, m, n), or of no use.
    unused = {name: None for name in product.types if name not in ("a", "out", "m", "n")}
    given = {
        **unused,
        "panels": Packed("b", lambda b: lowbit.pack(b).panels.view(np.int8)),
        "item_steps": 2,
        "item_panels": 2,
        "threads": 1,
        "next_bytes": 0,
        "a_row_stride": itemgetter("K"),
        "a_stride": 1,
        "first_row": 0,
        "residual_stride": 0,
        "out_stride": itemgetter("N"),
        "k_size": itemgetter("K"),
        "block_rows": lambda sizes: micro.shape(query(sizes))[1],
        "private": lambda sizes: np.full(step_bytes(sizes), POISON, np.uint8),
        "private_bytes": step_bytes,
    }
    kernel = CpuKernel(product, micro.isa.name, static)
    return Request(Variant(kernel, grid=lambda sizes: 1, constants=given), matmul)
