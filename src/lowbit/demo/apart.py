"""A rival in a process of its own: there it may crash, and its threads are its own.

Run as `python -m lowbit.demo.apart NAME SENTENCES THREADS`. It answers each line of JSON on its
standard input with one: how it is, how long a batch took, or that vectors are written.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lowbit.bench.core.clock import settle
from lowbit.demo.encoder import BATCH, load_encoder, tokenize
from lowbit.demo.rivals import rivals
from lowbit.demo.sentences import manual_sentences

PREPARE_SECONDS, ANSWER_SECONDS = 240.0, 60.0


class Apart:
    """The other end: a process that prepares a rival at once, and answers when it is asked.

    RuntimeError, in one line, of any question if the process has ended or does not answer.
    """

    def __init__(self, name: str, sentences: int, threads: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._said = b""
        command = [sys.executable, "-m", "lowbit.demo.apart", name, str(sentences), str(threads)]
        # The process should find what this one has found, however that was arranged.
        path = os.pathsep.join(one for one in sys.path if one)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The next line that it says."""
        output = self._process.stdout
        assert output is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = end - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                self.close()
                raise RuntimeError(f"no answer within {seconds:.0f} s")
            part = os.read(output.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(self._how_it_ended())
            self._said += part
        line, self._said = self._said.split(b"\n", 1)
        return json.loads(line)

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer to a question."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(self._how_it_ended()) from None
        return self.answer()

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {code}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()


def _serve(name: str, sentences: int, threads: int, answers: IO[str]) -> None:
    import torch

    torch.set_num_threads(threads)
    texts = manual_sentences(sentences)
    batches = {size: tokenize(texts, size) for size in (1, BATCH)}

    def answer(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        ready = rivals.get(name).prepare(load_encoder(), batches[BATCH][0], threads, Path(folder))
        answer(bytes_on_disk=ready.bytes_on_disk, detail=ready.detail)
        for line in sys.stdin:
            question = json.loads(line)
            if "vectors" in question:
                parts = [ready.call(batch) for batch in batches[BATCH]]
                torch.save(torch.cat(parts), question["vectors"])
                answer()
                continue
            batch = batches[question["size"]][question["index"]]
            begin = time.perf_counter()
            ready.call(batch)
            seconds = time.perf_counter() - begin
            settle()  # its threads should not take part in the turns of others
            answer(seconds=seconds)


def main(arguments: Sequence[str]) -> None:
    """Prepare, then answer until there are no more questions."""
    name, sentences, threads = arguments
    logging.disable(logging.WARNING)  # such as of what is not installed and not needed
    # Libraries print what they like; only answers may go to standard output.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(name, int(sentences), int(threads), answers)


if __name__ == "__main__":
    main(sys.argv[1:])
