"""Functions for a CPU under numba.njit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import languages
from lowbit_lab.compare import assembly
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.numba_types import NumbaLanguage, typed
from lowbit_lab.compare.problem import Problem


@languages.register("Numba")
class NumbaCpu(NumbaLanguage):
    """A function under numba.njit of arrays and numbers, which writes into the result."""

    title = "Numba CPU"
    written = "a function under numba.njit"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        home = type(kernel).__module__
        return home.startswith("numba.core.") and hasattr(kernel, "py_func")

    @classmethod
    def signature(cls, variant: Variant, problem: Problem) -> tuple[Any, ...]:
        """The types of its arguments: those that it is declared with, if it is."""
        import numba

        given = cls.arguments(variant, problem, problem.arrays(variant)).values()
        types = tuple(numba.typeof(one) for one in given)
        stated = [one.args for one in variant.kernel.nopython_signatures]
        return types if types in stated or not stated else stated[0]

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        import numba

        kernel = variant.kernel
        lines, first, file = cls.source(kernel)
        signature = cls.signature(variant, problem)
        if signature not in kernel.overloads:
            kernel.compile(signature)
        made = kernel.overloads[signature]
        code = assembly.parse(made.library.get_asm_str(), made.fndesc.mangled_name, file)
        return Built(
            lines=lines,
            first_line=first,
            file=file,
            types=typed(made.type_annotation, lines, first),
            made_by=f"Numba {numba.__version__}",
            code=code,
        )

    @classmethod
    def call(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        given = [*cls.arguments(variant, problem, arrays).values()]
        return lambda: variant.kernel(*given)
