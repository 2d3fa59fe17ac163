"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

from lowbit.registry.extras import explained, install

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from lowbit import cli_ops, cli_search
    from lowbit.lab import cli_learn
    from lowbit.lab.cli_check import check
    from lowbit.lab.cli_view import view
except ModuleNotFoundError as missing:
    # This module serves the console command alone, and that has nothing else to say then.
    raise SystemExit(f"lowbit: the command line needs {missing.name}; {install('cli')}") from None

_DRAW_SECONDS = 0.2

app = typer.Typer(
    name="lowbit",
    help="Few-bit matrix multiplication with kernels written in Python.",
    epilog="Example: lowbit info",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Time lowbit against other libraries.",
    epilog="Example: lowbit bench gemm 256x512:512x1024",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
bench_app.command("search", epilog=cli_search.EPILOG)(cli_search.search)
bench_app.command("ops", epilog=cli_ops.EPILOG)(cli_ops.ops)
explain_app = typer.Typer(
    help="Say which kernel serves, how, and how fast it should be.",
    epilog="Example: lowbit explain gemm 256x512:512x256",
    no_args_is_help=True,
)
app.add_typer(explain_app, name="explain")
app.command("check", epilog="Example: lowbit check long_softmax --json report.json")(check)
app.command("learn", epilog=cli_learn.EPILOG)(cli_learn.learn)
app.command("view", epilog="Example: lowbit view long_softmax --html softmax.html")(view)


def main() -> None:
    """The console command `lowbit`."""
    app()


def _console() -> Console:
    # A file or a pipe has no width; the tables need about this much.
    return Console() if sys.stdout.isatty() else Console(width=160, soft_wrap=False)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn what a user can cause into one line: exit code 2 for bad input, 1 for the rest."""
    try:
        yield
    except ModuleNotFoundError as error:
        message, code = explained(error), 1
    except OSError as error:
        message, code = f"{error.filename}: {error.strerror}", 1
    except MemoryError:
        message, code = "out of memory; give smaller shapes", 1
    except (ValueError, RuntimeError) as error:
        message, code = str(error), 2
    else:
        return
    print(f"lowbit: {message}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal; elsewhere a line whenever something else begins. On stderr."""
    if not sys.stderr.isatty():
        said = ""

        def say(what: str, share: float) -> None:
            nonlocal said
            if what != said:
                print(f"{share:4.0%} {what}", file=sys.stderr, flush=True)
                said = what

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawn only between rounds: a thread that draws would compete with what is being timed.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=1.0)
        drawn = -math.inf

        def draw(what: str, share: float) -> None:
            nonlocal drawn
            news = what != bar.tasks[task].description
            bar.update(task, description=what, completed=share)
            if news or time.monotonic() - drawn > _DRAW_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        yield draw


