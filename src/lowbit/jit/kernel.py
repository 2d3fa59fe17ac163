"""A kernel: a text, its parameters, and its backends.

    @kernel
    def scale_rows(k: Builder, x: F32Pointer, rows: Int, *, lanes: int) -> None: ...

Positional parameters are run-time arguments (pointers and 64-bit integers), keyword-only ones are
static: each combination of them is a program of its own.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.isa import InstructionSet
from lowbit.isa.types import Pointer, Type
from lowbit.isa.value import Value
from lowbit.jit import cache, threads, verbose
from lowbit.jit import compile as compiler
from lowbit.jit.cached_call import Check, Fresh, cached_call
from lowbit.jit.entry import bound
from lowbit.registry.locks import cached_property

if TYPE_CHECKING:
    from lowbit.jit.interpret import Interpreter
    from lowbit.jit.memory import Access

_OTHER = re.compile("stride|item_|block|private|first")  # numbers that are no sizes of a problem


class Program:
    """Machine code of one kernel for one instruction set and static arguments.

    An argument is an int, a NumPy array for a pointer to its first element, or None for 0. `sizes`:
    the parameters that say how much is computed.
    """

    def __init__(
        self,
        name: str,
        loaded: compiler.Loaded,
        isa: InstructionSet,
        names: Iterable[str],
        sizes: Collection[str] = (),
    ) -> None:
        self.isa = isa
        self.names = tuple(names)
        self.sizes = sizes
        self.name = name
        self.address = loaded.address
        self._loaded = loaded
        self._unbound: dict[int, Callable[..., None]] = {}

    def bind(
        self, thread_count: int, varying: Sequence[str] | Mapping[str, tuple[int, int]], /,
        **fixed: Any,
    ) -> Callable[..., None]:  # fmt: skip
        """This program for so many threads, as a function of the parameters `varying`, in order, or
        of what fills them: for each the argument, and how many bytes behind its address.

        The others are `fixed` by name, and kept alive: what a call decides once costs later calls
        nothing. TypeError where a parameter is missing, unknown or named twice.
        """
        named = [*varying, *fixed]
        if sorted(named) != sorted(self.names):
            missing = [name for name in self.names if name not in named]
            other = [name for name in named if name not in self.names or named.count(name) > 1]
            raise TypeError(f"a kernel's parameters: {missing} are missing, {other} do not fit")
        if not isinstance(varying, Mapping):
            varying = {name: (argument, 0) for argument, name in enumerate(varying)}
        call = bound(self._loaded, thread_count, self.names, varying, fixed)
        return call if thread_count == 1 else threads.Shared(call)

    def cached_call(
        self, words: Mapping[str, int], scratch: Mapping[str, int], scratch_bytes: int,
        checks: Sequence[Check], fresh: Fresh | None, kept: Any = None, keeps_gil: bool = False,
        thread_count: int = 1,
    ) -> Callable[..., Any] | None:  # fmt: skip
        """This program behind a comparison of arguments: see jit.cached_call.

        `kept` lives as long as what is returned. `keeps_gil`: while it runs.
        """
        return cached_call(
            self._loaded, self.names, words, scratch, scratch_bytes, checks, fresh, kept, keeps_gil,
            thread_count,
        )  # fmt: skip

    def __call__(self, thread_count: int, *arguments: Any) -> None:
        """Run with one argument for each parameter, in order."""
        call = self._unbound.get(thread_count)
        if call is None:
            call = self.bind(thread_count, self.names)
            if verbose.LEVEL:
                call = verbose.telling(call, partial(self._told, thread_count))
            self._unbound[thread_count] = call
        call(*arguments)

    def told(self, thread_count: int, words: Mapping[str, Any], name: str = "") -> str:
        """What a line of jit.verbose says of a launch with these words; name: whom it serves."""
        sizes = " ".join(f"{size}={words[size]}" for size in self.sizes)
        return verbose.line(name or self.name, "-", sizes, self.name, self.isa.name, thread_count)

    def _told(self, thread_count: int, *arguments: Any) -> str:
        return self.told(thread_count, dict(zip(self.names, arguments, strict=True)))


class Kernel:
    """A kernel text with its parameter types."""

    def __init__(self, text: Callable[..., None]) -> None:
        self.text = text
        self.name = text.__name__
        self.__doc__ = text.__doc__
        self._programs: dict[tuple[Any, ...], Program] = {}

    @cached_property
    def types(self) -> dict[str, Type]:
        """Each positional parameter's type. Read when asked for: a process uses few kernels."""
        hints = typing.get_type_hints(self.text, include_extras=True)
        code = self.text.__code__
        return {n: typing.get_args(hints[n])[1] for n in code.co_varnames[1 : code.co_argcount]}

    def ir(self, isa: InstructionSet, /, **static: Any) -> str:
        """The LLVM IR of the text, before optimization."""
        from lowbit.jit.emit import emit

        return str(emit(self.text, list(self.types.values()), isa, self.name, **static))

    def assembly(self, isa: InstructionSet, /, **static: Any) -> str:
        """The assembly that would run."""
        return compiler.assembly(self.ir(isa, **static), isa)

    def program(self, isa: InstructionSet, /, **static: Any) -> Program:
        """The machine code for this instruction set: from memory, from disk, or compiled now."""
        key = (isa.name, *sorted(static.items()))
        found = self._programs.get(key)
        if found is None:
            with compiler.LOCK:
                found = self._programs.get(key)
                if found is None:
                    found = self._programs[key] = self._build(isa, static)
        return found

    def _build(self, isa: InstructionSet, static: dict[str, Any]) -> Program:
        if isa.missing():  # which also asks for the permission that some sets need
            raise RuntimeError(f"{self.name} for {isa.name} cannot run here: {isa.missing()}")
        name = f"{self.text.__module__}.{self.text.__qualname__}"
        source = (name, sorted(static.items())) if cache.is_known(self.text) else ()
        loaded = cache.load(self.name, isa, partial(self.ir, isa, **static), *source)
        numbers = [name for name, type_ in self.types.items() if not isinstance(type_, Pointer)]
        sizes = [name for name in numbers if not _OTHER.search(name)]
        return Program(self.name, loaded, isa, self.types, sizes)

    def interpret(
        self,
        isa: InstructionSet,
        arguments: dict[str, Any],
        trace: list[Access] | None = None,
        /,
        **static: Any,
    ) -> Interpreter:
        """Run the text on arrays (for its pointers) and ints, every access checked; outputs are
        written in place. Returns the interpreter, which has counted the instructions.

        A pointer argument may be None where the text, for these static arguments, does not use it.
        OutOfBoundsError: an access touches memory that is no element's.
        """
        from lowbit.jit.interpret import Interpreter

        machine = Interpreter(isa, trace)
        values: list[Value] = []
        for name, type_ in self.types.items():
            given = arguments[name]
            if isinstance(type_, Pointer):
                array = np.zeros(0, type_.element.numpy) if given is None else given
                values.append(machine.pointer(name, array, type_.element))
            else:
                values.append(machine.constant(given, type_))
        with np.errstate(all="ignore"):
            self.text(machine, *values, **static)
        return machine


kernel = Kernel
"""The decorator: makes a kernel of a text."""
