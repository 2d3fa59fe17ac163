"""A process that checks one file and leaves the result, or the exception, as a pickle.

Run as `python -m lowbit.lab.check_worker FILE ANSWER [DEVICE]`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from lowbit.lab.check_script import check_module, load


def main(file: str, answer: str, device: str | None = None) -> None:
    """Check `file`, write to `answer`."""
    try:
        result: object = check_module(load(Path(file)), file, device)
    except Exception as error:  # it is raised again in the process that asked
        result = RuntimeError(str(error)) if not _survives(error) else error
    Path(answer).write_bytes(pickle.dumps(result))


def _survives(error: Exception) -> bool:
    """Whether an exception can be pickled and understood without the file that raised it."""
    return type(error).__module__ == "builtins"


if __name__ == "__main__":
    main(*sys.argv[1:])
