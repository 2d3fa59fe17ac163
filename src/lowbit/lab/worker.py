"""A process that checks or views one file and leaves the outcome, or the exception, as a pickle.

Run as `python -m lowbit.lab.worker check|view FILE ANSWER OPTIONS`; the options are a JSON
object of keyword arguments. Its output are lines of JSON, the arguments of `Tell`; what the file
prints goes nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from pathlib import Path

from lowbit.lab.check.run import check_file
from lowbit.lab.view.run import view_file

_ACTIONS = {"check": check_file, "view": view_file}


def main(action: str, file: str, answer: str, options: str) -> None:
    """Check or view `file`, write to `answer`."""
    report = sys.stdout

    def tell(*progress: object) -> None:
        print(json.dumps(progress), file=report, flush=True)

    given = {**json.loads(options), **({"tell": tell} if action == "check" else {})}
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            result: object = _ACTIONS[action](Path(file), **given)
    except Exception as error:  # it is raised again in the process that asked
        result = RuntimeError(str(error)) if not _survives(error) else error
    Path(answer).write_bytes(pickle.dumps(result))


def _survives(error: Exception) -> bool:
    """Whether an exception can be pickled and understood without the file that raised it."""
    return type(error).__module__ == "builtins"


if __name__ == "__main__":
    main(*sys.argv[1:])
