"""Why a quantized linear layer runs on a GPU as it does: kernel, configuration, where that comes
from, and the time that the limits of the GPU allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.kernels.triton.fast import tables
from lowbit.kernels.triton.fast.launch import Choice, Gpu, gpu_of
from lowbit_lab.bench.core.case import Case
from lowbit_lab.bench.core.clock import Limits, quantiles
from lowbit_lab.bench.core.cuda import Graphs
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.record import Spread
from lowbit_lab.bench.core.table import facts_table
from lowbit_lab.bench.linear import layers
from lowbit_lab.explain.product import Prediction, Timed, add_times

_LIMITS = Limits(noise=0.01, seconds=0.5, least_rounds=9)


@dataclass(frozen=True, kw_only=True)
class GpuExplanation(Timed):
    """All of it, with a cold weight. programs: of the kernel's launch, None where it is a
    library's."""

    case: Case
    gpu: Gpu
    choice: Choice[Any]
    programs: int | None


def explain_linear(shape: str, format: str, device: str) -> GpuExplanation:
    """Explain the product of `shape` (`MxK:KxN`) in a format of `lowbit bench linear`. device:
    "cuda", whose limits are measured and on which the product runs; or the name of a GPU of which
    lowbit has a table. ValueError for what is not understood; RuntimeError without a GPU."""
    (case,) = layers.parse([format], [shape])
    measured, named = None, Gpu(0, 0, device)
    if device.startswith("cuda"):
        gpu, ceiling, measured = _on(case, Graphs(device), torch.device(device))
    elif about := tables.read(tables.path_of(named, own=True))[0]:
        gpu = Gpu(about["capability"], about["multiprocessors"], about["gpu"])
        limits = dict(about["limits"])
        read = {"memory": limits.pop("memory")}
        ceiling = Ceiling("", 0, "", limits["bfloat16"], limits["bfloat16"], limits, read)
    else:
        raise ValueError(f"device is {device!r}; give cuda, or a GPU of a table: {_known()}")
    kind = layers.FORMATS[format]
    choice = kind.choice(gpu, *(case.sizes[name] for name in "MNK"))
    ceiling = replace(ceiling, gops=ceiling.ways[kind.way], way=kind.way)
    work, moved = layers.operations(case), layers.least_bytes(case)
    compute, memory = work / ceiling.gops / 1e9, moved / ceiling.read_gbs["memory"] / 1e9
    limit = "compute" if compute >= memory else "memory"
    prediction = Prediction(work, moved, "memory", compute, memory, limit)
    return GpuExplanation(
        case=case,
        gpu=gpu,
        choice=choice,
        programs=_programs(choice.config, case),
        ceiling=ceiling,
        prediction=prediction,
        measured=measured,
    )


def _on(case: Case, clock: Graphs, device: torch.device) -> tuple[Gpu, Ceiling, Spread]:
    """What a GPU is, what it can do, and how long the product takes there."""
    with clock.using(1), torch.inference_mode():
        ceiling = clock.ceiling("", 1, "bfloat16")
        task = layers.GpuLinearProblem.make(case, 0, device)
        first = layers.packed(task)
        (count,) = clock.copies([task.weight_bytes])
        weights = [first, *(layers.copied(first) for _ in range(count - 1))]
        calls = [lambda weight=weight: layers.multiplied(task, *weight) for weight in weights]
        taken = clock.time({"lowbit": calls}, _LIMITS)["lowbit"]
        return gpu_of(device), ceiling, Spread(*quantiles(taken.seconds))


def _known() -> str:
    return ", ".join(tables.read(path)[0]["gpu"] for path in sorted(tables.OWN.glob("*.json")))


def _programs(config: Any, case: Case) -> int | None:
    if config is None:
        return None
    M, N = case.sizes["M"], case.sizes["N"]
    return config.tiles(M, N) * config.splits


def render(one: GpuExplanation) -> RenderableType:
    """One line a fact."""
    table = facts_table()
    table.add_row("kernel", f"{one.choice.kernel}: {one.choice.why}")
    for name, why in one.choice.refused:
        table.add_row("rejected", f"{name}: {why}")
    if one.programs is not None:
        waves = one.programs / one.gpu.multiprocessors
        table.add_row("configuration", str(one.choice.config))
        table.add_row("chosen", one.choice.source or "by the rule")
        table.add_row("programs", f"{one.programs:,}, {waves:.2f} for each multiprocessor")
    add_times(table, one)
    what = f"linear {one.case.dtypes} {one.case.name} on {one.gpu.name}"
    return Group(Text(what, style="bold"), "", table)
