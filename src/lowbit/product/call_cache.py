"""Calls that are known: machine code checks and runs them, without Python (see jit.cached_call).

Checking a call and preparing it in Python takes longer than a small product. So a call that is made
a second time is kept: what it compares, and what it runs. A cache keeps the last ways to call a
public function, for each right operand its own; a server whose batches have many sizes has as many
ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lowbit.jit import verbose
from lowbit.jit.builtin import Finder, Known, Shapes, Table, builtin, table
from lowbit.jit.cached_call import (
    REALS,
    Array,
    Check,
    Copied,
    Fresh,
    Integer,
    Real,
    Same,
    signature,
    thread_check,
)
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.numerics import int_format
from lowbit.numerics.float32 import BEYOND, LEAST, MOST
from lowbit.product.arguments import allocation, row_stride
from lowbit.product.prepared import Prepared
from lowbit.weights.panels import PackedMatrix

_WAYS = 256  # to call with one right operand that are kept; each takes some 2 KB
_SEEN = 4 * _WAYS  # prepared products whose calls are counted
_OPERANDS = {PackedMatrix, type(None)}  # types of right operands, no subclass

F = TypeVar("F", bound=Callable[..., Any])


class Ways:
    """The ways to call a function that are known: the last `_WAYS`, by what tells them apart.

    Several threads may use it at once, and a signal handler in the middle of any method. So there
    is no lock: what changes is a copy, which then takes the place of the one before.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Shapes, Known]] = {}
        self._seen: dict[Any, int] = {}
        self.logged = False

    def is_hot(self, prepared: Any) -> bool:
        """Whether a call that comes to Python should become known: the second one of what was
        prepared, the fourth, the eighth. Then one that cannot, or is given up again and again,
        costs little."""
        if len(self._seen) >= _SEEN:
            self._seen = {}
        count = self._seen[prepared] = self._seen.get(prepared, 0) + 1
        return count > 1 and not count & (count - 1)

    def __contains__(self, way: Any) -> bool:
        return way in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def table(self) -> Table:
        """All of them, as machine code finds them."""
        return table(list(self._calls.values()))

    def add(self, prepared: Any, way: Any, shapes: Shapes, call: Known) -> None:
        """Keep one more. The oldest makes room."""
        calls = self._calls.copy()
        if len(calls) >= _WAYS:
            del calls[next(iter(calls))]
        else:
            self._seen.pop(prepared, None)  # another way to call it is as good as new
        calls[way] = shapes, call
        self._calls = calls


