"""A process that checks or views one file.

Run as `python -m lowbit.lab.worker check|view FILE OPTIONS`; the options are a JSON object of
keyword arguments. Its output are pickles: the arguments of each `Tell`, as a tuple, then what came
of it, or the exception. What the file prints goes nowhere.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from lowbit.lab.check.run import check_file
from lowbit.lab.view.run import view_file


def main(action: str, file: str, options: str) -> None:
    """Check or view `file`."""
    with open(os.dup(1), "wb") as report, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

        def tell(*progress: object) -> None:
            pickle.dump(progress, report)
            report.flush()

        given = json.loads(options)
        try:
            if action == "check":
                result: object = check_file(Path(file), **given, tell=tell)
            else:
                result = view_file(Path(file), **given)
        except Exception as error:  # it is raised again in the process that asked
            known = type(error).__module__ == "builtins"  # there too
            result = error if known else RuntimeError(str(error))
        pickle.dump(result, report)


if __name__ == "__main__":
    main(*sys.argv[1:])
