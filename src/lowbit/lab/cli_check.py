"""The command `lowbit check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from lowbit.lab.report import CheckResult
from lowbit.registry.extras import explained


def check(
    what: Annotated[
        str,
        typer.Argument(
            help="A teaching kernel by its operation's name, lowbit's product on a CPU as "
            "product:generic, an operator of lowbit.gpu as gpu:softmax, a file FILE.py, all "
            "(teaching kernels), or gpu (operators).",
            show_default=False,
            metavar="KERNEL|FILE.py|all|gpu",
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
        refuse(f"{error.filename}: {error.strerror}")
    except ModuleNotFoundError as error:
        refuse(explained(error))
    except Exception as error:  # a file may raise anything while it is imported
        refuse(str(error) or type(error).__name__)
    console = Console(soft_wrap=True)
    for result in results:
        console.print(result)
    raise typer.Exit(0 if all(results) else 1)


def _checked(what: str, device: str | None) -> list[CheckResult]:
    from lowbit.lab import check_script
    from lowbit.lab.check_gpu import PREFIX, check_gpu

    if what == "all":
        return check_script.check_all(device)
    if what == "gpu" or what.startswith(PREFIX):
        return check_gpu(what.removeprefix(PREFIX) if what != "gpu" else None, device)
    if what.endswith(".py"):
        return [check_script.check_file(Path(what), device)]
    return [check_script.check_named(what, device)]


def refuse(message: str) -> NoReturn:
    """Say in one line why nothing could be done, and stop with exit code 2."""
    print(f"lowbit: {message.splitlines()[0]}", file=sys.stderr)
    raise typer.Exit(2)
