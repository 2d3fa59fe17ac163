"""Numba-CUDA: functions under numba.cuda.jit."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from lowbit_lab.compare.gpu import PtxKind, arguments
from lowbit_lab.compare.kind import Built, kinds
from lowbit_lab.compare.numba_types import typed, words
from lowbit_lab.compare.problem import Problem, Variant
from lowbit_lab.compare.toolchain import MissingToolError, find_nvvm

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
        if not type(kernel).__module__.startswith(("numba.cuda.", "numba_cuda.")):
            return False
        # A device function is a part of kernels.
        return hasattr(kernel, "py_func") and not kernel.targetoptions.get("device")

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return kernel.py_func

    def words(self, error: Exception, kernel: Any, file: Path) -> str:
        return words(error, *self.text(kernel))

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
        lines, first, file = self.text(variant.kernel)
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
        except MissingToolError as error:
            missing.append(str(error))
        else:
            with _capability(capability):
                made = compile_cuda(
                    function, numba.types.void, wanted, debug=False, lineinfo=True, fastmath=fast,
                    nvvm_options={}, cc=capability,
                )  # fmt: skip
                types = typed(made.type_annotation, lines, first)
                ptx, _ = compile_ptx(
                    function, wanted, debug=False, lineinfo=True, fastmath=fast, cc=capability,
                    opt=options.get("opt") is not False,
                )  # fmt: skip
        return Built(
            lines=lines,
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


@contextlib.contextmanager
def _capability(capability: tuple[int, int]) -> Iterator[None]:
    """Within it, Numba compiles the functions that a kernel calls, warp shuffles among them, for
    this compute capability. It asks the GPU otherwise, of which there may be none."""
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    device = SimpleNamespace(compute_capability=capability)
    with patch.object(dispatcher, "get_current_device", lambda: device):
        yield
