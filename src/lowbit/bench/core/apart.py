"""A process that runs a module of lowbit and answers questions, a line of JSON each: what it runs
may crash there, print what it likes, and has threads of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

_ENDING_SECONDS = 10.0  # libraries may hang when a process ends
_ANSWERS = "LOWBIT_ANSWERS"  # the variable that names the descriptor they are written to


class Apart:
    """This end: `python -m module arguments`, started at once, with variables besides our own.

    RuntimeError, in one line, of any answer if the process has ended or does not answer.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._printed, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._said = b""
        self._answers, theirs = os.pipe()
        # The process should find what this one has found, however that was arranged.
        path = os.pathsep.join(one for one in sys.path if one)
        own = {"PYTHONPATH": path, _ANSWERS: str(theirs)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment, **own},
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._errors,
            pass_fds=(theirs,),
            bufsize=0,
        )
        os.close(theirs)

    def answer(self, seconds: float) -> Any:
        """The next one."""
        end = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self._process.kill()
                raise RuntimeError(f"no answer within {seconds:.0f} s")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError(self._how_it_ended())
            self._said += part
        line, self._said = self._said.split(b"\n", 1)
        return json.loads(line)

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(self._how_it_ended()) from None
        return self.answer(seconds)

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}"
        lines = _text(self._errors).strip().splitlines()
        return lines[-1] if lines else f"exit status {code}"

    def printed(self) -> str:
        """What it has printed in all, once it has ended: there are no more questions."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return _text(self._printed)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._answers)
        for file in (self._process.stdin, self._printed, self._errors):
            if file is not None:
                file.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextmanager
def answering() -> Iterator[tuple[Callable[[Any], None], Iterator[Any]]]:
    """The process's end: what sends an answer, and the questions."""
    with os.fdopen(int(os.environ.pop(_ANSWERS)), "w") as file:
        yield (
            lambda answer: print(json.dumps(answer), file=file, flush=True),
            map(json.loads, sys.stdin),
        )
