"""The command `lowbit bench search`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from lowbit.registry.extras import explained

EPILOG = "Example: lowbit bench search --vectors 100000 --dim 384 --bits 4 --json record.json"


def search(
    vectors: Annotated[int, typer.Option(help="How many vectors are searched.")] = 100_000,
    dim: Annotated[int, typer.Option(help="How many numbers each has.")] = 384,
    bits: Annotated[int, typer.Option(help="Of each number, as it is stored: 8 or 4.")] = 4,
    k: Annotated[int, typer.Option("--k", help="How many are to be found.")] = 10,
    batch: Annotated[str, typer.Option(help="Queries together, or several numbers.")] = "1,256",
    candidates: Annotated[
        int, typer.Option(help="How many are rescored from the float32 vectors; 0: no rescoring.")
    ] = 40,
    metric: Annotated[str, typer.Option(help="dot, cosine or l2.")] = "dot",
    threads: Annotated[int, typer.Option(help="Threads for every implementation.")] = 1,
    peers: Annotated[bool, typer.Option(help="Whether to time FAISS too.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and of the order.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[
        float, typer.Option(help="Stop in any case after these seconds for two implementations.")
    ] = 4.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record to a file.")
    ] = None,
) -> None:
    """Time search over compressed vectors, and tell how many of the nearest it finds.

    Vectors are synthetic, in clusters. Recall is against exact float32 scores. Implementations
    take turns in random order, each with lowbit.
    """
    try:
        from lowbit import bench
        from lowbit.bench.search import run
        from lowbit.bench.search_problem import SearchPlan
        from lowbit.bench.search_table import render

        plan = SearchPlan(
            vectors=vectors,
            dim=dim,
            bits=bits,
            k=k,
            batches=_numbers(batch),
            candidates=candidates,
            metric=metric,
            threads=threads,
            seed=seed,
            peers=peers,
            limits=bench.Limits(noise=noise, seconds=time_limit),
        )
        if json_file is not None:
            json_file.touch()  # one that cannot be written should say so before minutes of timing
        said = ""

        def progress(what: str, share: float) -> None:
            nonlocal said
            if what != said:
                print(f"{share:4.0%} {what}", file=sys.stderr, flush=True)
                said = what

        record = run(plan, progress)
        if json_file is not None:
            json_file.write_text(record.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}", 1)
    except MemoryError:
        _refuse("out of memory; give fewer vectors", 1)
    except ModuleNotFoundError as error:
        _refuse(explained(error), 1)
    except (ValueError, RuntimeError) as error:
        _refuse(str(error), 2)
    # A file or a pipe has no width; the table needs about this much.
    console = Console() if sys.stdout.isatty() else Console(width=160, soft_wrap=False)
    console.print(render(record))
    if json_file is not None:
        print(f"record written to {json_file}")


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in `1,256`, each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"batch {text!r} is not understood; write 256, or 1,256") from None


def _refuse(message: str, code: int) -> NoReturn:
    print(f"lowbit: {message}", file=sys.stderr)
    raise typer.Exit(code)
