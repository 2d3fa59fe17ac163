"""The command `lowbit check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lowbit.lab.report import CheckResult
from lowbit.registry.extras import explained


def check(
    what: Annotated[
        str,
        typer.Argument(
            help="A teaching kernel by its operation's name, a function on a CPU as cpu:matmul, "
            "the text of lowbit's product as product:generic, an operator of lowbit.torch as "
            "gpu:softmax, a file FILE.py, all (teaching kernels), cpu (functions), or gpu "
            "(operators).",
            show_default=False,
            metavar="KERNEL|FILE.py|all|cpu|gpu",
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
    every: Annotated[
        bool, typer.Option("--all", help="Go on after the first case that goes wrong.")
    ] = False,
) -> None:
    """Check a kernel against the specification of its operation.

    Many sizes and kinds of data, every access seen, outputs poisoned; until the first error, unless
    --all is given. Exit code: 0 if all is right, 1 if something is wrong with a kernel, 2 if it
    could not be checked.
    """
    from lowbit.lab.check.named import check_what

    shown, results = _Shown(every), list[CheckResult]()
    with refusing():
        with shown.progress:
            for result in check_what(what, device, stop=not every, tell=shown.tell):
                shown.result(result)
                results.append(result)
        if json_file is not None:
            text = json.dumps([json.loads(r.to_json()) for r in results], indent=2)
            json_file.write_text(text + "\n", encoding="utf-8")
    if not (all(results) or every):
        print("lowbit: --all goes on after the first error", file=sys.stderr)
    raise typer.Exit(0 if all(results) else 1)


class _Shown:
    """What a check shows while it runs: on a terminal, stderr has how far it is. A check that goes
    on after the first error shows that at once, on a terminal or not."""

    def __init__(self, every: bool) -> None:
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(
            *columns, console=errors, transient=True, disable=not errors.is_terminal
        )
        self._task = self.progress.add_task("", visible=False)
        self._every, self._said = every, set[tuple[str, str]]()

    def tell(self, kernel: str, done: int, of: int, error: str | None) -> None:
        self.progress.update(self._task, visible=True, description=kernel, completed=done, total=of)
        if self._every and error is not None and (kernel, error) not in self._said:
            self._said.add((kernel, error))
            self.progress.console.print(f"{kernel}: {error}", style="red", markup=False)

    def result(self, result: CheckResult) -> None:
        self.progress.stop()
        Console(soft_wrap=True, highlight=False).print(result)
        self.progress.start()


@contextmanager
def refusing() -> Iterator[None]:
    """Within it, whatever keeps a command from its work is said in one line, with exit code 2."""
    try:
        yield
    except typer.Exit:
        raise
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        refuse(explained(error))
    except (ValueError, TypeError, RuntimeError) as error:
        refuse(str(error) or type(error).__name__)
    except Exception as error:  # a file may raise anything while it is imported
        refuse(f"{type(error).__name__}: {error}")


def refuse(message: str) -> NoReturn:
    """Say in one line why nothing could be done, and stop with exit code 2."""
    print(f"lowbit: {message.splitlines()[0]}", file=sys.stderr)
    raise typer.Exit(2)
