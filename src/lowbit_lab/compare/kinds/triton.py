"""Triton kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from lowbit.spec import Array
from lowbit_lab.backends.ahead import compiled, complaint
from lowbit_lab.backends.backend import Request
from lowbit_lab.backends.kernel import KernelSubject
from lowbit_lab.checks.cases import check_request
from lowbit_lab.compare.kind import Built, Kind, Typed, kinds
from lowbit_lab.compare.problem import Baseline, Checked, Problem, Variant
from lowbit_lab.compare.ptx.execute import Launch
from lowbit_lab.compare.ptx.memory import Memory, packed_parameters
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.run.bind import TensorArgument

_OPTIONS = ("num_warps", "num_stages", "num_ctas")
_WARPS = 4
_VALUE = re.compile(r"^\s*%([A-Za-z_]\w*?)(?:_\d+)? = .*?([\w.!<>*x]+) loc\((#\w+)\)\s*$")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
_PLACE = re.compile(r'^(#\w+) = loc\("([^"]*)"(?::(\d+):\d+|\((#\w+)\))')


@kinds.register("Triton")
class TritonKind(Kind):
    """Its grid is in programs; num_warps and num_stages are constants. It needs a specification."""

    title = "Triton"
    needs_grid = on_gpu = True

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return type(kernel).__module__.startswith("triton.")

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        while not isinstance(kernel, FunctionType):
            kernel = kernel.fn
        return kernel

    def words(self, error: Exception, kernel: Any, file: Path) -> str:
        """Of functions that call each other the innermost one's error, and the innermost line of
        the file."""
        said, place = complaint(error, file)
        if place is None:
            return said
        text = file.read_text("utf-8").splitlines()[place.line - 1].strip()
        return f"{place.file}, line {place.line}: {text}\n{said}"

    def _subject(self, variant: Variant, problem: Problem) -> KernelSubject:
        from lowbit_lab.backends.kinds.triton import TritonKernel

        if problem.operation is None:
            raise ValueError(f"{variant.name}: a Triton kernel needs `spec`, a specification")
        names = {one.name for one in TritonKernel.of(variant.kernel).parameters}
        given = {n: v for n, v in variant.constants.items() if n in names}
        assert variant.grid is not None
        request = Request(
            variant.kernel, problem.operation, variant.grid, problem.output, given=given
        )
        return TritonKernel.bind(request)

    def build(self, variant: Variant, problem: Problem, sm: int) -> Built:
        import triton

        subject = self._subject(variant, problem)
        arrays = {name: str(one.dtype) for name, one in problem.inputs.items()}
        assert problem.operation is not None
        arrays[problem.operation.result.name] = problem.operation.result.dtype
        kernel: Any = subject.kernel
        arguments = subject.binding.arguments(problem.sizes, _strides(problem))
        options = {n: variant.constants[n] for n in _OPTIONS if n in variant.constants}
        made = compiled(kernel, arguments, arrays, sm, **options)
        return Built(
            *self.text(variant.kernel),
            types=_types(made.stages["ttir"]),
            made_by=f"Triton {triton.__version__}",
            ptx=made.ptx,
            threads=32 * options.get("num_warps", _WARPS),
            stages=made.stages,
            shared=made.shared,
            widest=_widest(made.stages["ttir"]),
        )

    def launch(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Array]
    ) -> Launch:
        """Constants are in the code; what Triton passes besides is 0."""
        assert built.ptx is not None
        subject = self._subject(variant, problem)
        kernel: Any = subject.kernel
        ptx, memory = parse(built.ptx, built.file), Memory()
        places = {name: memory.place(name, one) for name, one in arrays.items()}
        constants = {one.name for one in kernel.parameters if one.constant}
        values = [
            places[one.name] if isinstance(one, TensorArgument) else one
            for name, one in kernel.decided(
                subject.binding.arguments(problem.sizes, _strides(problem))
            ).items()
            if name not in constants and one != 1
        ]
        types = {one.name: (one.letter, one.bits) for one in ptx.parameters}
        values += [0] * (len(types) - len(values))
        grid, block = subject.grid_at(problem.sizes), (built.threads, 1, 1)
        return Launch(ptx, memory, packed_parameters(types, values), grid, block, built.shared)

    def check(
        self, variant: Variant, built: Built, problem: Problem, first: Baseline | None
    ) -> tuple[Checked, Array | None]:
        subject = self._subject(variant, problem)
        found = check_request(subject.request, "cpu", few=True, stop=True)
        said = str(next(iter(found.findings), f"{found.cases} cases"))
        against = f"the specification {found.operation}"
        return Checked(found.ok, against, "Triton's interpreter", said), None

    def call(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        subject = self._subject(variant, problem)
        kernel: Any = subject.kernel
        given = subject.binding.arguments(problem.sizes, _strides(problem))
        values = {
            name: arrays[one.name] if isinstance(one, TensorArgument) else one
            for name, one in kernel.decided(given).items()
        }
        options = {n: variant.constants[n] for n in _OPTIONS if n in variant.constants}
        grid = subject.grid_at(problem.sizes)
        return lambda: kernel.jitted[grid](**values, **options)


def _strides(problem: Problem) -> dict[str, list[int]]:
    assert problem.operation is not None
    tensors = (*problem.operation.inputs, problem.operation.result)
    shapes = {one.name: one.shape(problem.sizes) for one in tensors}
    return {n: [int(np.prod(s[i + 1 :])) for i in range(len(s))] for n, s in shapes.items()}


def _widest(ttir: str) -> int:
    """Elements of the largest tensor."""
    shapes = _SHAPE.findall(ttir)
    return max((prod(map(int, one.rstrip("x").split("x"))) for one in shapes), default=1)


def _types(ttir: str) -> tuple[Typed, ...]:
    """The variables of the text with their types, as Triton names values after them."""
    places = {one[1]: one for row in ttir.splitlines() if (one := _PLACE.match(row))}

    def line(name: str | None) -> int | None:
        for _ in range(4):
            place = places.get(name or "")
            if place is None:
                return None
            if place[3]:
                return int(place[3])
            name = place[4]
        return None

    found: dict[str, Typed] = {}
    for row in ttir.splitlines():
        one = _VALUE.match(row)
        place = places.get(one[3]) if one else None
        # A location with a name is that of a variable.
        if one is not None and place is not None and place[4]:
            # The last value of a name is what the text's variable ends as.
            type_ = re.sub(r"!tt\.ptr<(\w+)>", r"\1", one[2]) if " tt.load " in row else one[2]
            found[place[2]] = Typed(place[2], type_, line(one[3]))
    return tuple(found.values())
