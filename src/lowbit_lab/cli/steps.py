"""The command `lowbit steps`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.application import HtmlFile, JsonFile, Seed, command
from lowbit_lab.cli.bench import run_suite


@command("steps", example="steps cpu-int8 512x512:512x512 --html steps.html")
def steps(
    ladder: Annotated[
        str, typer.Argument(help="cpu-int8, cpu-float32, gpu or uint4.", show_default=False)
    ],
    shape: Annotated[
        str | None, typer.Argument(help="A shape MxK:KxN.", show_default="the ladder's own")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Whether to time other libraries too.")] = True,
    seed: Seed = 0,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop in any case after these seconds.")
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    history_folder: Annotated[
        Path | None,
        typer.Option("--history", metavar="DIR", help="Add the record to a folder of them."),
    ] = None,
) -> None:
    """Time a product step by step, from a plain loop to lowbit's own beside the best libraries, on
    one thread, and plot it. Each step is checked first; its page is in docs/."""
    from lowbit_lab.bench import Plan
    from lowbit_lab.bench.suites.steps import suite_of

    suite = suite_of(ladder, shape)
    limits = suite.limits if time_limit is None else replace(suite.limits, seconds=time_limit)
    run_suite(suite, Plan(peers=peers, seed=seed, limits=limits), json_file, html_file, None,
              history_folder)  # fmt: skip
