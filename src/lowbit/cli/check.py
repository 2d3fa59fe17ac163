"""The command `lowbit check`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.app import JsonFile, command, exercises, offered, opened

if TYPE_CHECKING:
    from lowbit.lab.report import CheckResult


@command("check", example="check long_softmax --json report.json", code=2)
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
            autocompletion=offered(lambda: ("all", "cpu", "gpu", *exercises())),
        ),
    ],
    json_file: JsonFile = None,
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
    shown = _Shown(every)
    results: list[CheckResult] = []
    with opened(json_file) as stream:
        from lowbit.lab.check.run import check_what

        with shown.progress:
            for result in check_what(what, device, stop=not every, on_progress=shown.on_progress):
                results.append(result)
                if json_file != "-":
                    shown.result(result)
        if stream is not None:
            plain = [json.loads(result.to_json()) for result in results]
            print(json.dumps(plain, indent=2), file=stream)
    if not (all(results) or every):
        print("lowbit: --all goes on after the first error", file=sys.stderr)
    raise typer.Exit(0 if all(results) else 1)


class _Shown:
    """What a check shows while it runs: on a terminal, stderr has how far it is. A check that goes
    on after the first error shows that at once, on a terminal or not."""

    def __init__(self, every: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        self._out = Console(soft_wrap=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(
            *columns, console=errors, transient=True, disable=not errors.is_terminal
        )
        self._task = self.progress.add_task("", visible=False)
        self._every, self._said = every, set[tuple[str, str]]()

    def on_progress(self, kernel: str, done: int, of: int, error: str | None) -> None:
        self.progress.update(self._task, visible=True, description=kernel, completed=done, total=of)
        if self._every and error is not None and (kernel, error) not in self._said:
            self._said.add((kernel, error))
            self.progress.console.print(f"{kernel}: {error}", style="red", markup=False)

    def result(self, result: CheckResult) -> None:
        self.progress.stop()
        self._out.print(result)
        self.progress.start()
