"""Running a Python program under the watch, as `python script.py` would."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from lowbit_lab.backends.host import machinery
from lowbit_lab.watched.log import Log
from lowbit_lab.watched.watch import watch


def run_script(script: Path, arguments: Sequence[str] = ()) -> tuple[Log, str | None]:
    """Run a script as `__main__` with these arguments, and watch it.

    Returns what was found, and what the script failed with: its traceback, or how it left Python;
    None if it ended well. FileNotFoundError if there is no such file.
    """
    if not script.is_file():
        raise FileNotFoundError(2, "there is no such file", str(script))
    failed: str | None = None
    with _as_main(script, arguments), watch() as log:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            if left.code not in (None, 0):
                failed = f"it left Python with {left.code!r}"
        except Exception as error:  # a script may raise anything
            failed = _traceback(error, script)
    return log, failed


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Within it, Python's arguments and path are those of a script."""
    path = [str(script.absolute().parent), *sys.path]
    with patch.object(sys, "argv", [str(script), *arguments]), patch.object(sys, "path", path):
        yield


def _traceback(error: BaseException, script: Path) -> str:
    """The traceback from the script's own first line on, without what launches and interprets."""
    lines = traceback.TracebackException.from_exception(error)
    own = [n for n, frame in enumerate(lines.stack) if frame.filename == str(script)]
    shown = lines.stack[own[0] if own else 0 :]
    hidden = (str(Path(__file__).parent.parent), *machinery())
    lines.stack[:] = [one for one in shown if not one.filename.startswith(hidden)]
    lines.__cause__ = lines.__context__ = None
    return "".join(lines.format()).rstrip()
