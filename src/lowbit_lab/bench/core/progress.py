"""Showing how far something is, without taking time from what it measures."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of it is done, from 0 to 1."""

_DRAW_SECONDS = 0.2


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line whenever something else begins. On stderr."""
    if not sys.stderr.isatty():
        said = ""

        def say(what: str, share: float) -> None:
            nonlocal said
            if what != said:
                print(f"{share:4.0%} {what}" if share else what, file=sys.stderr, flush=True)
                said = what

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = Console(stderr=True)
    # Drawn only between rounds: a thread that draws would compete with what is being timed.
    with Bar(*columns, console=shown, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=1.0)
        drawn = -math.inf

        def draw(what: str, share: float) -> None:
            nonlocal drawn
            news = what != bar.tasks[task].description
            bar.update(task, description=what, completed=share)
            if news or time.monotonic() - drawn > _DRAW_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        yield draw
