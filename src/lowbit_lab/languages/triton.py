"""Triton kernels, run by Triton's interpreter, compiled, and on a GPU run by Triton itself."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import numpy as np

from lowbit.spec import Array
from lowbit_lab.backends.ahead import Locations, compiled, complaint
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.kernel import KernelBackend, KernelSubject
from lowbit_lab.backends.language import languages
from lowbit_lab.backends.unstated import completed
from lowbit_lab.backends.widths import widths_of
from lowbit_lab.compare.built import Built, Typed
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.ptx.execute import Launch
from lowbit_lab.compare.ptx.memory import Memory as PtxMemory
from lowbit_lab.compare.ptx.memory import packed_parameters
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.run.addresses import address_of
from lowbit_lab.run.bind import Parameter, TensorArgument
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import UnsupportedError, cause_of, last_line
from lowbit_lab.run.trace import Grid, Program
from lowbit_lab.run.triton import RUNNER, interpreted, triton_modules
from lowbit_lab.run.variables import Values, VariableWatch, plain

_OPTIONS = ("num_warps", "num_stages", "num_ctas")
_WARPS = 4
_VALUE = re.compile(r"^\s*%([A-Za-z_]\w*?)(?:_\d+)? = .*?([\w.!<>*x]+) loc\((#\w+)\)\s*$")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")


@languages.register("Triton")
@dataclass(frozen=True, kw_only=True)
class TritonKernel(KernelBackend):
    """A Triton kernel without its decorators. Its grid is in programs; num_warps and num_stages are
    constants, which only a compiler reads.

    `constants` are those of the first configuration of triton.autotune, `alternatives` those of the
    others, `heuristics` the functions of triton.heuristics; `jitted` is what triton.jit made.
    """

    title = "Triton"
    written = "a function under triton.jit"
    for_gpu = True
    has_addresses = True

    heuristics: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    jitted: Any

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a function under triton.jit, perhaps autotuned."""
        return type(kernel).__module__.startswith("triton.")

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        while not isinstance(kernel, FunctionType):
            kernel = kernel.fn
        return kernel

    @classmethod
    def of(cls, kernel: Any) -> Self:
        """Unwrap what triton.jit, autotune and heuristics have wrapped."""
        configurations, heuristics = list[dict[str, Any]](), dict[str, Any]()
        jitted, undone = kernel, dict[str, bool]()
        while not isinstance(kernel, FunctionType):
            configurations += [config.kwargs for config in getattr(kernel, "configs", ())]
            undone |= dict.fromkeys(getattr(kernel, "reset_to_zero", None) or (), False)
            undone |= dict.fromkeys(getattr(kernel, "restore_value", None) or (), True)
            if type(kernel).__name__ == "Heuristics":
                heuristics |= kernel.values
            jitted, kernel = kernel, kernel.fn
        first, *others = configurations or [{}]
        triton = triton_modules()[0]
        return cls(
            text=kernel,
            description=f"Triton {triton.__version__}",
            parameters=tuple(
                Parameter(
                    p.name,
                    "constexpr" in str(p.annotation),
                    None if p.default is inspect.Parameter.empty else p.default,
                )
                for p in inspect.signature(kernel).parameters.values()
            ),
            # The second is where the methods are that dataclasses make.
            machinery=(str(Path(triton.__file__).parent), "<string>"),
            constants=first,
            alternatives=tuple(others),
            undone=undone,
            # Under TRITON_INTERPRET=1 it is made to be interpreted, on a GPU's tensors too.
            on_gpu=type(jitted).__name__ != "InterpretedFunction",
            heuristics=heuristics,
            jitted=jitted,
        )

    def decided(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments after the heuristics."""
        made = dict(arguments)
        for name, choose in self.heuristics.items():
            made[name] = choose(made)
        return made

    @property
    def widths(self) -> tuple[int, ...]:
        return widths_of(self.text)

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """UnsupportedError if the interpreter is at fault."""
        constants, given = {p.name for p in self.parameters if p.constant}, self.decided(arguments)
        tl, interpreter = triton_modules()[1:]
        builder = interpreter.interpreter_builder
        with interpreted(memory) as rewritten:
            values = {
                name: _of_language(value, tl)
                if name in constants
                else _converted(value, memory, interpreter, tl)
                for name, value in given.items()
            }
            text = rewritten(self.text)
            if memory.recorder is not None:
                shown = partial(_shown, tl=tl)
                memory.recorder.watch = VariableWatch(
                    memory, memory.recorder, self.text.__code__, shown
                )
            builder.set_grid_dim(*grid)
            for program in programs:
                memory.begin(program)
                builder.set_grid_idx(*program)
                try:
                    text(**values)
                except Exception as error:
                    _raise_unsupported(error, memory, interpreter)
                    raise

    @classmethod
    def interpret(cls, request: Request) -> KernelSubject:
        kernel = cls.of(request.variant.kernel)
        options = {*_OPTIONS} - {one.name for one in kernel.parameters}
        asked = {n: one for n, one in request.variant.constants.items() if n not in options}
        own = {name: one for name, one in kernel.constants.items() if name not in asked}
        whole = request.launched(constants={**own, **asked})
        known = completed(whole, kernel.text, kernel.parameters)
        given = {n: one for n, one in known.variant.constants.items() if n not in own}
        return super().interpret(known.launched(constants=given))

    def start(self, arguments: Mapping[str, Any], grid: Grid) -> None:
        self.jitted[grid](**self.decided(arguments))

    def refused(self, arguments: Mapping[str, Any], dtypes: Mapping[str, str]) -> Finding | None:
        """By Triton's compiler, for an H100."""
        if not self.on_gpu:
            return None
        try:
            compiled(self, arguments, dtypes, 90)
        except (OSError, KeyError):  # no assembler, or no such type: nothing is known
            return None
        except Exception as error:  # compilers raise many kinds
            said, place = complaint(error, Path(inspect.getfile(self.text)))
            return Finding("not-compiled", said.strip(), place=place, device="Triton's compiler")
        return None

    # Compiled, for a GPU that need not be there.

    @classmethod
    def words(cls, error: Exception, kernel: Any, file: Path) -> str:
        """Of functions that call each other the innermost one's error, and the innermost line of
        the file."""
        said, place = complaint(error, file)
        if place is None:
            return said
        text = file.read_text("utf-8").splitlines()[place.line - 1].strip()
        return f"{place.file}, line {place.line}: {text}\n{said}"

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        import triton

        subject = cls.interpret(cls.request(variant, problem))
        arrays = {name: str(one.dtype) for name, one in problem.inputs.items()}
        assert problem.operation is not None
        arrays[problem.operation.result.name] = problem.operation.result.dtype
        kernel: Any = subject.kernel
        arguments = subject.arguments_at(problem.sizes)
        options = {n: variant.constants[n] for n in _OPTIONS if n in variant.constants}
        made = compiled(kernel, arguments, arrays, sm, **options)
        return Built(
            *cls.source(variant.kernel),
            types=_types(made.stages["ttir"]),
            made_by=f"Triton {triton.__version__}",
            ptx=made.ptx,
            threads=32 * options.get("num_warps", _WARPS),
            stages=made.stages,
            shared=made.shared,
            widest=_widest(made.stages["ttir"]),
        )

    @classmethod
    def launch(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Array]
    ) -> Launch:
        """Constants are in the code; what Triton passes besides is 0."""
        assert built.ptx is not None
        subject = cls.interpret(cls.request(variant, problem))
        kernel: Any = subject.kernel
        ptx, memory = parse(built.ptx, built.file), PtxMemory()
        places = {name: memory.place(name, one) for name, one in arrays.items()}
        constants = {one.name for one in kernel.parameters if one.constant}
        values = [
            places[one.name] if isinstance(one, TensorArgument) else one
            for name, one in kernel.decided(subject.arguments_at(problem.sizes)).items()
            if name not in constants and one != 1
        ]
        types = {one.name: (one.letter, one.bits) for one in ptx.parameters}
        values += [0] * (len(types) - len(values))
        grid, block = subject.grid_at(problem.sizes), (built.threads, 1, 1)
        return Launch(ptx, memory, packed_parameters(types, values), grid, block, built.shared)

    @classmethod
    def call(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        subject = cls.interpret(cls.request(variant, problem))
        kernel: Any = subject.kernel
        values = {
            name: arrays[one.name] if isinstance(one, TensorArgument) else one
            for name, one in kernel.decided(subject.arguments_at(problem.sizes)).items()
        }
        options = {n: variant.constants[n] for n in _OPTIONS if n in variant.constants}
        grid = subject.grid_at(problem.sizes)
        return lambda: kernel.jitted[grid](**values, **options)


def _raise_unsupported(raised: BaseException, memory: Memory, interpreter: Any) -> None:
    """UnsupportedError if the interpreter is at fault: it refuses, it has no such operation, the
    function of the language is none that it replaces, or no line of the kernel takes part."""
    error = cause_of(raised)
    missing = isinstance(error, AttributeError) and error.obj is interpreter.interpreter_builder
    unknown = isinstance(error, ValueError) and "`_semantic` argument" in str(error)
    if isinstance(error, NotImplementedError) or missing or unknown:
        why = "it is part of the language for a GPU only" if unknown else str(error)
        made = UnsupportedError(f"{RUNNER} cannot run this line: {why}")
        raise made.with_traceback(error.__traceback__)
    if last_line(error, memory.machinery) is None:
        version = triton_modules()[0].__version__
        raise UnsupportedError(
            f"Triton {version} is another one inside than the checker knows: "
            f"{type(error).__name__}: {error}"
        ) from error


def _of_language(value: Any, tl: Any) -> Any:
    """A constant; of a function of the language what it is replaced by now."""
    if not getattr(value, "__triton_builtin__", False):
        return value
    name = value.__name__
    return getattr(tl, name, None) or getattr(tl.math, name, value)


def _shown(value: Any, tl: Any) -> Values:
    """A variable of a kernel: a number, or a block; not of pointers."""
    if not isinstance(value, tl.tensor):
        return plain(value)
    dtype = value.dtype.scalar
    if dtype.is_ptr():
        return None
    data = value.handle.data
    data = data.reshape(()) if not value.shape else data
    return data, "bfloat16" if dtype == tl.bfloat16 else str(data.dtype)


_NAMES = {
    "float8_e4m3fn": "float8e4nv",
    "float8_e4m3fnuz": "float8e4b8",
    "float8_e5m2": "float8e5",
    "float8_e5m2fnuz": "float8e5b16",
}
"""Of dtypes, where Triton has its own."""


def _converted(value: Any, memory: Memory, interpreter: Any, tl: Any) -> Any:
    if isinstance(value, TensorArgument):
        number = list(memory.tensors).index(value.name)
        dtype = value.dtype or memory.tensors[value.name].type.dtype
        pointer = tl.pointer_type(
            tl.int1 if dtype == "bool" else getattr(tl, _NAMES.get(dtype, dtype))
        )
        address = np.array([address_of(number) + value.offset], np.uint64)
        return tl.tensor(interpreter.TensorHandle(address, pointer), pointer)
    if isinstance(value, tuple):
        return tl.tuple([_converted(one, memory, interpreter, tl) for one in value])
    if hasattr(value, "block_shape"):
        # A descriptor made by the host (triton.tools.tensor_descriptor).
        value = copy.copy(value)
        value.base = _converted(value.base, memory, interpreter, tl)
        return interpreter._implicit_cvt(value)
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return interpreter._implicit_cvt(value)


def _widest(ttir: str) -> int:
    """Elements of the largest tensor."""
    shapes = _SHAPE.findall(ttir)
    return max((prod(map(int, one.rstrip("x").split("x"))) for one in shapes), default=1)


def _types(ttir: str) -> tuple[Typed, ...]:
    """The variables of the text with their types, as Triton names values after them."""
    locations, found = Locations(ttir), dict[str, Typed]()
    for row in ttir.splitlines():
        one = _VALUE.match(row)
        if one is not None and (name := locations.variable(one[3])):
            # The last value of a name is what the text's variable ends as.
            type_ = re.sub(r"!tt\.ptr<(\w+)>", r"\1", one[2]) if " tt.load " in row else one[2]
            place = locations.place(one[3])
            found[name] = Typed(name, type_, place and place.line)
    return tuple(found.values())
