"""Showing what the demo is doing, without taking time from what it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Steps:
    """One line for each step, with a bar where its length is known.

    Drawn only when a step says so, never from a thread of its own: that thread would compete
    with the very calls that are being timed. Without a terminal, a step is one printed line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show `title`; what it gives back is to be called after each part of `total`."""
        if not self._console.is_terminal:
            self._console.print(f"{title} ...", highlight=False)
            yield lambda: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, auto_refresh=False) as progress:
            task = progress.add_task(title, total=total or 1)
            progress.refresh()
            every = max(1, (total or 1) // 50)
            done = 0

            def advance() -> None:
                nonlocal done
                done += 1
                progress.advance(task)
                if done % every == 0:
                    progress.refresh()

            yield advance
            progress.update(task, completed=total or 1)
            progress.refresh()