class CallCache:
    """The known calls of one public function, by its packed right operand, which is called b and
    keeps them in its dictionary `_calls`, by the name of the function; or, where two `arrays` are
    multiplied, of the function as a whole: b is None then."""

    def __init__(self, operation: str, arrays: int = 1) -> None:
        self.operation, self._arrays = operation, arrays
        self._arguments: tuple[str, ...] = ()
        self._ways: WeakKeyDictionary[PackedMatrix, Ways] = WeakKeyDictionary()
        self._own, self._calls = Ways(), dict[str, Table]()

    def builtin(self, function: F) -> F:
        """The function as machine code enters it, which tries known calls first."""
        code = function.__code__  # type: ignore[attr-defined]
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if self._arrays > 1:
            self._arguments = names
            return builtin(function, Finder(self.operation, calls=self._calls, arrays=2))
        self._arguments = tuple(name for name in names if name != "b")
        return builtin(function, Finder(self.operation, "b", PackedMatrix, "_calls"))

    def ways(self, b: PackedMatrix | None) -> Ways:
        """The ways to call with this right operand."""
        if b is None:
            return self._own
        ways = self._ways.get(b)
        return self._ways.setdefault(b, Ways()) if ways is None else ways

    def is_hot(self, b: PackedMatrix | None, prepared: Prepared) -> bool:
        """Whether this call should be added."""
        return prepared.little and type(b) in _OPERANDS and self.ways(b).is_hot(prepared)

    def add(
        self,
        b: PackedMatrix | None,
        prepared: Prepared,
        operands: Mapping[str, Any],
        checks: Mapping[str, Check | None],
        result: npt.NDArray[Any],
        fresh: bool,
    ) -> None:
        """Let such a call be known, if it can be: with a check for each argument but a packed b, by
        its name, and none that is None. `operands`: those that no argument is; `result`: where it
        wrote; `fresh`: it made that itself."""
        ways = self.ways(b)
        wanted = [(name, checks[name]) for name in self._arguments]
        known = [check for _, check in wanted if check is not None]
        if len(known) < len(wanted):
            others = ", ".join(name for name, check in wanted if check is None)
            if not ways.logged:
                ways.logged = True
                verbose.info(
                    "miss,%s: calls are prepared in Python each time, since %s cannot be compared "
                    "or taken as given", self.operation, others,
                )  # fmt: skip
            return
        way = prepared.request, fresh, signature(known)
        shapes = [one.like.shape for one in known[: self._arrays] if isinstance(one, Array)]
        # One that is known was one that machine code could not serve, or another thread's.
        if way not in ways and len(shapes) == self._arrays:
            made = Fresh(*allocation(result.shape, result.dtype), "out") if fresh else None
            call = prepared.cached_call(operands, known, made)
            if call is None:
                return
            ways.add(prepared, way, tuple(shapes), call)
        if len(ways):
            (self._calls if b is None else b._calls)[self.operation] = ways.table()


def as_given(value: Any, used: Any, slot: str, written: bool = False) -> Check | None:
    """The check of an operand that is absent, or an array whose memory the kernel reads itself, or,
    of an output, writes."""
    if value is None:
        return Same(None)
    return Array(value, slot, written) if used is value else None


def addend_as_given(c: Any, used: Any, result: npt.NDArray[Any]) -> Check | None:
    """The check of what is added to a product: the output may take its place, if it lies so."""
    check = as_given(c, used, "c")
    if not isinstance(check, Array):
        return check
    return check._replace(replaced=(c.dtype, c.strides) == (result.dtype, result.strides))


def bias_as_given(bias: Any, used: Any, prepared: Prepared) -> Check | None:
    """The check of a bias that is absent, or of float32, and padded to whole panels if need be."""
    plain = type(bias) is np.ndarray and bias.dtype == np.float32 and bias.flags.c_contiguous
    if plain and used is not bias:
        return Copied(bias, prepared.spare["bias"])
    return as_given(bias, used, "bias")


def out_as_given(out: Any, result: npt.NDArray[Any]) -> Check | None:
    """The check of an output whose memory the kernel writes itself, or that is made anew."""
    lies_so = out is None or row_stride(out) or result.flags.c_contiguous
    return as_given(out, result, "out", written=True) if lies_so else None


def threads_as_given(wanted: Any, prepared: Prepared) -> Check:
    """The check of a number of threads: that one still serves, where more might be useful."""
    assert prepared.plan is not None
    fixed = wanted is not None or prepared.plan.alone
    return thread_check(wanted, None if fixed else -prepared.request.threads)


def real(value: Any, prepared: Prepared) -> Check | None:
    """The check of a scale that is a number, of a magnitude that the product is prepared for."""
    within = (LEAST, MOST) if prepared.request.moderate else (0.0, BEYOND)
    kind = type(value)
    return Real(prepared.spare["row_scale"], *within, kind) if kind in REALS else None


def zero_point(value: Any, dtype: np.dtype[Any], prepared: Prepared) -> Check | None:
    """The check of a zero point that is a number, of bytes of this type, or absent."""
    if value is None:
        return Same(None)
    if type(value) is not int and not isinstance(value, np.integer):
        return None
    limits = int_format(dtype.name)
    shift = FLIP if limits.signed else 0
    return Integer(prepared.spare["row_zero"], limits.qmin, limits.qmax, shift, type(value))
