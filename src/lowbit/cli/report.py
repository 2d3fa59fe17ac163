"""The command `lowbit report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.app import HtmlFile, JsonFile, command, output


@command("report", example="report resnet34-int8 --latency networks.json --html report.html")
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="What lowbit quantize wrote, or a record of lowbit bench.",
            metavar="DIR|RECORD.json",
            show_default=False,
        ),
    ],
    html_file: HtmlFile = None,
    latency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A record of `lowbit bench networks`: engines' times."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what became of a quantized network: sizes, accuracy, layers, engines; or show a record
    of a benchmark again.

    The page is one file, which loads nothing: tables and charts.
    """
    if folder.is_file():
        return _record(folder, json_file, html_file)
    from lowbit.lab.networks.report import figures, read, text, with_latency

    found = read(folder)
    if "perplexity_before" in found:
        if latency is not None:
            raise ValueError(f"{folder} holds a language model, of which --latency has no times")
        return _language_model(folder, found, json_file, html_file)
    if latency is not None:
        try:
            record = json.loads(latency.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{latency} is no record: {error}") from None
        found = with_latency(found, record)
    with output(json_file, html_file) as show:
        whole, title = json.dumps(found, indent=1, allow_nan=False), f"{found['name']}, quantized"
        show(text(found), whole, title, lambda: figures(found))
    return None


def _language_model(
    folder: Path, found: dict[str, Any], json_file: str | None, html_file: str | None
) -> None:
    from lowbit.bench.core.table import new_table

    written = found["written"]
    perplexities = (found[f"perplexity_{when}"] for when in ("before", "after"))
    rows = (
        ("layers", "", str(found["layers"])),
        ("weights that are quantized", "", f"{written['quantized']:,}"),
        ("bits", "floats", found["format"]),
        ("bytes", f"{written['bytes_before']:,}", f"{written['bytes_after']:,}"),
        ("perplexity", *("" if one is None else f"{one:.4g}" for one in perplexities)),
        ("tokens: calibrated, evaluated", f"{found['calibration_tokens']:,}",
         f"{found['evaluated_tokens']:,}"),
    )  # fmt: skip
    table = new_table(str(folder), [("", False), ("before", True), ("after", True)])
    for row in rows:
        table.add_row(*row)
    with output(json_file, html_file) as show:
        show(table, json.dumps(found, indent=1), f"{folder}, quantized")


def _record(file: Path, json_file: str | None, html_file: str | None) -> None:
    from lowbit.bench.core.compare import read
    from lowbit.bench.core.suite import suites
    from lowbit.lab import charts

    record = read(file)
    suite = suites.get(record.suite)()
    with output(json_file, html_file) as show:
        title, figures = f"lowbit: {record.suite}", lambda: charts.of_record(record)
        show(suite.render(record), record.to_json(), title, figures)
