"""The view of what a check has found: its first failing case, made as small as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from lowbit.spec import Case, Operation, Sizes
from lowbit_lab.backends.backend import Subject
from lowbit_lab.run.findings import Finding
from lowbit_lab.views.run import View, view_subject

_MOST_TRIES = 60


def view_found(
    subject: Subject,
    shown: Case | None,
    findings: Sequence[Finding],
    tried: Callable[[Case], Sequence[Finding]],
) -> View:
    """The view of a checked kernel. shown: the case in which something was found first, None if
    in none; findings: those of that case, or of no case; tried: what is found in another one."""
    if shown is None:
        return view_subject(subject, None, also=findings)
    first = next((one for one in findings if one.severity == "error"), findings[0])
    small = shown
    if subject.any_sizes and first.severity == "error":
        small = smallest(shown, lambda case: any(f.kind == first.kind for f in tried(case)))
    note = f"check found here: {first.title}."
    if small.sizes != shown.sizes:
        words = ", ".join(f"{name}={size}" for name, size in shown.sizes.items())
        note = (
            f"check found first, with {words}: {first.title}. These are smaller sizes at which "
            "that is still so."
        )
    return view_subject(subject, small, notes=(note,), also=findings)


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A case with sizes none of which can be a quarter less, or one, without ending what fails."""
    left = _MOST_TRIES
    while left > 0:
        for sizes in _smaller(case.operation, case.sizes):
            left -= 1
            less = replace(case, sizes=sizes)
            if fails(less):
                case = less
                break
            if left <= 0:
                break
        else:
            break
    return case


def _smaller(operation: Operation, sizes: Sizes) -> Iterator[dict[str, int]]:
    """Sizes with less, those with the least first."""
    found = list[dict[str, int]]()
    for name, size in sizes.items():
        step = operation.step(name)
        parts = (step * (size // step * part // 4) for part in (1, 2, 3))
        for less in {step, *parts, size - step}:
            fitted = operation.fitted({**sizes, name: less})
            if less > 0 and fitted[name] < size and fitted not in found:
                found.append(fitted)
    yield from sorted(found, key=lambda candidate: prod(candidate.values()))
