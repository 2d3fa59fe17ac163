"""Kernels for a CPU: functions under numba.njit, and lowbit's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from lowbit import isa as instruction_sets
from lowbit.jit.kernel import Kernel
from lowbit.jit.threads import max_threads
from lowbit.spec import Array
from lowbit_lab.backends.backend import Request
from lowbit_lab.backends.kinds.cpu import CpuKernel
from lowbit_lab.checks.cases import check_request
from lowbit_lab.compare import assembly, gpu
from lowbit_lab.compare.kind import Built, Kind, kinds
from lowbit_lab.compare.numba_types import typed, words
from lowbit_lab.compare.problem import Baseline, Checked, Problem, Variant


@kinds.register("Numba")
class NumbaCpu(Kind):
    """A function under numba.njit of arrays and numbers, which writes into the result."""

    title = "Numba CPU"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        home = type(kernel).__module__
        return home.startswith("numba.core.") and hasattr(kernel, "py_func")

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return kernel.py_func

    def arguments(self, variant: Variant, problem: Problem, arrays: Mapping[str, Any]) -> list[Any]:
        """What it is called with."""
        names = [*inspect.signature(variant.kernel.py_func).parameters]
        return gpu.arguments(variant, names, problem, arrays)

    def signature(self, variant: Variant, problem: Problem) -> tuple[Any, ...]:
        """The types of its arguments: those that it is declared with, if it is."""
        import numba

        given = self.arguments(variant, problem, problem.arrays())
        types = tuple(numba.typeof(one) for one in given)
        stated = [one.args for one in variant.kernel.nopython_signatures]
        return types if types in stated or not stated else stated[0]

    def build(self, variant: Variant, problem: Problem, sm: int) -> Built:
        import numba

        kernel = variant.kernel
        lines, first, file = self.text(kernel)
        signature = self.signature(variant, problem)
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

    def check(
        self, variant: Variant, built: Built, problem: Problem, first: Baseline | None
    ) -> tuple[Checked, Array | None]:
        arrays = problem.arrays()
        self.call(variant, built, problem, arrays)()
        result = arrays[problem.result]
        return problem.judge(result, first, "a call"), result

    def call(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        given = self.arguments(variant, problem, arrays)
        return lambda: variant.kernel(*given)

    def words(self, error: Exception, kernel: Any, file: Path) -> str:
        return words(error, *self.text(kernel))


@kinds.register("lowbit")
class LowbitCpu(Kind):
    """A lowbit kernel, or one with an instruction set and static arguments (lab.CpuKernel)."""

    title = "lowbit"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, (Kernel, CpuKernel))

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return (kernel.kernel if isinstance(kernel, CpuKernel) else kernel).text

    def asked(self, variant: Variant) -> CpuKernel:
        """The kernel with its instruction set."""
        kernel: Any = variant.kernel
        return CpuKernel(kernel) if isinstance(kernel, Kernel) else kernel

    def static(self, variant: Variant, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its static arguments for these arguments."""
        static = self.asked(variant).static
        return dict(static(given) if callable(static) else static)

    def arguments(
        self, variant: Variant, problem: Problem, arrays: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of its parameters."""
        names = [*self.asked(variant).kernel.types]
        return problem.arguments(names, arrays, variant.constants)

    def build(self, variant: Variant, problem: Problem, sm: int) -> Built:
        arrays = problem.arrays()
        given = self.arguments(variant, problem, arrays)
        asked, static = self.asked(variant), self.static(variant, given)
        isa = instruction_sets.named(asked.isa)
        return Built(
            *self.text(variant.kernel),
            made_by=f"lowbit for {isa.name}",
            code=assembly.parse(asked.kernel.assembly(isa, **static)),
        )

    def check(
        self, variant: Variant, built: Built, problem: Problem, first: Baseline | None
    ) -> tuple[Checked, Array | None]:
        if problem.operation is None:
            arrays = problem.arrays()
            self.call(variant, built, problem, arrays)()
            return problem.judge(arrays[problem.result], first, "a call"), arrays[problem.result]
        asked = self.asked(variant)
        given = {n: v for n, v in variant.constants.items() if n in asked.kernel.types}
        request = Request(asked, problem.operation, output=problem.output, given=given)
        found = check_request(request, "cpu", few=True, stop=True)
        said = str(next(iter(found.findings), f"{found.cases} cases"))
        return Checked(
            found.ok, f"the specification {found.operation}", "lowbit's interpreter", said
        ), None

    def call(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        given = self.arguments(variant, problem, arrays)
        asked, static = self.asked(variant), self.static(variant, given)
        program = asked.kernel.program(instruction_sets.named(asked.isa), **static)
        values: Sequence[Any] = [*given.values()]
        return lambda: program(max_threads(), *values)
