"""The commands `lowbit bench SUITE`, each made of the options of its suite, and `behind`."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import MISSING, Field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from lowbit.cli.application import (
    HtmlFile,
    JsonFile,
    Seed,
    command,
    described,
    group,
    one_line_errors,
    opened,
    output,
    thread_counts,
)
from lowbit.cli.report import records

_Names = tuple[str, ...]


class _Suites(TyperGroup):
    """The suites are imported when somebody asks for them."""

    def list_commands(self, ctx: Any) -> list[str]:
        with one_line_errors():
            from lowbit_lab.bench.core.suite import suites

            return [*super().list_commands(ctx), *suites.names()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        suite = known is None and cmd_name in self.list_commands(ctx)
        return _command(cmd_name) if suite else known


bench = group(
    "bench",
    "Time lowbit against other libraries.",
    example="bench matmul 256x512:512x1024",
    cls=_Suites,
)


@command("behind", example="bench behind record.json --page docs/behind.md", within=bench)
def behind(
    records: Annotated[list[str], typer.Argument(help="Files that --json of a suite wrote.")],
    page: Annotated[str, typer.Option(metavar="FILE", help="Where to; -: the terminal.")] = "-",
    rows: Annotated[bool, typer.Option(help="Whether to show these rows too.")] = True,
) -> None:
    """Make a page, in Markdown, of every row in which a peer is ahead of lowbit."""
    from lowbit_lab.bench.core import compare

    folder = os.path.dirname(page)
    read = {os.path.relpath(path, folder): compare.read(path) for path in records}
    with opened(page) as stream:
        more = compare.rows_behind(read) if rows else compare.EVERY_ROW
        print(compare.page_behind(read).replace(compare.EVERY_ROW, more), end="", file=stream)


_Margin = Annotated[float, typer.Option(help="Times that differ by less are the same.")]


@command("compare", example="bench compare old.json new.json", within=bench)
def compare(
    old: Annotated[str, typer.Argument(help="A record, or a folder of them: its last one.")],
    new: Annotated[str, typer.Argument(help="The same, to be held against it.")],
    margin: _Margin = 0.05,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Compare two records, row by row: same, faster, slower, or unclear where the spreads of the
    two runs leave it open."""
    from lowbit_lab.bench.core import compare

    with output(json_file, html_file) as show:
        found = compare.compare(*compare.pair(old, new), margin)
        show(compare.render(found), found.to_json(), f"{found.suite}: {old}, then {new}")


@command("history", example="bench history records --html history.html", within=bench)
def history(
    folder: Annotated[str, typer.Argument(help="What --history of a suite adds records to.")],
    margin: _Margin = 0.05,
    html_file: HtmlFile = None,
) -> None:
    """Show what a folder of records says: every row, run after run."""
    from lowbit_lab.bench.core import charts, compare

    with output(None, html_file) as show:
        several = compare.records(folder)
        text = compare.render_history(several, margin)
        show(text, "", folder, lambda: charts.of_history(several))


def _command(name: str) -> Any:
    """The command of a suite: its own options, then those of all."""
    from lowbit_lab.bench.core.suite import fields, suites

    suite = suites.get(name)
    types = get_type_hints(suite)
    own = [_parameter(one, types[one.name]) for one in fields(suite)]
    has = {"suite": False, "threads": suite.threaded, "cold": suite.colds}
    common = inspect.signature(_run, eval_str=True).parameters.values()
    parameters = [*own, *(one for one in common if has.get(one.name, True))]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    def run(**values: Any) -> None:
        given = {one.name: values.pop(one.name) for one in fields(suite)}
        # What was not given is left to the suite.
        chosen = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
        _run(suite(**{n: v for n, v in chosen.items() if v not in (None, ())}), **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = suite.__doc__
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    described(single, name, f"bench {name} {suite.example}".rstrip())(run)
    return typer.main.get_command(single)


def _parameter(one: Field[Any], kind: Any) -> inspect.Parameter:
    """A field of a suite as an option, or as its argument."""
    default = one.default if one.default is not MISSING else None
    asked: dict[str, Any] = {"help": one.metadata["help"]}
    if one.metadata["show_default"] is not None:
        asked["show_default"] = one.metadata["show_default"]
    several = kind == _Names
    if several:  # Typer knows lists; an empty one is the default
        kind = list[str] | None
        asked.setdefault("show_default", False)
        default = None
    info = typer.Argument(**asked) if one.metadata["argument"] else typer.Option(**asked)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, keyword, default=default, annotation=Annotated[kind, info])


