"""The command `lowbit view`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.app import JsonFile, command, exercises, offered, opened

if TYPE_CHECKING:
    from lowbit.lab.view.run import View


def _fills() -> Iterable[str]:
    from lowbit.spec import FILLS

    return FILLS


@command("view", example="view long_softmax --html softmax.html", code=2)
def view(
    what: Annotated[
        str,
        typer.Argument(
            help="A teaching kernel by its operation's name, lowbit's product on a CPU as "
            "product:generic, or a file FILE.py.",
            show_default=False,
            metavar="KERNEL|FILE.py",
            autocompletion=offered(exercises),
        ),
    ],
    html_file: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Where to write the page.",
            show_default="view-KERNEL.html, unless --json is given",
        ),
    ] = None,
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Sizes, as N0=100,T=64; may be repeated.",
            show_default="the exercise's",
        ),
    ] = None,
    fill: Annotated[
        str,
        typer.Option(
            help="The data, as `lowbit check` uses them: normal, zeros, large, nan, ...",
            autocompletion=offered(_fills),
        ),
    ] = "normal",
) -> None:
    """Show what a kernel does, step by step: one page of HTML that needs no network.

    Tensors, what each step of each program loads, stores and multiplies, the source lines, how
    often each element is read, and bytes moved. Exit code: 0 if the page was written, also that of
    a wrong kernel; 2 if there is nothing to show.
    """
    from lowbit.lab.view import run

    sizes = sizes_of(shape or [])
    if what.endswith(".py"):
        seen = run.view_file(Path(what), sizes, fill)
    else:
        seen = run.view_named(what, sizes, fill)
    if html_file is None and json_file is None:
        html_file = f"view-{Path(what).stem.replace(':', '-')}.html"
    for file, text in ((html_file, seen.html), (json_file, seen.json)):
        with opened(file) as stream:
            if stream is not None:
                stream.write(text())
    if json_file == "-":
        return
    for line in _summary(seen):
        print(line)
    for file in (html_file, json_file):
        if file is not None:
            print(f"written to {file}")


def sizes_of(given: list[str]) -> dict[str, int]:
    """The sizes in NAME=SIZE,..., any number of times. ValueError for anything else."""
    sizes: dict[str, int] = {}
    for part in ",".join(given).split(",") if given else []:
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().isdigit():
            raise ValueError(f"the shape {part!r} is not understood; write N0=100,T=64")
        sizes[name.strip()] = int(size)
    return sizes


def _summary(seen: View) -> list[str]:
    from lowbit.lab.view.run import counted

    data = seen.data
    sizes = ", ".join(f"{name}={size}" for name, size in data["sizes"].items())
    steps = counted(len(data["events"]), "step")
    programs = counted(len(data["programs"]), "program")
    lines = [f"{data['kernel']} ({data['operation']}), {sizes}: {steps}, {programs}"]
    loaded = sum(tensor["loaded_bytes"] for tensor in data["tensors"])
    stored = sum(tensor["stored_bytes"] for tensor in data["tensors"])
    least = sum(tensor["least_bytes"] for tensor in data["tensors"])
    lines.append(f"  {loaded} bytes loaded, {stored} stored; at least {least} have to be moved")
    lines += [f"  {f['severity']}: {f['title']}: {f['message']}" for f in data["findings"]]
    return [*lines, *(f"  note: {note}" for note in data["notes"])]
