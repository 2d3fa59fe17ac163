"""Trying a kernel on its cases, and what each run of it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from math import prod
from time import process_time
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.spec import SPECIAL, Case
from lowbit_lab.backends import cuda
from lowbit_lab.backends.backend import Request, Subject, Way
from lowbit_lab.backends.language import bound
from lowbit_lab.checks.result import CheckResult, OnProgress
from lowbit_lab.checks.smallest import view_found
from lowbit_lab.prove.launches import available, bounds_of_sizes, in_words
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import Run, Trial, first_index, judge

if TYPE_CHECKING:
    from lowbit_lab.prove.bounds import Verdict

# A run that takes more is not repeated with every kind of data; one that would take so much more,
# going by the exercise, is left out.
_SLOW, _TOO_SLOW = 100_000, 400_000
_TF32_NOTE = (
    "tl.dot rounds float32 to TF32, 10 bits of mantissa, and what that costs is allowed; with "
    'input_precision="ieee" it does not, and operation(tf32=False) forbids it'
)
# What the cases of a check may take together, of a CPU.
_SECONDS = 40
_FEW_FILLS, _FEW_SIZES = ("normal", "large", "nan", "max*max", "max*min"), 5


def check_request(
    request: Request,
    device: str | None = None,
    *,
    few: bool = False,
    stop: bool = False,
    on_progress: OnProgress | None = None,
) -> CheckResult:
    """The outcome of all cases, the exercise first, or of a few. Of several results each is looked
    at in runs of its own. Otherwise as `check`."""
    found = list[CheckResult]()
    for one in request.each_result():
        found.append(_check_result(one, device, few, stop, on_progress))
        if stop and not found[-1].ok:
            break
    if len(found) == 1:
        return found[0]
    wrong = next((one for one in found if not one.ok), found[0])
    return replace(
        wrong,
        findings=tuple(merged([finding for one in found for finding in one.findings])),
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
    )


def _check_result(
    request: Request, device: str | None, few: bool, stop: bool, on_progress: OnProgress | None
) -> CheckResult:
    subject = bound(request)
    cases, notes = subject.cases()
    if few:
        cases = _few(cases)
    on_gpu = cuda.wanted(device, subject)
    found = _check_cases(subject, cases, on_gpu, notes, stop, on_progress)
    findings = [finding for number in sorted(found) for finding in found[number]]
    bounds: dict[str, str] = {}

    def tried(case: Case) -> list[Finding]:
        return _check_case(subject, case, thorough=True, on_gpu=False)[0]

    if any(f.severity == "error" for f in findings):
        # What is wrong with plain numbers says more.
        findings = [f for f in findings if f.kind not in ("special-values", "nan-chosen")]
    else:
        refused = subject.refusals(cases[0])
        notes += [str(one) for one in refused if one.severity == "note"]
        refused = [one for one in refused if one.severity != "note"]
        findings += refused
        if all(one.severity != "error" for one in refused):
            findings += _other_blocks(subject, cases)
        if available():
            verdicts = bounds_of_sizes(subject)
            bounds = {name: in_words(one, "sizes") for name, one in verdicts.items()}
            findings += _beyond(subject, verdicts)
    if any(f.kind.startswith("out-of-bounds") for f in findings) and on_gpu:
        notes.append("cases that leave a tensor were not run on the GPU")
    return CheckResult(
        subject.name,
        subject.operation.name,
        subject.description,
        tuple(merged(findings)),
        len(found),
        ("interpreter", "cuda") if on_gpu else ("interpreter",),
        tuple(notes),
        bounds,
        partial(view_found, subject, *_shown(cases, found, findings), tried)
        if subject.text
        else None,
    )


def _few(cases: list[Case]) -> list[Case]:
    """Some data, and a few other sizes."""
    plain = [case for case in cases if case.layout == "contiguous"]
    filled = [next((case for case in plain if case.fill == fill), None) for fill in _FEW_FILLS]
    others = [case for case in plain[1:] if case.fill == "normal"]
    return [*(case for case in filled if case is not None), *others[:_FEW_SIZES]]


class _Pace:
    """How long cases take, going by those that were tried: in steps of an interpreter, which follow
    from the sizes, and in seconds of a CPU."""

    def __init__(self) -> None:
        self._begun = process_time()
        self._steps = self._seconds = 0.0  # of a point of all sizes

    def add(self, points: int, steps: int, seconds: float) -> None:
        """The first that was tried."""
        self._steps = self._steps or steps / max(points, 1)
        self._seconds = self._seconds or seconds / max(points, 1)

    def too_long(self, points: int) -> bool:
        """Whether one case would take too many steps."""
        return self._steps * points > _TOO_SLOW

    @property
    def over(self) -> bool:
        """Whether the check has taken as long as one may."""
        return process_time() - self._begun > _SECONDS

    def order(self, cases: Sequence[Case], points: Sequence[int]) -> list[int]:
        """The numbers of all cases but the first, from small to large; where there is no time for
        all, other sizes, other data and other layouts take turns, special data before other."""
        small = sorted(range(1, len(cases)), key=points.__getitem__)
        if self._seconds * sum(points) < _SECONDS:
            return small
        groups: tuple[list[int], ...] = ([], [], [], [])
        for number in small:
            case = cases[number]
            little, plain = points[number] <= points[0], case.fill == "normal"
            kind = 2 if case.layout != "contiguous" else 0 if plain else 1 if little else 3
            groups[kind].append(number)
        groups[1].sort(key=lambda number: cases[number].fill not in SPECIAL)
        turns = chain.from_iterable(zip_longest(*groups[:3]))
        return [*(number for number in turns if number is not None), *groups[3]]


def _check_cases(
    subject: Subject,
    cases: Sequence[Case],
    on_gpu: bool,
    notes: list[str],
    stop: bool,
    on_progress: OnProgress | None,
) -> dict[int, list[Finding]]:
    """What is found in each case, by its number: the exercise, then from small to large, until one
    does not end, or as long as a check may take."""
    found: dict[int, list[Finding]] = {}
    first: Finding | None = None
    slow, pace = subject.slow, _Pace()
    points = [prod(case.sizes.values()) for case in cases]
    order, left = list(range(len(cases))), 0
    while order:
        number = order.pop(0)
        case = cases[number]
        exercise = case.sizes == cases[0].sizes
        if slow and exercise and number:
            continue
        if number and (pace.over or pace.too_long(points[number])):
            left += 1
            continue
        thorough = number % 3 == 0 and not (slow and exercise)
        begun = process_time()
        found[number], memory = _check_case(subject, case, thorough=thorough, on_gpu=on_gpu)
        pace.add(points[number], memory.steps, process_time() - begun)
        if number == 0:
            order = pace.order(cases, points)
            notes += [_TF32_NOTE] if memory.tf32 and subject.operation.tf32 else []
            if slow := slow or memory.steps > _SLOW:
                notes.append("it takes many steps, so the exercise was tried with normal data only")
        first = first or next((f for f in found[number] if f.severity == "error"), None)
        if on_progress is not None:
            on_progress(subject.name, len(found), len(cases), None if first is None else str(first))
        endless = any(finding.kind == "endless" for finding in found[number])
        if len(found) < len(cases) and (endless or (stop and first is not None)):
            notes.append(f"{len(cases) - len(found)} more cases were not tried")
            break
    if left:
        notes.append(
            f"{left} cases were left out, which would take too many steps of an interpreter, or "
            f"the check more than {_SECONDS} seconds of a CPU"
        )
    return found


def _check_case(
    subject: Subject, case: Case, *, thorough: bool, on_gpu: bool
) -> tuple[list[Finding], Memory]:
    """One case, and the memory of its run, which knows how many steps it took; if thorough, once
    more in another order and with poison in undefined lanes."""
    run = subject.run(Trial.of(case, subject.request.seed))
    findings = [run.crash] if run.crash else judge(run)
    findings = [*run.memory.findings, *findings]
    if not run.crash and case.fill not in SPECIAL:
        if thorough or run.memory.atomics:
            findings += _again(subject, run)
        outside = any(f.kind.startswith("out-of-bounds") for f in findings)
        if on_gpu and not outside:
            findings += _on_gpu(subject, run)
    layout = f"{case.layout} tensors" if case.layout != "contiguous" else None
    sizes = dict(case.sizes)
    placed = [replace(f, sizes=sizes, fill=case.fill, layout=layout) for f in findings]
    return placed, run.memory


def _on_gpu(subject: Subject, run: Run) -> list[Finding]:
    """What is wrong with a run on the GPU, of a trial that the interpreter has run."""
    other = cuda.run_on_gpu(subject, run.trial)
    if other.crash:
        return [other.crash]
    other.memory.tf32 = run.memory.tf32
    kinds = {} if run.wrong[other.wrong].all() else {"wrong-values": "device-disagrees"}
    found = [replace(f, kind=kinds.get(f.kind, f.kind), device="cuda") for f in judge(other)]
    return [*other.memory.findings, *found]


def _other_blocks(subject: Subject, cases: Sequence[Case]) -> list[Finding]:
    """What goes wrong first in each variant of what is subject."""
    few = [case for case in cases if case.fill == "normal" and case.layout == "contiguous"][:3]
    findings: list[Finding] = []
    for words, other, severity in subject.variants():
        first, rate = None, 0.0
        for case in (*few, *other.wide()[:2]):
            points = prod(case.sizes.values())
            if first is None and rate * points <= _TOO_SLOW:
                found, memory = _check_case(other, case, thorough=False, on_gpu=False)
                rate = rate or memory.steps / points
                first = next((f for f in found if f.severity == "error"), None)
        if first is not None:
            message = f"with {words}: {first.title}: {first.message}"
            findings.append(replace(first, kind="block-sizes", message=message, severity=severity))
    return findings


def _beyond(subject: Subject, verdicts: Mapping[str, Verdict]) -> list[Finding]:
    """What a run finds at sizes at which an access is said to leave its tensor."""
    findings = list[Finding]()
    for sizes in (one.sizes for one in verdicts.values() if one.wrong and one.sizes):
        if prod(sizes.values()) <= _TOO_SLOW:
            with suppress(ValueError):  # a size that the operation cannot have after all
                case = Case(subject.operation, sizes)
                findings += _check_case(subject, case, thorough=False, on_gpu=False)[0]
    return findings


def _again(subject: Subject, run: Run) -> list[Finding]:
    order = subject.request.seed if run.several else None
    other = subject.run(run.trial, Way(order, poisoned=True))
    if other.crash:
        return [other.crash]
    if other.same_as(run) and len(other.memory.findings) == len(run.memory.findings):
        return []
    findings: list[Finding] = []
    plain = subject.run(run.trial, Way(order)) if run.several else run
    differs = ~((plain.result == run.result) | (np.isnan(plain.result) & np.isnan(run.result)))
    if differs.any():
        index = first_index(differs)
        name, values = run.output.name, (run.result[index], plain.result[index])
        message = f"{name}{list(index)} is {values[0]:.9g} in order and {values[1]:.9g} shuffled"
        # Atomic float additions may round differently; both results must be right all the same.
        rounding = run.memory.atomics and not plain.wrong.any()
        kind = "rounding-order" if rounding else "order-dependent"
        severity = "warning" if rounding else "error"
        findings.append(Finding(kind, message, severity, tensor=name, index=index))
    return [*findings, *_undefined(subject, other, plain, order)]


def _undefined(subject: Subject, other: Run, plain: Run, order: int | None) -> list[Finding]:
    """That a result, or where it is read from, depends on lanes that a mask leaves undefined;
    other: the run in which these held poison; order: of the programs, in both."""
    known = {(f.kind, f.tensor) for f in plain.memory.findings}
    stray = [f for f in other.memory.findings if (f.kind, f.tensor) not in known]
    stray = [f for f in stray if f.kind.startswith("out-of-bounds")]
    if not other.memory.undefined or (other.same_as(plain) and not stray):
        return []
    lines = list(other.memory.undefined)
    guilty = lines[:1]
    if len(lines) > 1 and not stray:
        ways = ((at, Way(order, at)) for at in lines if at is not None)
        alone = ((at, subject.run(plain.trial, way)) for at, way in ways)
        guilty = [at for at, run in alone if run.crash or not run.same_as(plain)]
    what = f"an access to {stray[0].tensor}" if stray else "the result"
    message = (
        f"a masked load without other= gives its masked lanes no value, and {what} depends on "
        "them; pass other=, or choose with tl.where what is used"
    )
    place, tensor = next(iter(guilty), None), plain.output.name
    return [Finding("undefined-lanes", message, place=place, tensor=tensor)]


def _shown(
    cases: Sequence[Case], found: Mapping[int, Sequence[Finding]], findings: Sequence[Finding]
) -> tuple[Case | None, Sequence[Finding]]:
    """What a view is of, and what was found there: the first case with an error, or with anything
    if nothing is one; no case if errors were found otherwise alone."""
    least = ("error",) if any(f.severity == "error" for f in findings) else ("error", "warning")
    for number in sorted(found):
        if any(f.severity in least for f in found[number]):
            return cases[number], found[number]
    return None, findings


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The first of each kind, tensor and line, errors first, with how often it was seen."""
    first: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.tensor, finding.place, finding.device)
        seen = first.get(key)
        first[key] = replace(seen, more=seen.more + 1) if seen else finding
    return sorted(first.values(), key=lambda f: f.severity != "error")
