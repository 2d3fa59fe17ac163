"""Whether any program of a kernel can leave a tensor: asked of Z3, for all of them at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import z3

from lowbit_lab.prove.meaning import Access, Meaning, names_in
from lowbit_lab.prove.operations import Lane, Value
from lowbit_lab.prove.ttir import NotProvedError, Text
from lowbit_lab.run.trace import Place

_TIMEOUT = 2.0
"""Seconds that Z3 gets for a question."""
_FEW_PROGRAMS = 64


@dataclass(frozen=True)
class Extent:
    """Where the elements of a tensor lie: its shape, its strides in elements, bytes of an element.
    Sizes may be Z3's, if the tensor is contiguous: its strides are then None."""

    shape: tuple[Any, ...]
    strides: tuple[int, ...] | None
    itemsize: int

    def inside(self, offset: Any, size: int) -> Any:
        """That bytes at an offset from the first element belong to an element. NotProvedError if
        elements overlap."""
        if self.strides is None or _contiguous(self.shape, self.strides):
            count: Any = z3.IntVal(self.itemsize)
            for one in self.shape:
                count = count * one
            return z3.And(offset >= 0, offset + size <= count)
        axes = sorted(
            ((step * self.itemsize, n) for n, step in zip(self.shape, self.strides, strict=True)
             if n != 1 and step), reverse=True,
        )  # fmt: skip
        parts, left, reach = list[Any](), offset, 0
        for step, n in reversed(axes):
            if step < reach + self.itemsize:
                raise NotProvedError("elements of it overlap")
            reach += step * (n - 1)
        for step, n in axes:
            parts += [left / step >= 0, left / step < n]
            left = left % step
        return z3.And(*parts, left >= 0, left + size <= self.itemsize)


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


@dataclass(frozen=True)
class Verdict:
    """Of one tensor: whether all accesses stay inside, else why that is not known, or the access
    that leaves it, in words, with the sizes, the program and the lane."""

    proved: bool
    why: str = ""
    place: Place | None = None
    sizes: Mapping[str, int] | None = None
    program: tuple[int, ...] | None = None
    kind: str = "load"

    @property
    def wrong(self) -> bool:
        """Whether an access leaves it."""
        return self.program is not None


