"""The command `lowbit bench tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli.application import command
from lowbit_lab.cli.bench import bench


@command("tune", example="bench tune 64x4096:4096x14336 --format w4a16", within=bench)
def tune(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(help="Shapes MxK:KxN.", show_default="those of `bench linear` on GPUs"),
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(help="w4a16, w8a16, int8 or fp8; repeated.", show_default="all"),
    ] = None,
    device: Annotated[str, typer.Option(help="The GPU: cuda, or cuda:1.")] = "cuda",
    budget: Annotated[float, typer.Option(help="Stop after these seconds.")] = 600.0,
    again: Annotated[bool, typer.Option(help="Measure what the table has already.")] = False,
) -> None:
    """Time the configurations of products with quantized weights on this GPU, each compared with
    float64 before, and write a table of those that are faster than the rule's. Later processes find
    it; what it has already is not measured again."""
    from lowbit.registry.extras import require

    require("lowbit bench tune", "gpu", "torch", "triton")
    from lowbit.kernels.triton.fast.launch import gpu_of
    from lowbit.kernels.triton.fast.tables import path_of
    from lowbit_lab.bench.core import cuda
    from lowbit_lab.bench.core.progress import progress
    from lowbit_lab.bench.linear import tune as tuning
    from lowbit_lab.bench.linear.layers import SHAPES, TUNED, parse

    where = cuda.require(device)
    layers = parse(format or TUNED, shapes or SHAPES)

    def show(point: tuning.Point) -> None:
        key = point.key
        best = f"{point.gain:.2f} by {point.best}" if point.gain > 1 else "the rule is the best"
        print(f"{key.kernel}, {key.kind}, {key.M}x{key.K}:{key.K}x{key.N}: {best}", flush=True)

    with progress() as on_progress:
        count = tuning.tune(layers, where, budget, on_progress, show, again)
    print(f"{count} of {len(layers)} measured; the table is {path_of(gpu_of(where))}")