def _show_version(wanted: bool) -> None:
    if wanted:
        from lowbit import __version__

        print(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def _lowbit(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: lowbit info --json")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What this machine has and what lowbit uses of it: CPU, instruction sets, caches, threads."""
    with _one_line_errors():
        facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _console().print(_facts_table(facts))


def _facts() -> dict[str, Any]:
    from lowbit import isa
    from lowbit.bench.context import versions
    from lowbit.bench.problem import GEMMS
    from lowbit.jit.threads import max_threads, runtime
    from lowbit.product.dispatch import active_kernel

    kernels = {op: list(active_kernel()) for op in (spec.name for spec in GEMMS)}
    return {
        **isa.report(),
        "kernels": kernels,
        "threads": max_threads(),
        "thread_runtime": runtime(),
        "versions": versions(),
    }


def _facts_table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("CPU", f"{facts['cpu']} ({facts['model']})")
    for name, one in ((one["name"], one) for one in facts["instruction_sets"]):
        state = "used" if one["used"] else "available" if one["available"] else "no: " + one["why"]
        table.add_row(name, state)
    table.add_row("forced", facts["forced"] or "nothing (LOWBIT_ISA is not set)")
    table.add_row("AMX", facts["amx"])
    for op, (kernel, instruction_set) in facts["kernels"].items():
        table.add_row(op, f"kernel {kernel} on {instruction_set}")
    sizes = (f"{name} {size / 1024:,.0f} KiB" for name, size in facts["caches"].items())
    table.add_row("caches", ", ".join(sizes))
    table.add_row("threads", f"{facts['threads']} ({facts['thread_runtime']})")
    versions = (f"{name} {version}" for name, version in facts["versions"].items())
    table.add_row("versions", ", ".join(versions))
    table.add_row("features", " ".join(facts["features"]))
    return table


# Seconds for a shape, dtype and thread count: a single one can have more time than a whole suite.
_SHAPE_SECONDS, _SUITE_SECONDS = 4.0, 0.6


@bench_app.command(
    epilog="Example: lowbit bench gemm 1x4096:4096x4096 256x512:512x256 --dtype u8:s8:s32 "
    "--threads 1 --json record.json"
)
def gemm(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="Shapes MxK:KxN.", show_default=False)
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="A set of shapes: seed, resnet34, vit_b16, minilm, llm, square or all.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Left, right and output: u8:s8:s32, u8:s8:f32, f32:s8:f32, ...; may be repeated.",
            show_default="u8:s8:s32; for a suite u8:s8:f32 and u8:s8:u8",
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            help="Threads for every implementation, or several numbers: 1,2.",
            show_default="all; for a suite one and all",
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Whether to time other libraries too.")] = True,
    cold: Annotated[
        bool | None,
        typer.Option(
            "--cold/--no-cold",
            help="Time with weights from memory as well.",
            show_default="only for a suite",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and of the order.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Stop in any case after these seconds for a row.",
            show_default=f"{_SHAPE_SECONDS}; for a suite {_SUITE_SECONDS}",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record to a file.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows to a file.")
    ] = None,
) -> None:
    """Time the product of two matrices: of the shapes given, of a suite, or of both.

    All implementations get the same data and take turns in random order. Each is compared with
    the exact result first; the table shows the largest error, as a share of the largest element.
    """
    if not shapes and suite is None:
        raise typer.BadParameter("give shapes MxK:KxN, or --suite NAME", param_hint="SHAPES")
    with _one_line_errors():
        from lowbit import bench
        from lowbit.bench.table import render

        whole = suite is not None
        works = {} if suite is None else {w.shape: w.name for w in bench.works_of(suite)}
        default_dtypes = ["u8:s8:f32", "u8:s8:u8"] if whole else ["u8:s8:s32"]
        default_limit = _SUITE_SECONDS if whole else _SHAPE_SECONDS
        wanted = [*(shapes or ()), *works]
        plan = bench.Plan(
            cases=[bench.gemm_case(s, d) for d in dtype or default_dtypes for s in wanted],
            threads=_thread_counts(threads, whole),
            works=works,
            seed=seed,
            peers=peers,
            cold=whole if cold is None else cold,
            limits=bench.Limits(
                noise=noise, seconds=default_limit if time_limit is None else time_limit
            ),
        )
        with _opened(json_file) as json_output, _opened(csv_file) as csv_output:
            with _progress() as progress:
                record = bench.run(plan, progress)
            _console().print(render(record, detailed=not whole))
            if json_output is not None:
                json_output.write(record.to_json() + "\n")
                print(f"record written to {json_file}")
            if csv_output is not None:
                csv_output.write(record.to_csv())
                print(f"rows written to {csv_file}")


@bench_app.command(epilog="Example: lowbit bench ladder --json record.json")
def ladder(
    shape: Annotated[
        str, typer.Argument(help="Queries and vectors as a shape MxK:KxN.")
    ] = "256x256:256x16384",
    threads: Annotated[int, typer.Option(help="Threads for all that can use several.")] = 1,
    peers: Annotated[bool, typer.Option(help="Whether to time other libraries too.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and of the order.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[float, typer.Option(help="Stop in any case after these seconds.")] = 20.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record to a file.")
    ] = None,
) -> None:
    """Time the ladder of exact uint4 products: teaching kernels in Numba with one new idea each,
    einsum, BLAS in float32, other libraries, lowbit. All are compared with the exact sums first."""
    with _one_line_errors():
        from lowbit.bench import Limits
        from lowbit.bench.ladder import LadderPlan, run
        from lowbit.bench.ladder_table import render

        limits = Limits(noise=noise, seconds=time_limit)
        plan = LadderPlan(shape, threads=threads, peers=peers, seed=seed, limits=limits)
        with _opened(json_file) as json_output:
            with _progress() as progress:
                record = run(plan, progress)
            _console().print(render(record))
            if json_output is not None:
                json_output.write(record.to_json() + "\n")
                print(f"record written to {json_file}")


@bench_app.command(epilog="Example: lowbit bench linear 1x4096:4096x4096 --activations f32,int8")
def linear(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(help="Shapes MxK:KxN.", show_default="six, of 4096x4096 and 4096x14336"),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="What lowbit computes with: f32 (W4A32), bf16 (W4A16), int8 (W4A8).")
    ] = "f32,bf16,int8",
    group_size: Annotated[int, typer.Option(help="How many k share a scale; 0: all.")] = 128,
    zero_points: Annotated[
        bool, typer.Option(help="Whether groups have zero points of their own.")
    ] = False,
    threads: Annotated[
        str, typer.Option(help="Threads for every implementation, or several numbers: 1,2.")
    ] = "1",
    peers: Annotated[bool, typer.Option(help="Whether to time PyTorch too.")] = True,
    cold: Annotated[bool, typer.Option(help="Time with weights from memory as well.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data and of the order.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[
        float, typer.Option(help="Stop after these seconds for a table, or when all had 5 turns.")
    ] = 4.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record to a file.")
    ] = None,
) -> None:
    """Time linear layers with 4-bit weights, against PyTorch's own and against float ones. Each is
    compared with float64 on the dequantized weights first."""
    with _one_line_errors():
        from lowbit.bench import Limits
        from lowbit.bench.linear import run
        from lowbit.bench.linear_problem import SHAPES, LinearPlan
        from lowbit.bench.linear_table import render

        plan = LinearPlan(
            shapes=shapes or SHAPES,
            activations=activations.split(","),
            group_size=group_size,
            zero_points=zero_points,
            threads=_thread_counts(threads, several=True),
            peers=peers,
            cold=cold,
            seed=seed,
            limits=Limits(noise=noise, seconds=time_limit, least_rounds=5),
        )
        with _opened(json_file) as json_output:
            with _progress() as progress:
                record = run(plan, progress)
            _console().print(render(record))
            if json_output is not None:
                json_output.write(record.to_json() + "\n")
                print(f"record written to {json_file}")


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """A file to write, opened at once: one that cannot be written should say so before minutes of
    timing, not after."""
    if path is None:
        yield None
        return
    with path.open("w", encoding="utf-8") as file:
        yield file