@dataclass(frozen=True)
class Question:
    """A kernel's text, its arguments, the tensors' extents, and how many programs there are.

    arguments: for each parameter a number, Z3's or Python's; what is a tensor is in `extents`.
    given: what is known of the sizes; sizes: by name. Without sizes all numbers are known, and that
    integers do not overflow is asked too.
    """

    text: Text
    arguments: Mapping[str, Any]
    extents: Mapping[str, Extent]
    grid: Sequence[Any]
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    given: Sequence[Any] = ()

    def answered(self, seconds: float) -> dict[str, Verdict]:
        """The verdict for each tensor, within about so many seconds."""
        pointers = {
            name: Value((), lambda _: z3.IntVal(0), name, one.itemsize)
            for name, one in self.extents.items()
        }
        try:
            meaning = Meaning(self.text, {**self.arguments, **pointers}, self.grid)
        except Exception as error:
            return {name: Verdict(False, _reason(error)) for name in self.extents}
        verdicts, ends = dict[str, Verdict](), time.monotonic() + seconds
        for access in meaning.accesses:
            name = str(access.pointer.base)
            if verdicts.get(name, Verdict(True)).proved:
                verdicts[name] = self._judged(meaning, access, ends)
        return verdicts

    def _judged(self, meaning: Meaning, access: Access, ends: float) -> Verdict:
        try:
            known, leaves, overflows = self._stated(meaning, access)
        except Exception as error:
            return Verdict(False, _reason(error), access.place)
        verdict = self._asked(meaning, access, [*known, leaves], ends)
        if verdict.proved and overflows is not None:
            wraps = self._asked(meaning, access, [*known, overflows], ends)
            if not wraps.proved:
                return Verdict(False, "that no integer overflows is not proved", access.place)
        return verdict

    def _stated(self, meaning: Meaning, access: Access) -> tuple[list[Any], Any, Any]:
        """What holds of an access; that it leaves its tensor; that an integer overflows on the way,
        None if there is none."""
        pointer = access.pointer
        lanes: Lane = tuple(z3.Int(f"lane_{axis}") for axis in range(len(pointer.shape)))
        known = [*self.given, *access.path]
        for value, most in (*zip(meaning.programs, self.grid, strict=True),
                            *zip(lanes, pointer.shape, strict=True)):  # fmt: skip
            known += [value >= 0, value < most]
        mask: Any = access.mask.at(lanes if access.mask.shape else ()) if access.mask else True
        offset = pointer.at(lanes)
        inside = self.extents[str(pointer.base)].inside(offset, pointer.size)
        # An address of a lane that is masked may be anything, a mask may not.
        wraps = [
            z3.And(claim, z3.Or(one < -(2 ** (bits - 1)), one >= 2 ** (bits - 1)))
            for claim, whole in ((mask, [offset]), (True, [mask, *access.path]))
            for one, bits in meaning.narrow_in(whole)
        ]
        return known, z3.And(mask, z3.Not(inside)), z3.Or(*wraps) if wraps else None

    def _asked(self, meaning: Meaning, access: Access, claims: list[Any], ends: float) -> Verdict:
        """Z3's answer; for a few programs one by one, if it has none for all."""
        place = access.place
        for cases in self._attempts(meaning):
            answers = list[Any]()
            for case in cases:
                left = min(_TIMEOUT, ends - time.monotonic())
                if left <= 0:
                    return Verdict(False, "Z3 took too long", place)
                solver = z3.Solver()
                solver.set("timeout", int(1000 * left) + 1)
                solver.add(*claims, *case)
                answers.append(solver.check())
                if answers[-1] == z3.sat:
                    return self._found(meaning, access, claims, solver.model())
                if answers[-1] == z3.unknown:
                    break
            else:
                return Verdict(True)
        return Verdict(False, "Z3 gave no answer", place)

    def _attempts(self, meaning: Meaning) -> Iterator[list[list[Any]]]:
        """All programs at once; then each of a few, if their numbers are known. Of sizes small ones
        come first, so that what is found is small."""
        yield [[one <= 200 for one in self.sizes.values()], []] if self.sizes else [[]]
        dims = [one for one in self.grid if isinstance(one, int)]
        if len(dims) == len(self.grid) and 1 < dims[0] * dims[1] * dims[2] <= _FEW_PROGRAMS:
            yield [
                [one == i for one, i in zip(meaning.programs, program, strict=True)]
                for program in product(*map(range, dims))
            ]

    def _found(self, meaning: Meaning, access: Access, claims: list[Any], model: Any) -> Verdict:
        """An access that leaves its tensor, unless it hangs on what is not known."""
        doubts = [meaning.unknowns[name] for name in names_in(claims) if name in meaning.unknowns]
        if doubts:
            return Verdict(False, f"it depends on {doubts[0]}", access.place)

        def number(one: Any) -> int:
            made = z3.IntVal(one) if isinstance(one, int) else one
            return model.eval(made, model_completion=True).as_long()

        sizes = {name: number(one) for name, one in self.sizes.items()}
        program = tuple(map(number, meaning.programs))
        pointer = access.pointer
        lanes = [z3.Int(f"lane_{axis}") for axis in range(len(pointer.shape))]
        offset = number(pointer.at(tuple(lanes))) // pointer.size
        verb = "reads" if access.kind == "load" else "writes"
        lane = f" in lane {[*map(number, lanes)]}" if lanes else ""
        at = f"with {', '.join(f'{k}={n}' for k, n in sizes.items())} " if sizes else ""
        why = f"{at}program {list(program)} {verb} at element offset {offset}{lane}"
        return Verdict(False, why, access.place, sizes, program, access.kind)


def _reason(error: Exception) -> str:
    """Why nothing is proved. A text with what was not foreseen fails in many ways, and the kernel
    may be right all the same."""
    if isinstance(error, NotProvedError):
        return str(error)
    if "RecursionError" in repr(error):  # ctypes has its own kind of it
        return "its text is too long"
    return f"Triton's text of it is not understood ({type(error).__name__}: {error})"
