"""Numba-CUDA: functions under numba.cuda.jit."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np

from lowbit.lab.compare.gpu import PtxKind, arguments
from lowbit.lab.compare.kind import Built, kinds
from lowbit.lab.compare.numba_types import typed
from lowbit.lab.compare.problem import Problem
from lowbit.lab.compare.toolchain import MissingToolError, find_nvvm
from lowbit.lab.compare.variant import Variant, source_of

_SIGNATURES = "lowbit_signatures"


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Within it, numba.cuda.jit keeps an explicit signature for later, so that a file can be read
    where there is no GPU."""
    from numba import cuda

    original = cuda.jit

    def jit(func_or_sig: Any = None, *arguments: Any, **options: Any) -> Any:
        if func_or_sig is None or isinstance(func_or_sig, FunctionType) or options.get("device"):
            return original(func_or_sig, *arguments, **options)

        def decorate(function: Any) -> Any:
            made = original(*arguments, **options)(function)
            setattr(made, _SIGNATURES, func_or_sig)
            return made

        return decorate

    with patch.object(cuda, "jit", jit):
        yield


@kinds.register("Numba-CUDA")
class NumbaCuda(PtxKind):
    """Compiled by Numba and NVVM."""

    title = "Numba-CUDA"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        home = type(kernel).__module__
        return home.startswith(("numba.cuda.", "numba_cuda.")) and hasattr(kernel, "py_func")

    @classmethod
    def name_of(cls, kernel: Any) -> str:
        return kernel.py_func.__name__

    def parameters(self, kernel: Any) -> Sequence[str]:
        return [*inspect.signature(kernel.py_func).parameters]

    def flat(self, value: Any, address: Callable[[Any], int]) -> list[Any]:
        """An array is its owner and parent (none), elements, bytes of one, address, shape and
        strides in bytes."""
        shape = getattr(value, "shape", ())
        if not shape:
            return [value]
        if isinstance(value, np.ndarray):
            size, strides = value.itemsize, list(value.strides)
        else:
            size = value.element_size()
            strides = [size * step for step in value.stride()]
        return [0, 0, prod(shape), size, address(value), *shape, *strides]

    def build(self, variant: Variant, problem: Problem, sm: int) -> Built:
        import numba
        from numba.core import sigutils
        from numba.cuda.compiler import compile_cuda, compile_ptx

        function = variant.kernel.py_func
        lines, first, file = source_of(function)
        names = self.parameters(variant.kernel)
        given = arguments(variant, names, problem, problem.arrays())
        signature: Any = getattr(variant.kernel, _SIGNATURES, None)
        if isinstance(signature, list):
            signature = signature[0]
        if signature is None:
            signature = tuple(numba.typeof(one) for one in given)
        wanted, _ = sigutils.normalize_signature(signature)
        options = variant.kernel.targetoptions
        fast, capability = bool(options.get("fastmath")), divmod(sm, 10)
        types, missing, ptx = (), [], None
        try:
            find_nvvm()
            made = compile_cuda(
                function, numba.types.void, wanted, debug=False, lineinfo=True, fastmath=fast,
                nvvm_options={}, cc=capability,
            )  # fmt: skip
            types = typed(made.type_annotation, lines, first)
            ptx, _ = compile_ptx(
                function, wanted, debug=False, lineinfo=True, fastmath=fast, cc=capability,
                opt=options.get("opt") is not False,
            )  # fmt: skip
        except MissingToolError as error:
            missing.append(str(error))
        except Exception as error:  # numba-cuda has errors of its own
            if not type(error).__module__.startswith("numba"):
                raise
            raise ValueError(_first_line(error)) from None
        return Built(
            lines=tuple(lines),
            first_line=first,
            file=file,
            types=types,
            made_by=f"Numba {numba.__version__}",
            ptx=ptx,
            threads=prod(variant.block or (1,)),
            shared=variant.shared,
            most_registers=options.get("max_registers"),
            missing=tuple(missing),
        )


def _first_line(error: Exception) -> str:
    """What Numba says first, and the line of the file."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    said = [row for row in rows if not row.startswith(("Failed in", "During", "- Resolution"))]
    place = next((row for row in rows if row.startswith("File ")), "")
    return f"{said[0] if said else error}{f' ({place})' if place else ''}"
