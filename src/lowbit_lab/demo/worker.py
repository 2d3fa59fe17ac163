"""A rival in a process of its own, see `bench.core.remote`."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from lowbit.models.data import manual_sentences
from lowbit.models.networks import BATCH, load_encoder, tokenize
from lowbit_lab.bench.core.clock import settle
from lowbit_lab.demo.rivals import rivals

VECTORS = "vectors"


def serve(name: str, sentences: int, threads: int) -> Generator[Any, Any, None]:
    """In the process: prepare, and answer how large the model's file is, and a detail. Then answer
    each question: `VECTORS` with those of all sentences, a batch's size and index with the seconds
    that it took."""
    logging.disable(logging.WARNING)  # such as of what is not installed and not needed
    torch.set_num_threads(threads)
    texts = manual_sentences(sentences)
    batches = {size: tokenize(texts, size) for size in (1, BATCH)}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        ready = rivals.get(name).prepare(load_encoder(), batches[BATCH][0], threads, Path(folder))
        question = yield ready.bytes_on_disk, ready.detail
        while True:
            if question == VECTORS:
                parts = [ready.call(batch) for batch in batches[BATCH]]
                question = yield torch.cat(parts).numpy()
                continue
            size, index = question
            begin = time.perf_counter()
            ready.call(batches[size][index])
            seconds = time.perf_counter() - begin
            settle()  # its threads should not take part in the turns of others
            question = yield seconds
