"""The command `lowbit explain network`."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli.application import HtmlFile, JsonFile, Threads, command, output
from lowbit_lab.cli.explain import explain


@command(
    "network", example="explain network resnet34 --threads 1 --html network.html", within=explain
)
def network(
    model: Annotated[
        str,
        typer.Argument(
            help="A network by name (`lowbit bench networks` knows them), module:function that "
            "returns a PyTorch model or a pair (model, example), FILE.onnx, or what lowbit "
            "quantize or lowbit.graph.save wrote.",
            metavar="MODEL",
            show_default=False,
        ),
    ],
    config: Annotated[
        str, typer.Option(help="What it is quantized to beside it: static, dynamic, int4 or none.")
    ] = "static",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.npy|FILE.npz|random", help="To calibrate with.", show_default="random"
        ),
    ] = None,
    threads: Threads = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Show where the time of a network goes: PyTorch's operators, then every layer as lowbit runs
    it, before and after quantization, with its share of multiply-adds and of time, and against the
    limit of the machine that it runs into."""
    from lowbit_lab.explain.network import figures, profile, render

    with output(json_file, html_file) as show:
        wanted = None if config == "none" else config
        found = profile(model, config=wanted, data=data, threads=threads)
        show(render(found), found.to_json(), f"{found.name}, profiled", lambda: figures(found))
