"""Text from a language model, token by token."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np

from lowbit.lm.arguments import whole
from lowbit.lm.sampling import Sampler, Sampling
from lowbit.lm.speculation import PromptLookup
from lowbit.lm.stops import Stops
from lowbit.lm.tokenizer import Tokenizer

Reason = Literal["", "end", "stop", "length", "context"]
Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or a conversation: messages with a role and a content."""


class EngineSequence(Protocol):
    """Tokens that an engine has been fed, `length` of them, and their keys and values.

    feed: gives the logits behind the last of some tokens, which follow the earlier: float32 [V];
    prompt: they are the same however many of a prompt's tokens were known. rows: gives those behind
    each of at most 8 tokens: float32 [tokens, V]. rewind: forgets what is behind the first `length`
    tokens. close: gives its memory back.
    """

    @property
    def length(self) -> int: ...
    def feed(self, ids: Sequence[int], *, prompt: bool = False) -> np.ndarray: ...
    def rows(self, ids: Sequence[int]) -> np.ndarray: ...
    def rewind(self, length: int) -> None: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """What computes logits, `vocabulary` of them, for sequences of at most `context` tokens.

    sequence: a new one; it may know tokens already that `ids` begin with, but for the last.
    """

    @property
    def context(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    def sequence(self, ids: Sequence[int] = ()) -> EngineSequence: ...


class Text:
    """A text that is being made. Fields: those of its `Stream`."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, ids: Sequence[int], max_tokens: int | None,
        sampling: Sampling, stop: str | Iterable[str], speculate: int = 0,
    ) -> None:  # fmt: skip
        """As `generate` makes it. ids: the prompt's tokens."""
        if not ids:
            raise ValueError("the prompt is empty, and no token of the model's begins a text")
        if len(ids) > engine.context:
            told = f"the prompt has {len(ids):,} tokens; the context holds {engine.context:,}"
            raise ValueError(told)
        most = engine.context + 1  # more than ever fit
        self._max_tokens = most if max_tokens is None else whole("max_tokens", max_tokens)
        self.prompt_tokens, self.known_tokens, self.text_tokens, self._steps = len(ids), 0, 0, -1
        self.prompt_seconds, self.text_seconds, self._seconds = 0.0, 0.0, 0.0
        self.reason: Reason = ""
        self._engine, self._ids = engine, list(ids)
        self._sampler, self._ends = Sampler(sampling), tokenizer.ends
        self._text, self._stops = tokenizer.stream(), Stops(stop)
        self._lookup = PromptLookup(speculate)

    def spent(self, seconds: float) -> None:
        """Count the time that the model took for a piece."""
        self._seconds += seconds
        self.text_seconds = self._seconds - self.prompt_seconds

    @property
    def proposed_tokens(self) -> int:
        return self._lookup.proposed

    @property
    def accepted_tokens(self) -> int:
        return self._lookup.accepted

    def figures(self) -> dict[str, Any]:
        """As of a `Stream`."""
        names = (
            "prompt_tokens", "known_tokens", "prompt_seconds", "text_tokens", "proposed_tokens",
            "accepted_tokens", "text_seconds", "reason",
        )  # fmt: skip
        steps = {"prompt": self.prompt_tokens - self.known_tokens, "text": self._steps}
        speeds = {
            f"{part}_tokens_per_second": max(count, 0)
            / (getattr(self, f"{part}_seconds") or math.inf)
            for part, count in steps.items()
        }
        return {name: getattr(self, name) for name in names} | speeds

    def run(self) -> Generator[str]:
        """All pieces, one after another."""
        if self._max_tokens == 0:
            self.reason = "length"
            return
        begin = perf_counter()
        sequence = self._engine.sequence(self._ids)
        try:
            self.known_tokens = sequence.length
            try:
                rows = sequence.feed(self._ids[self.known_tokens :], prompt=True)[None]
            finally:
                self.prompt_seconds = perf_counter() - begin
            proposed: list[int] = []
            while True:
                yield from self._accepted(rows, proposed)
                if not self.reason and len(self._ids) > self._engine.context:
                    self.reason = "context"
                if self.reason:
                    break
                sequence.rewind(len(self._ids) - 1)
                proposed = self._lookup.propose(self._ids, self._room)
                fed = [self._ids[-1], *proposed]
                rows = sequence.rows(fed) if proposed else sequence.feed(fed)[None]
            if held := self._rest():
                yield held
        finally:
            sequence.close()

    @property
    def _room(self) -> int:
        """How many tokens may be fed behind the last one, where each of them leads to another."""
        rest = self._engine.context - len(self._ids)
        return min(rest, self._max_tokens - self.text_tokens - 1)

    def _accepted(self, rows: np.ndarray, proposed: Sequence[int]) -> Generator[str]:
        """Choose tokens while they are what was proposed, and the one behind: what can be shown.
        Each is chosen as it would be alone, so proposals change nothing but the time."""
        right = 0
        for index, logits in enumerate(rows):
            piece = self._next(logits)
            self._steps += 1
            right = index
            if piece:
                yield piece
            if self.reason or index == len(proposed) or self._ids[-1] != proposed[index]:
                break
        self._lookup.count(len(proposed), right)

    def _next(self, logits: np.ndarray) -> str:
        """Choose a token; what can be shown with it."""
        id = self._sampler.pick(logits, self._ids)
        if id in self._ends:
            self.reason = "end"
            return ""
        self._ids.append(id)
        self.text_tokens += 1
        piece, stopped = self._stops.add(self._text.add(id))
        if stopped:
            self.reason = "stop"
        elif self.text_tokens == self._max_tokens:
            self.reason = "length"
        return piece

    def _rest(self) -> str:
        """What was held back, where nothing follows."""
        held = self._stops.add(self._text.rest())[0] + self._stops.rest()
        return "" if self.reason == "stop" else held


class Stream(Iterator[str]):
    """The text that a model makes, in pieces, as they become certain.

    prompt_tokens, text_tokens: how many tokens went in and came out. known_tokens: those of the
    prompt that the engine knew from before. proposed_tokens, accepted_tokens: how many were
    guessed, and rightly. prompt_seconds, text_seconds: how long the model took;
    what the caller does between two pieces does not count. reason: why it ended: "end" (the model
    has no more to say), "stop" (a stop string), "length" (max_tokens), "context" (no more tokens
    fit); "" before that, or if it was closed.

    What it takes of the engine is given back when it ends, is closed, or is left: when nothing
    refers to it any more.
    """

    prompt_tokens: int
    text_tokens: int
    known_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    prompt_seconds: float
    text_seconds: float
    reason: Reason

    def __init__(self, text: Text, pieces: Generator[str]) -> None:
        """Of `generate`. pieces: of the text; they do not refer to the stream."""
        self._text, self._pieces = text, pieces

    def __getattr__(self, name: str) -> Any:
        if name not in Stream.__annotations__:
            raise AttributeError(f"a {type(self).__name__} has no {name!r}")
        return getattr(self._text, name)

    def __next__(self) -> str:
        begin = perf_counter()
        try:
            return next(self._pieces)
        finally:
            self._text.spent(perf_counter() - begin)

    def close(self) -> None:
        """End it here; its memory is given back, as it is when it has come to its end."""
        self._pieces.close()

    def figures(self) -> dict[str, Any]:
        """All fields, and tokens per second. The first token of the text comes with the prompt:
        the text's speed is that of the steps behind it."""
        return self._text.figures()


def generate(
    engine: Engine, tokenizer: Tokenizer, prompt: Prompt, *, max_tokens: int | None = 512,
    sampling: Sampling | None = None, stop: str | Iterable[str] = (), raw: bool = False,
    speculate: int = 0,
) -> Stream:  # fmt: skip
    """The text that follows a prompt.

    prompt: a conversation, or a text: what a user says, or where the model has no chat template, or
    with `raw`, a text to go on with; a message's content is a text, None, or parts of text as
    OpenAI's clients send them. max_tokens: of the text; None: as many as fit. sampling: greedy by
    default. stop: strings that end the text, and are not given. speculate: how many tokens are
    guessed at once, 0 to 7, where the last ones came before; they are computed together, and stay
    if they would have been chosen.

    ValueError: the prompt is longer than the context, or empty; max_tokens is negative; a stop
    string is empty; speculate is out of its range; the chat template refuses the conversation; a
    part of a message is no text. TypeError: max_tokens or speculate is no whole number.
    """
    ids = prompt_ids(tokenizer, prompt, raw=raw)
    text = Text(engine, tokenizer, ids, max_tokens, sampling or Sampling(), stop, speculate)
    return Stream(text, text.run())


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """The tokens that `generate` begins with. ValueError: messages with raw, or as `chat`."""
    if isinstance(prompt, str):
        if raw or tokenizer.template is None:
            ids = tokenizer.encode(prompt)
            return ids or [id for id in (tokenizer.bos,) if id is not None]
        prompt = [{"role": "user", "content": prompt}]
    if raw:
        raise ValueError("raw takes a text, not messages")
    if not len(prompt):
        raise ValueError("the conversation has no messages")
    return tokenizer.encode(tokenizer.chat(prompt), special=False)


def common(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens both begin with; not all of `ids`, of which the last is to be fed."""
    count = 0
    for a, b in zip(known, ids[:-1], strict=False):
        if a != b:
            break
        count += 1
    return count
