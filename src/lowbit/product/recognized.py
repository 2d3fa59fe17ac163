"""Calls that were made before in the same way, which machine code recognizes: see jit.recognize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lowbit.jit import verbose
from lowbit.jit.builtin import Finder, builtin
from lowbit.jit.recognize import Array, Check, Fresh, Integer, Real, Same, signature, thread_check
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.numerics import int_format
from lowbit.numerics.float32 import BEYOND, LEAST, MOST
from lowbit.product.arguments import allocation
from lowbit.product.prepare import PreparedProduct
from lowbit.weights.panels import PackedMatrix

_MOST = 8  # ways to call with one right operand that are told apart


F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _Seen:
    """What is known of the calls with one right operand."""

    last: PreparedProduct | None = None
    attempts: int = 0
    learned: set[Any] = field(default_factory=set)  # their signatures


class Recognized:
    """The calls of one public function that are recognized: for each right operand, in its
    dictionary `_calls`, callables that take all other arguments, in order, and return the result,
    or None where a call is another."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._arguments: tuple[str, ...] = ()
        self._seen: WeakKeyDictionary[PackedMatrix, _Seen] = WeakKeyDictionary()

    def builtin(self, function: F) -> F:
        """The function as machine code enters it, which tries what is recognized first. Its right
        operand is called b."""
        code = function.__code__  # type: ignore[attr-defined]
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._arguments = tuple(name for name in names if name != "b")
        return builtin(function, Finder("b", PackedMatrix, "_calls", self.operation))

    def known(self, b: PackedMatrix) -> tuple[Callable[..., Any], ...]:
        """What is recognized with this right operand."""
        return b._calls.get(self.operation, ())

    def ripe(self, b: PackedMatrix, prepared: PreparedProduct) -> bool:
        """Whether this call should be learned: if the last one with b was prepared alike."""
        if not prepared.small or type(b) is not PackedMatrix:
            return False
        seen = self._seen.setdefault(b, _Seen())
        if seen.last is prepared:
            return seen.attempts < _MOST
        seen.last = prepared
        return False

    def learn(
        self,
        b: PackedMatrix,
        right: tuple[int, int, int, int],
        prepared: PreparedProduct,
        checks: Mapping[str, Check | None],
        result: npt.NDArray[Any],
        fresh: bool,
        zero: npt.NDArray[np.int32] | None = None,
        parameters: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Recognize such a call, if it can be: with a check for each argument but b, by its name,
        and none that is None. `right`, `zero`, `parameters`: what the product was given; `result`:
        where it wrote; `fresh`: it made that itself."""
        seen = self._seen[b]
        wanted = [(name, checks[name]) for name in self._arguments]
        known = [check for _, check in wanted if check is not None]
        mark = prepared.product, fresh, signature(known)
        if mark in seen.learned:  # but machine code could not serve this one
            return
        seen.attempts += 1
        if len(known) < len(wanted):
            others = ", ".join(name for name, check in wanted if check is None)
            if seen.attempts == 1:
                verbose.log.info(
                    "miss,%s: calls are prepared in Python each time, since %s cannot be compared "
                    "or taken as given", self.operation, others,
                )  # fmt: skip
            return
        made = Fresh(*allocation(result.shape, result.dtype), "out") if fresh else None
        stride = result.strides[0] // result.itemsize
        call = prepared.recognizer(right, known, made, stride, zero, parameters)
        if call is not None:
            seen.learned.add(mark)
            b._calls[self.operation] = (*self.known(b), call)


def as_given(value: Any, used: Any, slot: str) -> Check | None:
    """The check of an operand that is absent, or an array whose memory the kernel reads itself."""
    if value is None:
        return Same(None)
    return Array(value, slot) if used is value else None


def out_as_given(out: Any, result: npt.NDArray[Any]) -> Check | None:
    """The check of an output whose memory the kernel writes itself, or that is made anew."""
    if out is None:
        return Same(None)
    in_rows = result.shape[1] == 1 or result.strides[1] == result.itemsize
    whole = result.strides[0] % result.itemsize == 0
    return Array(out, "out", written=True) if out is result and in_rows and whole else None


def threads_as_given(wanted: Any, prepared: PreparedProduct) -> Check:
    """The check of a number of threads: that one still serves, where more might be useful."""
    assert prepared.plan is not None
    fixed = wanted is not None or prepared.plan.alone
    return thread_check(wanted, None if fixed else -prepared.product.threads)


def real(value: Any, prepared: PreparedProduct) -> Check | None:
    """The check of a scale that is a number, of a magnitude that the product is prepared for."""
    within = (LEAST, MOST) if prepared.product.moderate else (0.0, BEYOND)
    return Real(prepared.scale_at, *within) if type(value) is float else None


def zero_point(value: Any, dtype: np.dtype[Any], prepared: PreparedProduct) -> Check | None:
    """The check of a zero point that is a number, of bytes of this type, or absent."""
    if type(value) is not int:
        return Same(None) if value is None else None
    limits = int_format(dtype.name)
    shift = FLIP if limits.signed else 0
    return Integer(prepared.zero_at, limits.qmin, limits.qmax, shift)
