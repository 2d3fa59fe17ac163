"""Running a module of the bench in a process of its own, which a foreign library may bring down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDS = 300


@dataclass(frozen=True)
class Ended:
    """What a process printed, whether it ended well, and in words how it did not."""

    said: str
    well: bool
    how: str


def run_apart(module: str, arguments: Sequence[str], **environment: str) -> Ended:
    """Run `python -m module` with these arguments, and these variables besides our own."""
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode() if isinstance(said, bytes) else said
        how = f"took more than {_SECONDS} s when tried in a process of its own"
        return Ended(text, False, how)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    how = f"failed when tried in a process of its own: {last}"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        how = f"crashed ({name}) when tried in a process of its own"
    return Ended(done.stdout, done.returncode == 0, how)
