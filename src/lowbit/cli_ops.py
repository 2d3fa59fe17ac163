"""The command `lowbit bench ops`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowbit.registry.extras import explained, require

EPILOG = "Example: lowbit bench ops --device cuda --op softmax --op row_sum --json record.json"


def ops(
    device: Annotated[str, typer.Option(help="The GPU: cuda, or cuda:1.")] = "cuda",
    op: Annotated[
        list[str] | None,
        typer.Option(help="An operation by its name; may be repeated.", show_default="all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases of each operation.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Whether to time torch.compile too.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and of the order.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[
        float, typer.Option(help="Stop in any case after these seconds for a case.")
    ] = 0.5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record to a file.")
    ] = None,
) -> None:
    """Time the operators of lowbit.torch against PyTorch's, on a GPU.

    All implementations get the same data, are compared with float64 first, and take turns in
    random order with cold caches. Exit code 2 where there is no GPU.
    """
    try:
        require("lowbit bench ops", "gpu", "torch", "triton")
        from lowbit import bench
        from lowbit.bench.ops.suite import OpsPlan, require_gpu, run

        require_gpu(device)
        plan = OpsPlan(
            names=op or (),
            quick=quick,
            skip=frozenset() if compiled else frozenset({"torch.compile"}),
            seed=seed,
            limits=bench.Limits(noise=noise, seconds=time_limit),
        )
        with json_file.open("w", encoding="utf-8") if json_file else nullcontext() as output:
            record = run(plan, device, _say)
            _console().print(record.to_table())
            for one in record.absent:
                print(f"not run: {one.operation} {one.case}, {one.implementation}: {one.reason}")
            if output is not None:
                output.write(record.to_json() + "\n")
                print(f"record written to {json_file}")
    except ModuleNotFoundError as error:
        print(f"lowbit: {explained(error)}", file=sys.stderr)
        raise typer.Exit(1) from None
    except (ValueError, RuntimeError) as error:
        print(f"lowbit: {str(error).splitlines()[0]}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:
        print(f"lowbit: {error.filename}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None


def _say(what: str, share: float) -> None:
    print(f"{share:4.0%} {what}", file=sys.stderr, flush=True)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=170, soft_wrap=False)
