"""An anatomy as a page of HTML that loads nothing, in the style of `lowbit view`, and as text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.report.page import part
from lowbit.report.text import format_seconds, new_table
from lowbit_lab.anatomy.result import Anatomy, Pane


def page(anatomy: Anatomy) -> str:
    """One file; a click on a row marks what comes from the same line in all panes."""
    style, script = (
        "".join(part(package, name) for package, name in parts)
        for parts in (
            (
                ("lowbit.report", "base.css"),
                ("lowbit_lab.views", "page.css"),
                ("lowbit_lab.anatomy", "page.css"),
            ),
            (("lowbit_lab.anatomy", "page.js"),),
        )
    )
    title = html.escape(anatomy.kernel)
    facts = _table(anatomy.facts.items())
    mix = _table((kind, str(count)) for kind, count in anatomy.mix.items())
    parts = _table((p.name, f"{format_seconds(p.seconds)} ({p.how})") for p in anatomy.parts)
    said = "".join(f"<p>{html.escape(line)}</p>" for line in (*anatomy.mca, *anatomy.notes))
    panes = "".join(_pane(pane, anatomy.places) for pane in anatomy.panes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{style}</style>\n'
        f"</head>\n<body>\n<h1>{title}</h1>\n<p>{html.escape(anatomy.about)}</p>\n"
        '<p id="now" role="status">Choose a row: what comes from the same line is marked.</p>\n'
        f'<div class="panes">{panes}</div>\n'
        f"<section><h2>Registers and tiles</h2>{facts}</section>\n"
        f"<section><h2>The inner loop</h2>{mix}</section>\n"
        + (f"<section><h2>The four parts</h2>{parts}</section>\n" if anatomy.parts else "")
        + f"<section>{said}</section>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"


def _pane(pane: Pane, places: Sequence[tuple[str, int]]) -> str:
    items = []
    for text, at in pane.rows:
        where = ""
        if at is not None:
            file, line = places[at]
            where = f' data-at="{at}" data-place="{html.escape(file)}:{line}"'
        items.append(f"<li{where}>{html.escape(text)}</li>")
    return f'<div class="pane"><h2>{html.escape(pane.title)}</h2><ol>{"".join(items)}</ol></div>'


def text(anatomy: Anatomy) -> RenderableType:
    """For a terminal: everything but the panes, of which it counts the rows."""
    table = new_table("", [("", False), ("", False)])
    table.show_header = False
    for name, said in _facts(anatomy):
        table.add_row(name, said)
    return Group(Text(anatomy.kernel, "bold"), Text(anatomy.about), table)


def _facts(anatomy: Anatomy) -> Iterator[tuple[str, str]]:
    for pane in anatomy.panes:
        linked = sum(at is not None for _, at in pane.rows)
        yield pane.title, f"{len(pane.rows)} rows, {linked} with their line"
    yield from anatomy.facts.items()
    mix = ", ".join(f"{count} {kind}" for kind, count in anatomy.mix.items() if count)
    yield "inner loop", mix or "none"
    for each in anatomy.parts:
        yield each.name, f"{format_seconds(each.seconds)}: {each.how}"
    for line in (*anatomy.mca, *anatomy.notes):
        yield "", line
