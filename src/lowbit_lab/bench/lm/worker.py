"""A contender in a process of its own: what `bench.core.remote.Remote` runs."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from lowbit_lab.bench.core.case import OURS, find
from lowbit_lab.bench.core.clock import settle, share_processor
from lowbit_lab.bench.lm.contender import PERPLEXITY, Contender, Work, memory


def answers(name: str, work: Work) -> Generator[Any, Any, None]:
    """Figures first, or the perplexity alone if that is what the work is; then, for each question,
    the seconds of a turn."""
    logging.disable(logging.WARNING)
    contender = find("lm", name)
    assert isinstance(contender, Contender)
    # What lowbit takes is no other library's.
    before = 0 if contender.kind == OURS else memory("VmRSS")
    loaded = contender.open(work)
    if work.operation == PERPLEXITY:
        yield {PERPLEXITY: loaded.perplexity()}
        return
    loaded.seconds()  # which starts threads, and may compile
    figures = {"peak_bytes": memory("VmHWM") - before, **loaded.figures()}
    if work.threads == 1:
        share_processor()
    settle()
    yield {"detail": loaded.detail, "nbytes": loaded.nbytes, "figures": figures}
    while True:
        seconds = loaded.seconds()
        settle()  # its threads should not take part in the turns of others
        yield seconds
