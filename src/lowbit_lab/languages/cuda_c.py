"""CUDA C, compiled by NVRTC or nvcc."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import languages
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.gpu import PtxLanguage
from lowbit_lab.compare.problem import CudaC, Problem
from lowbit_lab.compare.toolchain import MissingToolError, compile_cuda_c


@languages.register("CUDA C")
class CudaCKernel(PtxLanguage):
    """Its types are those that the text declares."""

    title = "CUDA C"
    written = "lowbit_lab.compare.cuda_c('...')"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, CudaC)

    @classmethod
    def name_of(cls, kernel: Any) -> str:
        return kernel.name

    @classmethod
    def source(cls, kernel: Any) -> tuple[Sequence[str], int, str]:
        return kernel.source.splitlines(), kernel.first_line, kernel.file

    @classmethod
    def names(cls, kernel: Any) -> Sequence[str]:
        return kernel.parameters

    @classmethod
    def flat(cls, value: Any, address: Callable[[Any], int]) -> list[Any]:
        return [address(value) if getattr(value, "shape", ()) else value]

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        kernel: CudaC = variant.kernel
        # The name must not be mangled, and lines are those of the file that the text stands in.
        text = f'#line {kernel.first_line} "{kernel.file}"\n{kernel.source}\n'
        if 'extern "C"' not in kernel.source:
            text = f'extern "C" {{\n{text}}}\n'
        ptx, made_by, missing = None, "", list[str]()
        try:
            ptx, made_by = compile_cuda_c(text, kernel.file, sm)
        except MissingToolError as error:
            missing.append(str(error))
        return Built(
            *cls.source(kernel),
            made_by=made_by,
            ptx=ptx,
            entry=kernel.name if ptx and re.search(rf"\.entry\s+{kernel.name}\b", ptx) else None,
            threads=prod(variant.block or (1,)),
            shared=variant.shared,
            missing=tuple(missing),
        )
