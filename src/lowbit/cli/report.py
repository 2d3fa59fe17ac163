"""The command `lowbit report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.application import HtmlFile, JsonFile, command, output
from lowbit.registry import Registry

records: Registry[Callable[[Path, str | None, str | None], None]] = Registry("reader of records")
"""What shows a file, as JSON and as a page too; the package that writes such files adds its own."""


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
        from lowbit.cli import load_others

        load_others()
        return records.get("benchmark")(folder, json_file, html_file)
    from lowbit.models.report import figures, read, text, with_latency

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
    from lowbit.report.text import new_table

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
