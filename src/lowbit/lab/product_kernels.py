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
from lowbit.kernels.cpu.integer.micro_kernel import Demand, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.activation import Source
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, padded_k
from lowbit.lab.backends.backend import Request
from lowbit.lab.backends.kinds.cpu import CpuKernel
from lowbit.lab.run.bind import Packed
from lowbit.spec import Array, Sizes
from lowbit.spec.operations.products import matmul

PRODUCT = "product:"
"""What the names of lowbit's products on CPUs begin with; the instruction set follows."""

_POISON = 0xA5
_ITEM = {"item_steps": 2, "item_panels": 2}


def _panels(b: Array) -> Array:
    return lowbit.pack(b).panels.view(np.int8)


@cache
def product_kernels() -> dict[str, Request]:
    """For each instruction set its product, by names like product:generic."""
    found: dict[str, Request] = {}
    for micro in micro_kernels():
        if not micro.refuses(Demand(1, PANEL, LINE)):
            found.setdefault(f"{PRODUCT}{micro.isa}", _request(micro))
    return dict(sorted(found.items()))


def _request(micro: MicroKernel) -> Request:
    def block_rows(sizes: Sizes) -> int:
        return micro.shape(Demand(sizes["M"], sizes["N"], sizes["K"]))[1]

    def step_bytes(sizes: Sizes) -> int:
        shape, rows = micro.shape(Demand(sizes["M"], sizes["N"], sizes["K"]))
        return rows * shape.depth * padded_k(sizes["K"])

    def static(numbers: Mapping[str, Any]) -> dict[str, Any]:
        shape, _ = micro.shape(Demand(numbers["m"], numbers["n"], numbers["depth"]))
        fixed = {"source": Source("u8"), "epilogue": Epilogue(), "fused": True}
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
        "residual_stride": 0,
        "out_stride": lambda sizes: sizes["N"],
        "depth": lambda sizes: sizes["K"],
        "block_rows": block_rows,
        "private": private,
        "private_bytes": step_bytes,
    }
    kernel = CpuKernel(product, micro.isa, static)
    return Request(kernel, matmul, lambda sizes: 1, given=given)
