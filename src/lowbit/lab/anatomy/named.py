"""The anatomy of a kernel of lowbit, by its name."""

from __future__ import annotations

from lowbit.lab.anatomy.result import Anatomy
from lowbit.lab.source import PRODUCT, request_named


def anatomy_of(name: str, shape: str, sm: int, *, time: bool = True) -> Anatomy:
    """Take `product:ISA` apart at a shape `MxK:KxN`, or a Triton kernel for a compute capability.

    ValueError, with the names that there are, for another name.
    """
    if name.startswith(PRODUCT):
        from lowbit.lab.anatomy import cpu

        return cpu.anatomy(name.removeprefix(PRODUCT), shape, time=time)
    from lowbit.lab.anatomy import triton

    return triton.anatomy(request_named(name), sm)
