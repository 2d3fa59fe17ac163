"""The command line: a file a command, which parses, calls, prints, and makes itself known. Other
packages bring commands by entry points of the group "lowbit.commands", functions that load them."""

from __future__ import annotations

from importlib.metadata import entry_points

from lowbit.registry.extras import install

try:
    from lowbit.cli.app import app, commands

    commands.load()
    for found in entry_points(group="lowbit.commands"):
        found.load()()
except ModuleNotFoundError as missing:
    # This package serves the console command alone, and that has nothing else to say then.
    raise SystemExit(f"lowbit: the command line needs {missing.name}; {install('cli')}") from None

__all__ = ["app", "main"]


def main() -> None:
    """The console command `lowbit`."""
    app()
