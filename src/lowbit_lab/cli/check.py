"""The command `lowbit check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lowbit.cli.application import JsonFile, command, console, offered, opened
from lowbit_lab.cli import exercises

if TYPE_CHECKING:
    from lowbit_lab.checks.result import CheckResult


class _BeforeScript(TyperCommand):
    """A command whose options end at --run: what follows the script is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--run") + 1 if "--run" in args else len(args)
        return super().parse_args(ctx, [*args[:end], "--", *args[end:]])


@command("check", example="check long_softmax --json report.json", code=2, cls=_BeforeScript)
def check(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A teaching kernel by its operation's name, a function on a CPU as cpu:matmul, "
            "the text of lowbit's product as product:generic, an operator of lowbit.torch as "
            "gpu:softmax, a file FILE.py, all (teaching kernels), cpu (functions), or gpu "
            "(operators).",
            show_default=False,
            metavar="KERNEL|FILE.py|all|cpu|gpu | --run SCRIPT.py [ARGUMENTS]",
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
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Run the script SCRIPT.py with the arguments that follow it, and watch every "
            "launch of Triton: no specification is needed.",
        ),
    ] = False,
) -> None:
    """Check a kernel against the specification of its operation.

    Many sizes and kinds of data, every access seen, outputs poisoned; until the first error, unless
    --all is given. Exit code: 0 if all is right, 1 if something is wrong with a kernel, 2 if it
    could not be checked. With --run: 1 if something was found, 2 if the script fails without that,
    or launches no kernel of Triton, so that nothing was watched.
    """
    if run:
        _watch(what, json_file)
    if len(what) > 1:
        raise ValueError(f"{len(what)} kernels were named ({', '.join(what)}); name one")
    _check(what[0], json_file, device, every)


def _watch(script: list[str], json_file: str | None) -> None:
    with opened(json_file) as stream:
        from lowbit_lab.watched.script import run_script

        log, failed = run_script(Path(script[0]), script[1:])
        if stream is not None:
            print(log.to_json(), file=stream)
    if json_file != "-":
        console(soft_wrap=True, highlight=False).print(log)
    if failed is not None:
        print(f"lowbit: {script[0]} failed: {failed}", file=sys.stderr)
    if not log.watched:
        print(f"lowbit: {script[0]} launched no kernel of Triton to watch", file=sys.stderr)
    if not log.ok:
        raise typer.Exit(1)
    raise typer.Exit(0 if log.watched and failed is None else 2)


def _check(what: str, json_file: str | None, device: str | None, every: bool) -> None:
    shown = _Shown(every)
    results: list[CheckResult] = []
    with opened(json_file) as stream:
        from lowbit_lab.checks.run import check_what

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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        errors = console(stderr=True, soft_wrap=True, highlight=False)
        self._out = console(soft_wrap=True, highlight=False)
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
