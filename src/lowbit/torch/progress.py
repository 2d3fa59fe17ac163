"""How far work is that takes long: to a function of the user's, or as a line on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Progress = bool | Callable[[str, int, int], None] | None
"""A function of what is being done, how many of its steps are finished, and how many there are;
True: a line on stderr; None: the same where stderr is a terminal and a second has passed."""

T = TypeVar("T")

_SOON = 1.0  # seconds in which nobody misses a line
_OFTEN = 0.1


def check_progress(progress: Progress) -> None:
    """TypeError for what is neither a function nor True, False or None."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress must be True, False, None or a function, got {progress!r}")


def told(what: str, items: Iterable[T], count: int, progress: Progress) -> Iterator[T]:
    """The items, one after the other, told of as they are finished."""
    if callable(progress):
        for done, item in enumerate(items):
            progress(what, done, count)
            yield item
        progress(what, count, count)
        return
    stream, began, shown = sys.stderr, time.monotonic(), -1.0
    wanted = stream.isatty() if progress is None else progress
    for done, item in enumerate(items):
        yield item
        passed = time.monotonic() - began
        if wanted and (progress or passed > _SOON) and passed - shown > _OFTEN:
            shown = passed
            left = passed / (done + 1) * (count - done - 1)
            stream.write(f"\r{what}: {done + 1} of {count}, {left:.0f} s left \x1b[K")
            stream.flush()
    if shown >= 0:
        stream.write(f"\r{what}: {count} of {count}, {time.monotonic() - began:.1f} s\x1b[K\n")
