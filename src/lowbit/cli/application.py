"""What all commands share: the application, their errors, progress and output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from lowbit.registry import Registry
from lowbit.registry.extras import explained, require
from lowbit.registry.files import OF_WRITING, naming_file
from lowbit.registry.printable import printable

if TYPE_CHECKING:  # what prints a text does without rich
    from rich.console import Console, RenderableType

    from lowbit.report.page import Figure


_HELP = {"help_option_names": ["-h", "--help"]}
# Commands by names that they had.
_RENAMED = {
    "anatomy": "explain kernel",
    "chat": "generate MODEL",
    "checkpoint": "quantize SOURCE --out FILE.safetensors",
    "convert": "quantize MODEL --weights kept --out DIR",
    "demo": "bench demo",
    "profile": "explain network",
    "steps": "compare examples/steps/FILE.py",
    "trace": "explain call",
    "tune": "bench tune",
}


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if new := _RENAMED.get(args[0]):
            ctx.fail(f"`lowbit {args[0]}` is `lowbit {new}` now")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="lowbit",
    cls=_Commands,
    help="Few-bit matrix multiplication with kernels written in Python.",
    epilog="Example: lowbit info",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)

commands: Registry[Callable[..., None]] = Registry("command", "lowbit.cli")
"""What `lowbit.cli` imports; a file that is there is found."""

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write it as JSON to a file; -: to the terminal."),
]
HtmlFile = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Write it as a page too, which loads nothing."),
]
Threads = Annotated[int | None, typer.Option(help="How many threads.", show_default="all")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of data, order and drawn shapes.")]


def described(
    within: typer.Typer, name: str, example: str, code: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the command `name` of an application, with `one_line_errors`."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        wrapped = one_line_errors(code)(function)
        epilog = f"Example: lowbit {example}"
        return within.command(name, epilog=epilog, context_settings=_HELP, **options)(wrapped)

    return make


def command(
    name: str, *, example: str, within: typer.Typer = app, code: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the command `name`; options: of typer's own `command`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        commands.add(f"{within.info.name} {name}", function)
        return described(within, name, example, code, **options)(function)

    return register


def group(name: str, text: str, *, example: str, **options: Any) -> typer.Typer:
    """Commands that have a word in common."""
    made = typer.Typer(
        name=name,
        help=text,
        epilog=f"Example: lowbit {example}",
        no_args_is_help=True,
        context_settings=_HELP,
        **options,
    )
    app.add_typer(made)
    return made


@contextmanager
def one_line_errors(code: int | None = None) -> Iterator[None]:
    """Turn what a user can cause into one line: exit code 2 for bad input, also where a file is not
    there, 1 for the rest. With `code`, whatever keeps a command from its work, and always this
    code: a user's file may raise anything while it is imported."""
    try:
        yield
    except typer.Exit:  # which is a RuntimeError
        raise
    except Exception as error:
        usual, message = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            message = explained(error)
        elif isinstance(error, OSError):
            unnamed = "standard output" if error.errno in OF_WRITING else ""
            name = error.filename or unnamed
            message = f"{name}: {error.strerror}" if name else str(error)
            if isinstance(error, FileNotFoundError):  # as of another name that there is not
                usual = 2
        elif isinstance(error, MemoryError):
            message = "out of memory; give smaller shapes, or fewer vectors"
        elif isinstance(error, ValueError | RuntimeError | TypeError):
            usual, message = 2, str(error) or type(error).__name__
        elif code is None:
            raise
        print(f"lowbit: {printable(message.splitlines()[0])}", file=sys.stderr)
        raise typer.Exit(code or usual) from error


def console(**options: Any) -> Console:
    """Standard output, where names from files steer no terminal; a file or a pipe has no width, and
    the tables need about this much."""
    from rich.console import Console

    from lowbit.report.escape import Escape

    made = Console(**options) if options or sys.stdout.isatty() else Console(width=170)
    made.push_render_hook(Escape())
    return made


class Show:
    """What shows a result as text, and writes it as JSON to a file, and as a page to another; "-"
    prints the JSON instead."""

    def __init__(self, file: str | None, stream: TextIO | None, html: TextIO | None = None) -> None:
        self._file, self._stream, self._html = file, stream, html

    def __call__(
        self,
        text: RenderableType,
        json: str,
        title: str = "lowbit",
        figures: Callable[[], Iterable[Figure]] = tuple,
    ) -> None:
        """figures: makes the charts of the page, where there is to be one."""
        if self._file != "-":
            console().print(text)
        if self._html is not None:
            from lowbit.report.page import command_line, page

            self._html.write(page(title, text, tuple(figures()), command_line()))
            self._html.flush()
            print(f"page written to {self._html.name}", file=sys.stderr)
        if self._file == "-":
            print(json)
        elif self._stream is not None:
            self.keep(json)
            print(f"record written to {self._file}")

    def keep(self, json: str) -> None:
        """Have this in the file for now, should there never be more; what is shown replaces it."""
        if self._stream is not None and self._file != "-":
            self._stream.seek(0)
            self._stream.truncate()
            self._stream.write(json + "\n")
            self._stream.flush()


@contextmanager
def output(file: str | None, html: str | None = None) -> Iterator[Show]:
    """A `Show` for a file and a page, which are opened at once. ModuleNotFoundError: there is to be
    a page, and what draws charts is not installed."""
    if html is not None:
        require("a page with charts", "lab", "altair", "vl_convert")
    with opened(file) as stream, opened(html) as page:
        yield Show(file, stream, page)


@contextmanager
def opened(file: str | None) -> Iterator[TextIO | None]:
    """A file to write, opened at once: one that cannot be written should say so before minutes of
    timing, not after. "-" is the terminal."""
    if file is None:
        yield None
    elif file == "-":
        yield sys.stdout
    else:
        with naming_file(file), open(file, "w", encoding="utf-8") as stream:
            yield stream


def thread_counts(text: str | None) -> list[int]:
    """The numbers in `1,2`, each once; by default one, of all threads."""
    from lowbit.jit.threads import max_threads

    if text is None:
        return [max_threads()]
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"threads {text!r} is not understood; write 2, or 1,2") from None


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what it can't encode does not end the command
            stream.reconfigure(errors="replace")


# The names that a shell offers for an argument.


def offered(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers for an argument: these names, so far as they begin with what is typed;
    none of them, so files, where an extra that they need is missing."""

    def offer(incomplete: str) -> list[str]:
        with suppress(Exception):  # a shell has no use for an error
            return [name for name in names() if name.startswith(incomplete)]
        return []

    return offer
