"""Kernels in Triton: exercises/ to learn from, and fast/ ones."""

from __future__ import annotations

import re
import warnings
from functools import cache

from lowbit.registry.extras import install, require

OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that these kernels, and the checker, are made for, both included."""


@cache
def require_triton() -> None:
    """ModuleNotFoundError without Triton, ImportError if it lacks what the kernels need; a warning
    for a version that they are not made for."""
    require("a kernel for GPUs", "gpu", "triton")
    import triton

    known = "lowbit's kernels are made for Triton {}.{} to {}.{}".format(*OLDEST, *NEWEST)
    known += f" and this is {triton.__version__}; {install('gpu')}"
    try:
        import triton.tools.tensor_descriptor
    except ImportError as error:
        raise ImportError(f"{known} ({error})", name=error.name) from None
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) <= NEWEST:
        warnings.warn(known, stacklevel=2)
