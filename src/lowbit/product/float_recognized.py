"""Products of floats that were made before in the same way: see jit.recognize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

from lowbit.jit.builtin import Finder, builtin
from lowbit.jit.kernel import Program
from lowbit.jit.recognize import Array, Fresh, Same, constant, signature, thread_check
from lowbit.product.arguments import allocation
from lowbit.product.prepare import KEPT

F = TypeVar("F", bound=Callable[..., Any])

_MOST = 4  # ways to call with operands of the same shapes that are told apart


class OneCall(NamedTuple):
    """A product that is one call: what fills the slots of its program, but for a, b and out.
    `swapped`: it is computed transposed. `scratch`: offsets of so many bytes."""

    program: Program
    words: Mapping[str, int]
    scratch: Mapping[str, int]
    scratch_bytes: int
    swapped: bool
    threads: int


@dataclass
class RecognizedGemms:
    """The calls that are recognized, by the shapes of a and b.

    `calls` holds callables of all arguments in order; they return the result, or None where a call
    is another.
    """

    calls: dict[Any, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    _last: dict[Any, OneCall] = field(default_factory=dict)
    _learned: set[Any] = field(default_factory=set)

    def builtin(self, function: F) -> F:
        """The function as machine code enters it, which tries what is recognized first."""
        return builtin(function, Finder(calls=self.calls))

    def learn(
        self,
        one: OneCall,
        a: npt.NDArray[Any],
        b: npt.NDArray[Any],
        out: npt.NDArray[Any] | None,
        result: npt.NDArray[Any],
        bits: int,
        others: tuple[Any, ...],
        most: int | None,
    ) -> None:
        """Recognize such a call from now on, if the last one with such shapes was alike.

        bits: of alpha. others: c and the factors, then the output's type, the number of threads and
        the instruction set. most: as `thread_check` has it.
        """
        key = a.shape, b.shape
        if self._last.get(key) is not one:
            if len(self._last) > KEPT:
                for table in (self._last, self.calls, self._learned):
                    table.clear()
            self._last[key] = one
            return
        known = self.calls.get(key, ())
        *before, dtype, threads, isa = others
        fixed = [one for one in map(constant, before) if one is not None]
        if len(known) >= _MOST or len(fixed) < len(before):
            return
        left, right = ("b", "a") if one.swapped else ("a", "b")
        target = Same(None) if out is None else Array(out, "out", written=True)
        checks = [Array(a, left), Array(b, right), *fixed, target, Same(dtype),
                  thread_check(threads, most), Same(isa)]  # fmt: skip
        mark = one.program, one.threads, bits, signature(checks)
        if mark in self._learned:  # but machine code could not serve this one
            return
        fresh = Fresh(*allocation(result.shape, result.dtype), "out") if out is None else None
        words = {**one.words, "alpha": bits}
        call = one.program.recognizer(
            words, one.scratch, one.scratch_bytes, checks, fresh, thread_count=one.threads
        )
        if call is not None:
            self._learned.add(mark)
            self.calls[key] = (*known, call)
