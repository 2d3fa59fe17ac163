"""What ran, a line for each call, and what was decided, a line for each plan.

    LOWBIT_VERBOSE=1 python script.py

    lowbit,exec,linear_dynamic,f32:s8:f32,4x300:300x50,bytes,avx2,1,bias,8.31

Plans, and fast paths that were not taken, always go to the logger "lowbit" at level INFO, where
Python's `logging` finds them. With LOWBIT_VERBOSE=1 that logger writes to stderr, and calls are
told too, timed as a whole; with 2 also the steps of networks. The variable is read once, when
lowbit is imported. Without it calls are prepared as if this file were not there: what tells of
them is put around them when they are prepared, and nothing looks for it later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

_FIELDS = (
    "operation",
    "dtypes",
    "shape",
    "kernel",
    "instruction set",
    "threads",
    "post-operations",
)


def _level() -> int:
    given = os.environ.get("LOWBIT_VERBOSE") or "0"
    if given not in ("0", "1", "2"):
        raise ValueError(f"LOWBIT_VERBOSE={given}: expected 0, 1 (calls) or 2 (steps of networks)")
    if given != "0":
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lowbit,%(message)s"))
        log = logging.getLogger("lowbit")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # what a script has set up would write it again
        log.info("info,%s,microseconds", ",".join(_FIELDS))
    return int(given)


LEVEL = _level()


def logs() -> bool:
    """Whether somebody reads the log: nobody, where `logging` is not even imported."""
    logging = sys.modules.get("logging")
    return logging is not None and logging.getLogger("lowbit").isEnabledFor(logging.INFO)


def info(text: str, *fields: object) -> None:
    """Log a line at level INFO, with `fields` in the places that `text` leaves for them."""
    if logs():
        sys.modules["logging"].getLogger("lowbit").info(text, *fields)


def line(*fields: object) -> str:
    """Fields as what a line says, in the order of the header; what does not apply is "-"."""
    given = (*fields, *["-"] * (len(_FIELDS) - len(fields)))
    return ",".join(str(one).replace(",", ";") or "-" for one in given)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell of a call, which is the body, and how long it took."""
    begin = perf_counter()
    yield
    executed(what, perf_counter() - begin)


def executed(what: str, seconds: float, kind: str = "exec") -> None:
    """Tell of a call that took so long."""
    info("%s,%s,%.2f", kind, what, seconds * 1e6)


def telling(call: Callable[..., Any], what: str | Callable[..., str]) -> Callable[..., Any]:
    """A function that tells of its calls: what, or what that makes of the arguments."""

    @wraps(call)
    def run(*given: Any, **named: Any) -> Any:
        with told(what if isinstance(what, str) else what(*given, **named)):
            return call(*given, **named)

    return run
