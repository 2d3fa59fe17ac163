"""A function in a process of its own: what it runs may crash there, print what it likes, and has
threads of its own. Arguments, questions and answers are pickled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

_ENDING_SECONDS = 10.0  # libraries may hang when a process ends
_ANSWER, _RAISED, _PROGRESS = "answer", "raised", "progress"
_MAIN = f"import sys; from {__name__} import serve; serve(int(sys.argv[1]))"

OnProgress = Callable[..., None]


class RemoteError(RuntimeError):
    """Why there is no answer, in one line. raised: what the function raised, if it did, another
    RuntimeError in place of what is none of Python's own; stderr: what the process wrote there
    until it ended, with Python's stack if it crashed."""

    def __init__(self, text: str, raised: Exception | None = None, stderr: str = "") -> None:
        super().__init__(text)
        self.raised, self.stderr = raised, stderr


class Remote:
    """This end: `function(*args)` runs in a process that is started at once, with variables of the
    environment besides our own. What it returns is its answer; a generator has several: what it
    yields first, then what it yields for each question that is sent to it.

    The function is found there by its module and name. Files that it needs may be anywhere on
    `sys.path` as it is here.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **environment: str) -> None:
        self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._connection, theirs = Pipe()
        # The process should find what this one has found, however that was arranged.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _MAIN, str(theirs.fileno())],
                env={**os.environ, **environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
            )
        self._send((function, args))

    def _send(self, message: object) -> None:
        with suppress(ConnectionError):  # the answer tells how the process ended
            self._connection.send(message)

    def ask(self, question: object, seconds: float | None = None) -> Any:
        """The answer to a question. RemoteError as of `answer`."""
        self._send(question)
        return self.answer(seconds)

    def answer(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> Any:
        """The next answer, within some seconds. RemoteError if the function raises, if its process
        has ended, or does not answer and is ended."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            if not self._connection.poll(None if end is None else max(0, end - time.monotonic())):
                self._process.kill()
                raise RemoteError(f"no answer within {seconds:.0f} s")
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                raise self._how_it_ended() from None
            if kind == _ANSWER:
                return value
            if kind == _RAISED:
                raise RemoteError(*value)
            if on_progress is not None:
                on_progress(*value)

    def _how_it_ended(self) -> RemoteError:
        code, stderr = self._process.wait(), _text(self._stderr)
        if code < 0:
            return RemoteError(f"crashed with {signal.Signals(-code).name}", stderr=stderr)
        lines = stderr.strip().splitlines()
        return RemoteError(lines[-1] if lines else f"exit status {code}", stderr=stderr)

    def printed(self) -> str:
        """What it has printed in all, once it has ended: there are no more questions."""
        self._connection.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return _text(self._stdout)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._connection, self._stdout, self._stderr):
            file.close()


def run_remote(
    function: Callable[..., Any],
    *args: Any,
    seconds: float | None = None,
    on_progress: OnProgress | None = None,
    **environment: str,
) -> Any:
    """What a function returns in a process of its own. RemoteError as of `Remote.answer`."""
    with closing(Remote(function, *args, **environment)) as process:
        return process.answer(seconds, on_progress)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_caller: Connection  # in the process


def send_progress(*values: Any) -> None:
    """In the process, from within the function: call the `on_progress` of whoever waits."""
    _caller.send((_PROGRESS, values))


def serve(descriptor: int) -> None:
    """The process's end: run the function, and answer until there are no more questions."""
    global _caller
    with Connection(descriptor) as _caller:
        try:
            _answer_all(_caller)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            known = type(error).__module__ == "builtins"  # there too
            with suppress(ConnectionError):
                _caller.send((_RAISED, (text, error if known else RuntimeError(text))))


def _answer_all(caller: Connection) -> None:
    function, args = caller.recv()
    answer = function(*args)
    if not isinstance(answer, Generator):
        caller.send((_ANSWER, answer))
        return
    with closing(answer):
        question = None
        while True:
            caller.send((_ANSWER, answer.send(question)))
            try:
                question = caller.recv()
            except EOFError:
                return
