"""What is measured: cases, their data, and whatever can do them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, TypeVar

import numpy as np

import lowbit
from lowbit.registry import Registry
from lowbit.registry.extras import absent
from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec import Expected

Call = Callable[[], Any]

OURS, PEER, LIMIT, OTHER = "ours", "peer", "limit", "other"
"""Kinds of implementations: lowbit's own, which others are compared with; other libraries; a limit
of the machine, which computes nothing; and what is none of these."""

READY = "ready"
"""What a process of an implementation answers before it is asked for anything."""


@dataclass(frozen=True)
class Case:
    """One thing to measure. name: what tells it apart among those of its operation and dtypes, a
    shape `MxK:KxN` where it is a product. work: what it is part of, "" if that was not said."""

    operation: str
    name: str
    dtypes: str = ""
    work: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operation, self.dtypes, self.name)))


class Problem:
    """A case with its data. A class below it has a case of the specification, `stated`, which
    counts what must be done, and the `ideal` result; or it overrides what follows.

    operations: additions and multiplications. bytes: the least that must be moved. weight_bytes:
    of the weights, where a call reads such. most_error: of a peer that is let pass.
    """

    most_error: ClassVar[float] = math.inf

    @property
    def way(self) -> str:
        """What of the measured ways to multiply is its limit, "" for the fastest."""
        return ""

    @cached_property
    def stated(self) -> Stated:
        """The case of the specification."""
        raise NotImplementedError

    @cached_property
    def ideal(self) -> Any:
        """The result, with nothing quantized inside, int64 or float64."""
        raise NotImplementedError

    @cached_property
    def operations(self) -> int:
        return self.stated.operations

    @cached_property
    def bytes(self) -> int:
        return self.stated.bytes_moved

    @cached_property
    def weight_bytes(self) -> int:
        return 0

    @cached_property
    def _largest(self) -> float:
        return float(np.abs(self.ideal).max()) or 1.0

    def error(self, result: Any) -> Any:
        """The largest |result - ideal|, as a share of the largest |ideal|; None where there is no
        such."""
        return float(np.abs(result.astype(np.float64) - self.ideal).max()) / self._largest

    def wrong(self, implementation: Implementation, result: Any) -> str | None:
        """Why the result of an implementation cannot be let pass, None if it can."""
        if result.shape == self.ideal.shape:
            return None
        return f"the result has the shape {result.shape}; expected {self.ideal.shape}"


class StatedProblem(Problem):
    """A problem that is a case of the specification with its `inputs`. lowbit's own
    results must be within the budget of the specification."""

    inputs: Any  # arrays by name

    @cached_property
    def expected(self) -> Expected:
        """Reference and budget of the specification."""
        return self.stated.expect(self.inputs)

    @cached_property
    def ideal(self) -> Any:
        return self.expected.reference

    def wrong(self, implementation: Implementation, result: Any) -> str | None:
        reason = super().wrong(implementation, result)
        if reason or implementation.kind != OURS:
            return reason
        verdict = self.expected.check(result)
        return None if verdict.ok else verdict.message


@dataclass(frozen=True)
class Ready:
    """An implementation with its weights packed.

    call: what is timed. read: makes its result an array, whatever it stopped at itself. nbytes:
    the weights that it reads, if they are not as large as the problem says. again: makes such a
    call on a copy of the weights at another place in memory, if there is a way that takes less time
    than to prepare it again. extra: further fields of the row. note: in place of the
    implementation's, where only what runs can tell.
    """

    call: Call
    read: Callable[[Any], Any] = np.asarray
    nbytes: int = 0
    again: Callable[[], Call] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None


class Implementation:
    """Something that can do the cases of a suite; a class below it says how.

    name: unique in its suite. isolated: whether it is to be tried in a process of its own first,
    since it can crash. fallback: whether its library has nothing but a plain loop for it on some
    processors. always: whether it runs without peers too. pool: the threads that it runs on, by
    the name of what keeps them. needs: modules without which it cannot run. takes: how the dtypes
    of the cases begin that it does, if not all. remark: what it always does otherwise than cases
    ask. package: the library that does the work, by its name and that on package indices; else it
    is lowbit. Each allocates its own result, as a user's call does.
    """

    name: str
    kind: str = PEER
    isolated: bool = False
    fallback: bool = False
    always: bool = False
    pool: str = "OpenMP of torch"
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    remark: str = ""
    package: tuple[str, str] | None = None

    def available(self, case: Any) -> str | None:
        """None if it can run this case here, else the reason."""
        if self.takes and not case.dtypes.startswith(self.takes):
            known = " or ".join(self.takes).replace(":", " by ")
            return f"multiplies {known} only, not {case.dtypes}"
        return next(filter(None, map(absent, self.needs)), None)

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version, "unknown" where it was not installed as
        a package. Only after `available`."""
        if self.package is None:
            return "lowbit", lowbit.__version__
        try:
            return self.package[0], metadata.version(self.package[1])
        except metadata.PackageNotFoundError:
            return self.package[0], "unknown"

    def runs_on(self, case: Any) -> str | None:
        """The instruction set or kernel that it uses, None if it does not tell."""

    def note(self, case: Any) -> str:
        """What it does otherwise than the case asks, "" if nothing."""
        return self.remark

    def serve(self, work: Any) -> Mapping[str, Callable[..., Any]]:
        """In a process of its own, see `cpu.Processes`: by question, what answers it. READY's
        answer is the first, without a question."""
        raise NotImplementedError

    def prepare(self, problem: Any, threads: int) -> Ready:
        """Pack the weights, each time into memory of their own; what this does is not timed.
        ValueError or RuntimeError if it takes no such problem."""
        raise NotImplementedError


implementations: Registry[Implementation] = Registry("implementation", "lowbit_lab.bench.peers")
"""Of all suites; the name of the suite stands before that of the implementation."""


_Class = TypeVar("_Class", bound=Callable[..., Implementation])


def implementation(suite: str, *arguments: Any) -> Callable[[_Class], _Class]:
    """Register a class of implementations of a suite: one made without arguments, or one for each
    of these."""

    def register(cls: _Class) -> _Class:
        for one in map(cls, arguments) if arguments else [cls()]:
            implementations.add(f"{suite}: {one.name}", one)
        return cls

    return register


def implementations_of(suite: str) -> tuple[Implementation, ...]:
    """Those of a suite, lowbit's own first."""
    names = [name for name in implementations.names() if name.startswith(f"{suite}: ")]
    return tuple(sorted(map(implementations.get, names), key=lambda one: one.kind != OURS))


def find(suite: str, name: str) -> Implementation:
    """ValueError, with the names that there are, if none is called so."""
    return implementations.get(f"{suite}: {name}")
