"""A rival in a process of its own, see `bench.core.apart`.

Run as `python -m lowbit.demo.apart NAME SENTENCES THREADS`. It answers first how it is, then each
question: how long a batch took, or that vectors are written.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lowbit.bench.core.apart import answering
from lowbit.bench.core.clock import settle
from lowbit.bench.models.data import manual_sentences
from lowbit.bench.models.networks import BATCH, load_encoder, tokenize
from lowbit.demo.rivals import rivals


def main(arguments: Sequence[str]) -> None:
    """Prepare, then answer until there are no more questions."""
    name, sentences, threads = arguments[0], int(arguments[1]), int(arguments[2])
    logging.disable(logging.WARNING)  # such as of what is not installed and not needed
    torch.set_num_threads(threads)
    texts = manual_sentences(sentences)
    batches = {size: tokenize(texts, size) for size in (1, BATCH)}
    with (
        answering() as (answer, questions),
        torch.inference_mode(),
        tempfile.TemporaryDirectory() as folder,
    ):
        ready = rivals.get(name).prepare(load_encoder(), batches[BATCH][0], threads, Path(folder))
        answer({"bytes_on_disk": ready.bytes_on_disk, "detail": ready.detail})
        for question in questions:
            if "vectors" in question:
                parts = [ready.call(batch) for batch in batches[BATCH]]
                torch.save(torch.cat(parts), question["vectors"])
                answer({})
                continue
            batch = batches[question["size"]][question["index"]]
            begin = time.perf_counter()
            ready.call(batch)
            seconds = time.perf_counter() - begin
            settle()  # its threads should not take part in the turns of others
            answer({"seconds": seconds})


if __name__ == "__main__":
    main(sys.argv[1:])
