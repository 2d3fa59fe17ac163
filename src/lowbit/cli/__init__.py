"""The command line: a file a command, which parses, calls, prints, and makes itself known. Other
packages bring commands by entry points of the group "lowbit.commands", functions that load them."""

from __future__ import annotations

import gc
import sys
from importlib.metadata import entry_points
from typing import Any

from lowbit.registry.extras import install

try:
    from lowbit.cli import application

    application.commands.load()
except ModuleNotFoundError as missing:
    # This package serves the console command alone, and that has nothing else to say then.
    raise SystemExit(f"lowbit: the command line needs {missing.name}; {install('cli')}") from None

__all__ = ["app", "main"]  # pyright: ignore[reportUnsupportedDunderAll]  (made when asked for)


def __getattr__(name: str) -> Any:
    """`app`, the application with all commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_others()
    return application.app


def load_others() -> None:
    """Let other packages make their commands, and readers of records, known."""
    for found in entry_points(group="lowbit.commands"):
        found.load()()


def main() -> None:
    """The console command `lowbit`. Others' commands are looked for where none of this package is
    asked for: that takes some hundredths of a second, and a first word should come soon."""
    gc.set_threshold(10_000)  # modules, texts and plans are many objects, which stay
    own = {name.partition(" ")[2] for name in application.commands.names()}
    if own.isdisjoint(sys.argv[1:2]):
        load_others()
    application.app()
