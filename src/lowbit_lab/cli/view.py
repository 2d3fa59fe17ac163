"""The command `lowbit view`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.application import command, offered, opened
from lowbit_lab.cli import exercises

if TYPE_CHECKING:
    from lowbit_lab.views.run import View


def _fills() -> Iterable[str]:
    from lowbit.spec import FILLS

    return FILLS


def _layouts() -> Iterable[str]:
    from lowbit_lab.views.run import LAYOUTS

    return LAYOUTS


_LAYOUT = "How tensors lie where strides are parameters: padded, transposed, rows, expanded."
_FILL = "The data, as `lowbit check` uses them: normal, zeros, negative, large, low, tiny, nan, ..."


_Saved = Annotated[
    str | None,
    typer.Option(
        "--save",
        "--json",
        metavar="FILE",
        help="Write it as JSON to a file; -: to the terminal.",
    ),
]
_Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--sizes",
        "--shape",
        metavar="NAME=SIZE,...",
        help="Sizes, as N0=100,T=64; may be repeated.",
        show_default="of a file those of the first case that fails, else the exercise's",
    ),
]


@command("view", example="view long_softmax --html softmax.html", code=2)
def view(
    what: Annotated[
        str,
        typer.Argument(
            help="A teaching kernel by its operation's name, lowbit's product on a CPU as "
            "product:generic, a file FILE.py, or a view that was saved as FILE.json.",
            show_default=False,
            metavar="KERNEL|FILE.py|FILE.json",
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
    json_file: _Saved = None,
    sizes_text: _Sizes = None,
    fill: Annotated[
        str | None,
        typer.Option(help=_FILL, autocompletion=offered(_fills), show_default="normal"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help=_LAYOUT, autocompletion=offered(_layouts), show_default="contiguous"),
    ] = None,
) -> None:
    """Show what a kernel does, step by step: one page of HTML that needs no network.

    Tensors, what each step of each program loads, stores and multiplies, the source lines, how
    often each element is read, and bytes moved. A file is checked first, and if it is wrong the
    first case that fails is shown, made as small as it still does; with --sizes, --fill or --layout
    it is not. Exit code: 0 if the page was written, also that of a wrong kernel; 2 if there is
    nothing to show.
    """
    seen = _seen(what, sizes_of(sizes_text or []), fill, layout)
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


def _seen(what: str, sizes: dict[str, int], fill: str | None, layout: str | None) -> View:
    """What is asked for: a view that was saved, the failing case of a file, or this run."""
    from lowbit_lab.checks.run import view_failing
    from lowbit_lab.views import run

    chosen = {"sizes": sizes, "fill": fill, "layout": layout}
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value}
    if what.endswith(".json"):
        if given:
            raise ValueError(f"{what} is a run that was saved; --{min(given)} is of a new one")
        return run.View.saved(what)
    if not what.endswith(".py"):
        return run.view_named(what, **given)
    return run.view_file(Path(what), **given) if given else view_failing(Path(what))


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
    from lowbit_lab.views.run import counted

    data = seen.data
    sizes = ", ".join(f"{name}={size}" for name, size in data["sizes"].items())
    steps = counted(len(data["events"]), "step")
    programs = counted(len(data["programs"]), "program")
    lines = [f"{data['kernel']} ({data['operation']}), {sizes}: {steps}, {programs}"]
    tensors = [tensor for tensor in data["tensors"] if tensor["role"] != "shared"]
    loaded, stored, least = (
        sum(tensor[f"{name}_bytes"] for tensor in tensors) for name in ("loaded", "stored", "least")
    )
    lines.append(f"  {loaded} bytes loaded, {stored} stored; at least {least} have to be moved")
    lines += [f"  {f['severity']}: {f['title']}: {f['message']}" for f in data["findings"]]
    return [*lines, *(f"  note: {note}" for note in data["notes"])]
