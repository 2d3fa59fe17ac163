"""The command `lowbit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.application import HtmlFile, JsonFile, command, output


@command("compare", example="compare examples/gpu_matmul_variants.py --json variants.json", code=2)
def compare(
    file: Annotated[
        Path,
        typer.Argument(
            help="A file of variants of one kernel.", metavar="FILE", show_default=False
        ),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE,...", help="Sizes, as M=512,N=512.", show_default="the file's"
        ),
    ] = None,
    sm: Annotated[
        int | None,
        typer.Option(
            help="Compute capability to compile for: 90 for 9.0.", show_default="the GPU's, or 90"
        ),
    ] = None,
    time: Annotated[bool, typer.Option(help="Time what can run here.")] = True,
    peers: Annotated[bool, typer.Option(help="Time what others offer too.")] = True,
    time_limit: Annotated[
        float, typer.Option(help="Stop timing in any case after these seconds.")
    ] = 4.0,
    notes: Annotated[bool, typer.Option(help="Tell also what costs little by itself.")] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Check, time and explain variants of one kernel, and set neighbours against each other.

    Types, registers, spills, occupancy, the instructions of the inner loop, sectors and banks need
    no GPU. Exit code: 0 if no variant is wrong, 1 if one is, 2 if there is nothing to compare.
    """
    from lowbit_lab.bench.core.clock import Limits
    from lowbit_lab.cli.view import sizes_of
    from lowbit_lab.compare.run import compare as compared
    from lowbit_lab.compare.text import figures, render

    with output(json_file, html_file) as show:
        limits = Limits(seconds=time_limit)
        sizes = sizes_of(shape or [])
        found = compared(file, sizes, sm=sm, time=time, peers=peers, limits=limits)
        title = f"lowbit compare: {found.file}"
        show(render(found, notes), found.to_json(), title, lambda: figures(found))
    if not found.ok:
        raise typer.Exit(1)
