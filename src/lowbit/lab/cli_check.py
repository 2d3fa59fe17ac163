"""The command `lowbit check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from lowbit.lab.report import CheckResult


def check(
    what: Annotated[
        str,
        typer.Argument(
            help="A teaching kernel by its operation's name, a file FILE.py, or all.",
            show_default=False,
            metavar="KERNEL|FILE.py|all",
        ),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to a file.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu: the interpreter alone; cuda: the GPU too.",
            show_default="cuda where there is a GPU",
        ),
    ] = None,
) -> None:
    """Check a kernel against the specification of its operation.

    Many sizes and kinds of data, every access seen, outputs poisoned. Exit code: 0 if all is
    right, 1 if something is wrong with a kernel, 2 if it could not be checked.
    """
    try:
        results = _checked(what, device)
        if json_file is not None:
            text = json.dumps([json.loads(r.to_json()) for r in results], indent=2)
            json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")
    except Exception as error:  # a file may raise anything while it is imported
        _refuse(str(error) or type(error).__name__)
    console = Console(soft_wrap=True)
    for result in results:
        console.print(result)
    raise typer.Exit(0 if all(results) else 1)


def _checked(what: str, device: str | None) -> list[CheckResult]:
    from lowbit.lab import check_script

    if what == "all":
        return check_script.check_all(device)
    if what.endswith(".py"):
        return [check_script.check_file(Path(what), device)]
    return [check_script.check_named(what, device)]


def _refuse(message: str) -> NoReturn:
    print(f"lowbit: {message.splitlines()[0]}", file=sys.stderr)
    raise typer.Exit(2)
