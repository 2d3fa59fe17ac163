"""lowbit's own matrix product as kernels to check and to look at, one for each instruction set.

They are the text that runs, product.py with the micro-kernel of the set, on a right operand that is
packed already. Scratch is no tensor: what lies there is checked for bounds, but not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

import lowbit
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.bytes import Bytes
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, padded_k
from lowbit.lab.backends.backend import Request
from lowbit.lab.backends.kinds.cpu import CpuKernel
from lowbit.lab.run.bind import Packed
from lowbit.spec import Array, Sizes
from lowbit.spec.operations.products import matmul

_POISON = 0xA5
_ITEM = {"item_steps": 2, "item_panels": 2}


def _panels(b: Array) -> Array:
    return lowbit.pack(b).panels.view(np.int8)


@cache
def product_kernels() -> dict[str, Request]:
    """The product of each instruction set, by its name."""
    found: dict[str, Request] = {}
    for micro in micro_kernels():
        if not micro.refuses(KernelQuery(1, PANEL, LINE)):
            found.setdefault(micro.isa.name, _request(micro))
    return dict(sorted(found.items()))


def _request(micro: MicroKernel) -> Request:
    def block_rows(sizes: Sizes) -> int:
        return micro.shape(KernelQuery(sizes["M"], sizes["N"], sizes["K"]))[1]

    def step_bytes(sizes: Sizes) -> int:
        shape, rows = micro.shape(KernelQuery(sizes["M"], sizes["N"], sizes["K"]))
        return rows * shape.row_blocks * padded_k(sizes["K"])

    def static(numbers: Mapping[str, Any]) -> dict[str, Any]:
        shape, _ = micro.shape(KernelQuery(numbers["m"], numbers["n"], numbers["k_size"]))
        fixed = {"a_format": Bytes(), "epilogue": Epilogue(), "fused": True}
        return {"micro": micro, "shape": shape, **fixed}

    def private(sizes: Sizes) -> Array:
        return np.full(step_bytes(sizes), _POISON, np.uint8)

    known = {"a", "panels", "out", "m", "n"}
    unused = {name: None for name in product.types if name not in known}
    given = {
        "panels": Packed("b", _panels),
        **unused,
        **_ITEM,
        "a_row_stride": lambda sizes: sizes["K"],
        "a_stride": 1,
        "out_stride": lambda sizes: sizes["N"],
        "k_size": lambda sizes: sizes["K"],
        "block_rows": block_rows,
        "private": private,
        "private_bytes": step_bytes,
    }
    kernel = CpuKernel(product, micro.isa.name, static)
    return Request(kernel, matmul, lambda sizes: 1, given=given)
