"""Comparing the variants of a file: each compiled, checked, explained, timed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowbit.isa import active, report
from lowbit.registry.conflicts import conflict
from lowbit.registry.extras import versions
from lowbit.spec import Array
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import Language, language_of
from lowbit_lab.backends.source import Comparison, blamed, read
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.context import commit
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.checks.cases import check_request
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.explain import Change, Explained, Timed, change, explain
from lowbit_lab.compare.problem import Baseline, Checked, Problem
from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.memory import OutsideError
from lowbit_lab.compare.timing import timed

SCHEMA = "lowbit-compare-1"
DEFAULT_LIMITS = Limits()
DEFAULT_SM = 90
"""The compute capability to compile for where there is no GPU: Hopper's."""


@dataclass(frozen=True)
class Result:
    """What a comparison found. device: the GPU, None without one; context: versions, the CPU and
    its instruction set. peers: others that were timed. ceiling: what the CPU can multiply
    at most, where products were timed on it."""

    file: str
    sizes: Mapping[str, int]
    small: Mapping[str, int]
    operations: int | None
    least_bytes: int
    sm: int
    device: str | None
    variants: tuple[Explained, ...]
    peers: tuple[Timed, ...]
    ceiling: Ceiling | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    context: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether no variant is wrong."""
        return all(one.checked.ok is not False for one in self.variants)

    @property
    def timed(self) -> list[Timed]:
        """Everybody who was timed, in the order of the file, peers last."""
        return [one for one in (*self.variants, *self.peers) if one.seconds is not None]

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
    peers: bool = True,
    limits: Limits = DEFAULT_LIMITS,
) -> Result:
    """Compare the variants of a file.

    sizes: instead of the file's own. sm: the compute capability to compile for, 90 for 9.0; the
    GPU's, or 90. time: whether to time what can be timed here; peers: with what others offer;
    limits: for how long. Raises as `source.read`; a variant that does not compile is reported with
    the rest.
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
    others, turns = timed(comparison, explained, bool(gpu), limits, peers) if time else ([], [])
    large, processor = comparison.large, {"cpu": report()["cpu"], "isa": active().name}
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
        peers=tuple(others),
        ceiling=next((one.ceiling for one in turns if one.ceiling is not None), None),
        notes=tuple(note for one in turns for note in one.notes),
        context={"versions": versions(), "commit": commit(), **processor},
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
    arrays, how = problem.arrays(variant), "a call"
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
