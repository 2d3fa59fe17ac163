"""A contender in a process of its own, see `bench.core.apart`.

Run as `python -m lowbit.bench.lm.worker NAME WORK`. It answers first with figures, or with the
perplexity alone if that is what it is for, then each question with the seconds of a turn.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from lowbit.bench.core.apart import answering
from lowbit.bench.core.case import OURS, find
from lowbit.bench.core.clock import settle, share_processor
from lowbit.bench.lm.contender import PERPLEXITY, Contender, Work, memory


def main(arguments: Sequence[str]) -> None:
    """Load, then answer until there are no more questions."""
    name, work = arguments[0], Work(**json.loads(arguments[1]))
    logging.disable(logging.WARNING)
    contender = find("lm", name)
    assert isinstance(contender, Contender)
    with answering() as (answer, questions):
        # What lowbit takes is no other library's.
        before = 0 if contender.kind == OURS else memory("VmRSS")
        loaded = contender.open(work)
        if work.operation == PERPLEXITY:
            answer({PERPLEXITY: loaded.perplexity()})
            return
        loaded.seconds()  # which starts threads, and may compile
        figures = {"peak_bytes": memory("VmHWM") - before, **loaded.figures()}
        if work.threads == 1:
            share_processor()
        settle()
        answer({"detail": loaded.detail, "nbytes": loaded.nbytes, "figures": figures})
        for _ in questions:
            seconds = loaded.seconds()
            settle()  # its threads should not take part in the turns of others
            answer(seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
