"""Running the cases: each implementation checked, then all timed against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lowbit.bench.ops import context
from lowbit.bench.ops.record import Absent, OpsRecord, Row
from lowbit.bench.ops.registry import Call, Case, OperationBench, Work, benches
from lowbit.bench.ops.timing import Array, Flush, interleave
from lowbit.bench.record import Spread
from lowbit.bench.timing import Limits, median_noise, quantiles

OURS = "lowbit"
COPY = "copy"

_Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class OpsPlan:
    """What to run. names: of operations, all if none. skip: implementations to leave out."""

    names: Sequence[str] = ()
    quick: bool = False
    skip: frozenset[str] = frozenset()
    seed: int = 0
    limits: Limits = field(default_factory=lambda: Limits(noise=0.01, seconds=0.5))


def require_gpu(device: str) -> torch.device:
    """The device. RuntimeError or ValueError, in one line, if it cannot be used."""
    if device != "cuda" and not device.startswith("cuda:"):
        raise ValueError(f"device is {device!r}; these operators are timed on cuda")
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU that PyTorch can use; run this where there is one")
    return torch.device(device)


def run(plan: OpsPlan, device: str = "cuda", progress: _Progress | None = None) -> OpsRecord:
    """Run the plan. ValueError for an unknown name; RuntimeError without a GPU."""
    chosen = [(one, case) for one in benches(plan.names) for case in one.chosen(plan.quick)]
    rows, absent = list[Row](), list[Absent]()
    with torch.cuda.device(require_gpu(device)):
        found = context.gather(plan.seed, plan.limits.noise, plan.limits.seconds)
        for count, (bench, case) in enumerate(chosen):
            if progress is not None:
                progress(f"{bench.name} {case}", count / len(chosen))
            generator = torch.Generator(torch.device(device)).manual_seed(plan.seed)
            try:
                work = bench.make(case, generator)
                rows += _case(plan, bench, case, work, absent)
            except torch.OutOfMemoryError:
                absent.append(Absent(bench.name, str(case), OURS, "not enough memory"))
            torch.cuda.empty_cache()
            torch.compiler.reset()
        found["then"] = context.gather(plan.seed, plan.limits.noise, plan.limits.seconds)["now"]
    return OpsRecord(found, tuple(rows), tuple(absent))


def _case(
    plan: OpsPlan, bench: OperationBench, case: Case, work: Work, absent: list[Absent]
) -> list[Row]:
    wanted = {name: call for name, call in work.calls.items() if name not in plan.skip}
    errors = _errors(bench, case, wanted, work.reference(), absent)
    calls = {name: wanted[name] for name in errors}
    if not calls:
        return []
    if bench.copies:
        calls[COPY] = _copy(work.bytes)
    flush = Flush(torch.device("cuda", torch.cuda.current_device()))
    taken = interleave(calls, plan.limits, flush, plan.seed)
    return [_row(bench, case, work, name, taken, errors[name]) for name in errors]


def _errors(
    bench: OperationBench,
    case: Case,
    calls: Mapping[str, Call],
    reference: Tensor,
    absent: list[Absent],
) -> dict[str, float]:
    """The error of each implementation that runs; the others become absent."""
    errors = dict[str, float]()
    for name, call in calls.items():
        try:
            error = relative_error(call(), reference)
            torch.cuda.synchronize()
        except Exception as problem:  # peers refuse in many ways, and a kernel may not compile
            text = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            absent.append(Absent(bench.name, str(case), name, text))
            continue
        if math.isfinite(error):
            errors[name] = error
        else:
            absent.append(Absent(bench.name, str(case), name, "the result is not finite"))
    return errors


def relative_error(got: Tensor, reference: Tensor) -> float:
    """The largest difference as a share of the largest element of the reference, taken in its
    dtype; infinite for another shape."""
    if got.shape != reference.shape:
        return math.inf
    largest = float(reference.abs().max()) or 1.0
    return float((got.to(reference.dtype) - reference).abs().max()) / largest


def _copy(size: int) -> Call:
    """A copy that moves `size` bytes, half of them in each direction."""
    source = torch.randint(0, 255, (max(size // 2, 1),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _row(
    bench: OperationBench,
    case: Case,
    work: Work,
    name: str,
    taken: Mapping[str, Array],
    error: float,
) -> Row:
    seconds = taken[name]
    noise = median_noise(seconds)
    median = float(np.median(seconds))
    return Row(
        operation=bench.name,
        case=str(case),
        sizes=dict(case.sizes),
        dtype=case.dtype,
        implementation=name,
        ours=name == OURS,
        seconds=Spread(*quantiles(seconds)),
        noise=noise if math.isfinite(noise) else None,
        rounds=len(seconds),
        bytes=work.bytes,
        operations=work.operations,
        error=error,
        copy_share=float(np.median(taken[COPY])) / median if bench.copies else None,
        lowbit_speedup=median / float(np.median(taken.get(OURS, seconds))),
    )