def _thread_counts(text: str | None, several: bool) -> list[int]:
    """The numbers in `1,2`, each once; by default all threads, with `several` one thread first."""
    from lowbit.jit.threads import max_threads

    if text is None:
        counts = [1, max_threads()] if several else [max_threads()]
    else:
        try:
            counts = [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"threads {text!r} is not understood; write 2, or 1,2") from None
    return list(dict.fromkeys(counts))


@explain_app.command(
    "gemm", epilog="Example: lowbit explain gemm 256x512:512x256 --dtype u8:s8:f32 --threads 1"
)
def explain_gemm(
    shape: Annotated[str, typer.Argument(help="A shape MxK:KxN.", show_default=False)],
    dtype: Annotated[
        str, typer.Option(help="Left, right and output: u8:s8:s32, u8:s8:f32, f32:s8:f32, ...")
    ] = "u8:s8:f32",
    threads: Annotated[
        int | None, typer.Option(help="Threads.", show_default="what the work is worth")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Which kernel serves a product, how it is cut and packed, what was rejected and why, and the
    time predicted from the measured limits of this machine beside the measured one."""
    with _one_line_errors():
        from lowbit.lab.explain.plan import explain_gemm as explain
        from lowbit.lab.explain.text import render

        found = explain(shape, dtype, threads)
    if as_json:
        print(found.to_json())
    else:
        _console().print(render(found))


@app.command(epilog="Example: lowbit demo --threads 1 --json result.json")
def demo(
    sentences: Annotated[int, typer.Option(help="How many sentences to embed.")] = 384,
    repeats: Annotated[int, typer.Option(help="How often to time one sentence.")] = 200,
    threads: Annotated[
        int | None, typer.Option(help="Threads for every implementation.", show_default="all")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(help="Whether to run torchao, ONNX Runtime and OpenVINO, where installed."),
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the runs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result to a file.")
    ] = None,
) -> None:
    """Quantize a pretrained sentence encoder and compare it with fp32 and others' int8.

    Prints size, latency and quality side by side. Takes one to two minutes; with torchao, ONNX
    Runtime and OpenVINO installed, up to two more.
    """
    with _one_line_errors():
        from lowbit.demo import run

        run(
            sentences=sentences,
            repeats=repeats,
            threads=threads,
            peers=peers,
            json_path=json_file,
            seed=seed,
            console=_console(),
        )
