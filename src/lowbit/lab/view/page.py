"""A view: what one run of a kernel did, as a page of HTML that needs nothing else, and as JSON."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

# In the order in which the browser runs them.
_SCRIPTS = ("grid.js", "step.js", "page.js")
_HEIGHT = 760  # pixels, in a notebook


@dataclass(frozen=True, eq=False)
class View:
    """A run of a kernel, to be looked at. `data` is what docs/view.md describes."""

    data: dict[str, Any]

    def json(self) -> str:
        """Everything that the page shows."""
        return json.dumps(self.data, allow_nan=False, separators=(",", ":"))

    def html(self) -> str:
        """The page: style, script and data are in it, and nothing is loaded."""
        # Inside <script> only "<" can end the data, or start a comment.
        data = self.json().replace("<", "\\u003c")
        title = html.escape(f"{self.data['kernel']} ({self.data['operation']})")
        page = _part("page.html")
        for mark, text in (
            ("{{title}}", title),
            ("{{style}}", _part("page.css")),
            ("{{script}}", "\n".join(_part(name) for name in _SCRIPTS)),
            ("{{data}}", data),
        ):
            before, _, after = page.partition(mark)
            page = before + text + after
        return page

    def save(self, path: str | Path) -> Path:
        """Write the page, or the JSON if the name ends in .json; returns where. OSError if it
        cannot be written."""
        target = Path(path)
        text = self.json() + "\n" if target.suffix == ".json" else self.html()
        target.write_text(text, encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        # A frame, so that neither the notebook's style nor the page's leaks into the other.
        return (
            f'<iframe title="view of {html.escape(self.data["kernel"])}" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 0" '
            f'srcdoc="{html.escape(self.html())}"></iframe>'
        )

    def __repr__(self) -> str:
        steps = counted(len(self.data["events"]), "step")
        programs = counted(len(self.data["programs"]), "program")
        return f"<view of {self.data['kernel']}: {steps} of {programs}>"


def counted(number: int, what: str) -> str:
    """How many, in words: 1 step, 2 steps."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _part(name: str) -> str:
    return (resources.files("lowbit.lab.view") / name).read_text(encoding="utf-8")
