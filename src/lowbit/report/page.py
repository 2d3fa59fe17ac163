"""Whatever the lab shows as text, as one page of HTML that loads nothing: tables, notes, charts."""

from __future__ import annotations

import html
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.registry.extras import require

_SHARE = re.compile(r"(\d+(\.\d+)?)\s?%")


@dataclass(frozen=True)
class Figure:
    """A chart of altair's. caption: what it shows. command: what made its figures, if not what made
    the page."""

    chart: Any
    caption: str
    command: str = ""

    def svg(self) -> str:
        """The drawing, which needs no script. ModuleNotFoundError without vl-convert."""
        require("a chart", "lab", "vl_convert")
        import vl_convert

        drawn = vl_convert.vegalite_to_svg(self.chart.to_dict())
        return re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawn)  # which HTML needs not


def command_line() -> str:
    """The command that this process runs."""
    return shlex.join(["lowbit", *sys.argv[1:]])


def page(
    title: str, text: RenderableType, figures: Sequence[Figure] = (), command: str = ""
) -> str:
    """A whole page: what a terminal would show, tables as tables with shares drawn as bars, and
    charts. command: what made it."""
    style = part("lowbit.report", "base.css") + part("lowbit.report", "page.css")
    made = f"<p><code>{html.escape(command)}</code></p>\n" if command else ""
    drawn = "".join(_figure(one, command) for one in figures)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{made}"
        f"{drawn}{''.join(_parts(text))}</body>\n</html>\n"
    )


def part(package: str, name: str) -> str:
    """The text of a file that stands in a page: a style, a script."""
    return (resources.files(package) / name).read_text(encoding="utf-8")


def _figure(figure: Figure, command: str) -> str:
    caption = html.escape(figure.caption)
    source = html.escape(figure.command or command)
    below = f"<figcaption>{caption}<br><code>{source}</code></figcaption>"
    return f"<figure>\n{figure.svg()}\n{below}\n</figure>\n"


def _parts(text: RenderableType) -> Iterator[str]:
    """The pieces of a text, each as an element."""
    if isinstance(text, Group):
        for part in text.renderables:
            yield from _parts(part)
    elif isinstance(text, Table):
        yield _table(text)
    elif str(text).strip():
        style = str(text.style) if isinstance(text, Text) else ""
        yield f"<p{_class(style)}>{html.escape(str(text))}</p>\n"


def _class(style: object) -> str:
    names = re.findall(r"\b(bold|dim|red|green)\b", str(style or ""))
    return f' class="{" ".join(names)}"' if names else ""


def _table(table: Table) -> str:
    title = f"<h2>{html.escape(str(table.title))}</h2>\n" if table.title else ""
    columns = [(column, [str(cell) for cell in column.cells]) for column in table.columns]
    shown = table.show_header and any(str(column.header) for column, _ in columns)
    head = "".join(_cell("th", str(one.header), one.justify == "right") for one, _ in columns)
    lines = [
        f"<tr{_class(row.style)}>"
        + "".join(_cell("td", cells[i], one.justify == "right") for one, cells in columns)
        + "</tr>\n"
        for i, row in enumerate(table.rows)
    ]
    head = f"<thead><tr>{head}</tr></thead>\n" if shown else ""
    body = f"<tbody>\n{''.join(lines)}</tbody>\n"
    return f"<section>\n{title}<table>\n{head}{body}</table>\n</section>\n"


def _cell(tag: str, text: str, right: bool) -> str:
    kind = ' class="right"' if right else ""
    share = _SHARE.fullmatch(text)
    drawn = f' style="--share: {share[1]}%"' if share else ""
    return f"<{tag}{kind}{drawn}>{html.escape(text)}</{tag}>"
