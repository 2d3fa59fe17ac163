"""The command line: a file a command, which parses, calls, prints, and makes itself known."""

from __future__ import annotations

from lowbit.registry.extras import install

try:
    from lowbit.cli.app import app, commands
except ModuleNotFoundError as missing:
    # This package serves the console command alone, and that has nothing else to say then.
    raise SystemExit(f"lowbit: the command line needs {missing.name}; {install('cli')}") from None

__all__ = ["app", "main"]

commands.load()


def main() -> None:
    """The console command `lowbit`."""
    app()
