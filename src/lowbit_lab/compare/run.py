"""Comparing the variants of a file: each compiled, checked, explained, timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowbit.registry.conflicts import conflict
from lowbit.registry.extras import versions
from lowbit.spec import Array
from lowbit_lab.backends.language import Language, language_of
from lowbit_lab.bench.core.clock import Limits, Samples, interleave, quantiles
from lowbit_lab.bench.core.context import commit
from lowbit_lab.checks.cases import check_request
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.explain import Change, Explained, change, explain
from lowbit_lab.compare.problem import Baseline, Checked, Problem, Variant
from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.memory import OutsideError
from lowbit_lab.source import Comparison, blamed, read

SCHEMA = "lowbit-compare-1"
DEFAULT_SM = 90
"""The compute capability to compile for where there is no GPU: Hopper's."""


@dataclass(frozen=True)
class Result:
    """What a comparison found. device: what it was timed on, None where nothing was; context:
    versions, and the GPU's state."""

    file: str
    sizes: Mapping[str, int]
    small: Mapping[str, int]
    operations: int | None
    least_bytes: int
    sm: int
    device: str | None
    variants: tuple[Explained, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    context: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether no variant is wrong."""
        return all(one.checked.ok is not False for one in self.variants)

    def to_json(self) -> str:
        """Everything but machine code, as JSON text."""
        plain = asdict(self)
        for one, given in zip(plain["variants"], self.variants, strict=True):
            machine = one["machine"]
            if machine is not None:
                del machine["cubin"], machine["sass"]
            del one["built"]["code"], one["built"]["stages"]
            one["faults"] = [{**asdict(f), "title": f.title} for f in given.faults]
        return json.dumps({"schema": SCHEMA, "ok": self.ok, **plain}, indent=1, allow_nan=False)


def compare(
    path: Path,
    sizes: Mapping[str, int] | None = None,
    *,
    sm: int | None = None,
    time: bool = True,
) -> Result:
    """Compare the variants of a file.

    sizes: instead of the file's own. sm: the compute capability to compile for, 90 for 9.0; the
    GPU's, or 90. time: whether to time what can be timed here. Raises as `file.read`; a variant
    that does not compile is reported with the rest.
    """
    comparison = read(path, sizes)
    gpu = _gpu()
    target = sm or (gpu[1] if gpu else DEFAULT_SM)
    explained: list[Explained] = []
    first: Baseline | None = None
    for one in comparison.variants:
        made, result = _explained(one, comparison, target, first)
        explained.append(made)
        first = Baseline(one.name, result) if first is None and result is not None else first
    seconds: dict[str, Samples] = {}
    notes: list[str] = []
    if time:
        seconds, notes = _timed(comparison, explained, gpu is not None)
    for one in explained:
        if one.name in seconds:
            taken = seconds[one.name].seconds
            one.seconds, one.rounds = quantiles(taken), len(taken)
    large = comparison.large
    return Result(
        file=path.name,
        sizes=dict(large.sizes),
        small=dict(comparison.small.sizes),
        operations=large.operations,
        least_bytes=large.least_bytes,
        sm=target,
        device=gpu[0] if gpu else None,
        variants=tuple(explained),
        changes=tuple(change(a, b) for a, b in pairwise(explained)),
        notes=tuple(notes),
        context={"versions": versions(), "commit": commit()},
    )


def _gpu() -> tuple[str, int] | None:
    """The name and compute capability of the GPU that PyTorch sees."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), 10 * major + minor


def _explained(
    variant: Variant, comparison: Comparison, sm: int, first: Baseline | None
) -> tuple[Explained, Array | None]:
    language = language_of(variant.kernel, "compile")
    try:
        built = build(variant, comparison.large, sm, comparison.path)
    except ValueError as error:  # the others can still be shown
        nothing = Built(*language.source(variant.kernel), missing=(str(error),))
        checked = Checked(None, None, None, "it was not compiled")
        return Explained(variant.name, language.title, nothing, checked, notes=[str(error)]), None
    try:
        with blamed(comparison.path):
            checked, result = _checked(language, variant, built, comparison.small, first)
    except Exception as error:  # a kernel that is called may raise anything
        said = error if error.__cause__ else f"{type(error).__name__}: {error}"
        checked, result = Checked(False, None, "a call", f"it raises an error: {said}"), None
    return explain(variant, built, checked, comparison.large, sm), result


def build(variant: Variant, problem: Problem, sm: int, file: Path) -> Built:
    """Compile a variant of a file. ValueError with all that its compiler says, as plain text."""
    language = language_of(variant.kernel, "compile")
    try:
        with blamed(file):
            return language.compile(variant, problem, sm)
    except Exception as error:  # compilers fail in many ways
        said = conflict(error) or language.words(error, variant.kernel, file).strip()
        raise ValueError(said or type(error).__name__) from error


def _checked(
    language: type[Language],
    variant: Variant,
    built: Built,
    problem: Problem,
    first: Baseline | None,
) -> tuple[Checked, Array | None]:
    """Whether it is right, by the best that its language can do in this process: as `lowbit check`
    finds out, or by a run of its PTX, or by a call."""
    if problem.operation is not None and language.can("interpret") and not language.simulated:
        found = check_request(language.request(variant, problem), "cpu", few=True, stop=True)
        said = str(next(iter(found.findings), f"{found.cases} cases"))
        against = f"the specification {found.operation}"
        return Checked(found.ok, against, f"{language.title}'s interpreter", said), None
    arrays, how = problem.arrays(), "a call"
    if language.for_gpu:
        how = "its PTX, interpreted"
        try:
            language.launch(variant, built, problem, arrays).run()
        except OutsideError as error:
            return Checked(False, None, how, f"out of bounds: {error}"), None
        except (NotInterpretedError, ValueError) as error:
            return Checked(None, None, how, str(error)), None
    else:
        language.call(variant, built, problem, arrays)()
    result = arrays[problem.result]
    return problem.judge(result, first, how), result


def _timed(
    comparison: Comparison, explained: Sequence[Explained], gpu: bool
) -> tuple[dict[str, Samples], list[str]]:
    """Those that can run here and are not wrong: those for a GPU in turn on it, the others in turn
    on the CPU."""
    right = [
        (variant, one)
        for variant, one in zip(comparison.variants, explained, strict=True)
        if one.built.made_by and one.checked.ok is not False
    ]
    found: dict[str, Samples] = {}
    notes: list[str] = []
    on_gpu = [pair for pair in right if language_of(pair[0].kernel, "compile").for_gpu]
    on_cpu = [pair for pair in right if not language_of(pair[0].kernel, "compile").for_gpu]
    if on_gpu and gpu:
        found |= _timed_on_gpu(comparison.large, on_gpu, notes)
    elif on_gpu:
        notes.append("variants for a GPU were not timed: there is none that PyTorch can use")
    if on_cpu:
        calls = {
            one.name: [_prepared(variant, one.built, comparison.large, comparison.large.arrays())]
            for variant, one in on_cpu
        }
        found |= interleave(calls, Limits())
    return found, notes


def _prepared(
    variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
) -> Callable[[], object]:
    return language_of(variant.kernel, "compile").call(variant, built, problem, arrays)


def _timed_on_gpu(
    problem: Problem, pairs: Sequence[tuple[Variant, Explained]], notes: list[str]
) -> dict[str, Samples]:
    """On tensors of their own, after their result was checked at these sizes too."""
    import torch

    from lowbit_lab.bench.core.cuda import Cuda

    first: Baseline | None = None
    calls: dict[str, list[Callable[[], object]]] = {}
    for variant, one in pairs:
        tensors = {name: torch.from_numpy(each).cuda() for name, each in problem.arrays().items()}
        try:
            call = _prepared(variant, one.built, problem, tensors)
            call()
            torch.cuda.synchronize()
        except Exception as error:  # what compilers and drivers raise has no common kind
            notes.append(f"{one.name} was not timed: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        result = tensors[problem.result].cpu().numpy()
        judged = problem.judge(result, first, "the GPU")
        first = Baseline(one.name, result) if first is None else first
        if judged.ok is False:
            notes.append(f"{one.name} was not timed, for it is wrong on the GPU: {judged.message}")
            continue
        calls[one.name] = [call]
    if not calls:
        return {}
    clock = Cuda("cuda")
    with clock.using(1):
        return clock.time(calls, Limits())