def _run(
    suite: Any,
    threads: Annotated[
        str | None,
        typer.Option(help="How many threads, or several numbers: 1,2.", show_default="all"),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Whether to time other libraries too.")] = True,
    cold: Annotated[
        bool | None,
        typer.Option("--cold/--no-cold", help="Time with weights from memory as well."),
    ] = None,
    seed: Seed = 0,
    noise: Annotated[
        float, typer.Option(help="Stop when all medians are known this well (0.01 is 1 %).")
    ] = 0.01,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Stop in any case after these seconds for a table, or a row of a set."),
    ] = None,
    json_file: JsonFile = None,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write the rows to a file.")
    ] = None,
    html_file: HtmlFile = None,
    history_folder: Annotated[
        Path | None,
        typer.Option("--history", metavar="DIR", help="Add the record to a folder of them."),
    ] = None,
) -> None:
    """Run a suite, with what every suite is asked."""
    from lowbit_lab.bench import Plan

    suite = suite.resolved()
    limits = replace(suite.limits, noise=noise)
    plan = Plan(
        threads=thread_counts(threads) if suite.threaded else (1,),
        peers=peers,
        cold=suite.cold_by_default if cold is None else cold,
        seed=seed,
        limits=limits if time_limit is None else replace(limits, seconds=time_limit),
    )
    run_suite(suite, plan, json_file, html_file, csv_file, history_folder)


def run_suite(
    suite: Any,
    plan: Any,
    json_file: str | None,
    html_file: str | None,
    csv_file: str | None = None,
    history_folder: Path | None = None,
) -> None:
    """Run a suite, show its record, and write it wherever that is wanted."""
    from lowbit.report.page import command_line
    from lowbit_lab.bench import run
    from lowbit_lab.bench.core import charts
    from lowbit_lab.bench.core.compare import keep
    from lowbit_lab.bench.core.progress import progress

    if history_folder is not None:
        history_folder.mkdir(parents=True, exist_ok=True)  # or say at once that it cannot be
    with output(json_file, html_file) as show, opened(csv_file) as rows:
        with progress() as on_progress:
            record = run(suite, plan, on_progress, lambda found: show.keep(found.to_json()))
        record.context["command"] = command_line()
        text, figures = suite.render(record), lambda: charts.of_record(record)
        show(text, record.to_json(), f"lowbit: {suite.name}", figures)
        if rows is not None:
            rows.write(record.to_csv())
            print(f"rows written to {csv_file}", file=sys.stderr)
    if history_folder is not None:
        print(f"record kept as {keep(record, history_folder)}", file=sys.stderr)


@records.register("benchmark")
def show_record(file: Path, json_file: str | None, html_file: str | None) -> None:
    """Show a record again, as `lowbit report FILE` does."""
    from lowbit_lab.bench.core import charts
    from lowbit_lab.bench.core.compare import read
    from lowbit_lab.bench.core.suite import Suite, suites

    record = read(file)
    # A record of a suite that no longer exists is shown as a plain table.
    suite = suites.get(record.suite)() if record.suite in suites.names() else Suite()
    with output(json_file, html_file) as show:
        title, figures = f"lowbit: {record.suite}", lambda: charts.of_record(record)
        show(suite.render(record), record.to_json(), title, figures)
