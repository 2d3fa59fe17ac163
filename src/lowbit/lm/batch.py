"""Texts of several prompts at once, whose sequences take steps together."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from lowbit.lm.generation import Prompt, Stream, Text, common, prompt_ids
from lowbit.lm.sampling import Sampling
from lowbit.registry.locks import Lock

if TYPE_CHECKING:
    from lowbit.lm.model import LanguageModel, TokenSequence

_CHUNK = 128  # tokens of a prompt that are computed between two steps of others


class Batch:
    """Prompts that a model answers together: a step adds a token to each of their texts.

    Prompts join at any time, and leave when their text ends or is closed. As many run as the model
    has sequences for; others wait for their turn, in order. A prompt is computed in chunks, between
    which other texts go on; what it begins with is copied from one that begins so too. Nothing
    runs by itself: whoever reads one stream moves all of them on. Several threads may read streams
    of one batch, each its own. A context manager that closes it.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._lock = model, Lock()
        self._waiting, self._running = deque[_Member](), list[_Member]()
        self._left = deque[_Member]()  # that nobody can read, and that have not ended yet

    def add(
        self, prompt: Prompt, *, max_tokens: int | None = 512, sampling: Sampling | None = None,
        stop: str | Iterable[str] = (), raw: bool = False,
    ) -> Stream:  # fmt: skip
        """The text that follows a prompt, with the arguments and errors of `generate`.

        Its prompt_seconds and text_seconds are those of the chunks and steps that it took part
        in. An error of its own, as of logits that are NaN, is raised where it is read; the others
        go on."""
        ids = prompt_ids(self._model.tokenizer, prompt, raw=raw)
        member = _Member(self._model, ids, max_tokens, sampling or Sampling(), stop)
        if not member.reason:
            self._waiting.append(member)
        return _BatchStream(self, member)

    def close(self) -> None:
        """End all texts here."""
        with self._lock:
            members = [*self._waiting, *self._running]
        for member in members:
            self.leave(member)
            member.pieces.clear()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, member: _Member) -> str | None:
        """The next piece of a text, for which all move on; None: it has ended."""
        while not member.pieces:
            with self._held():
                if member.pieces:  # another thread moved on
                    break
                if member.error is not None:
                    error, member.error = member.error, None
                    raise error
                if member.ended:
                    return None
                self._advance()
        return member.pieces.popleft()

    def leave(self, member: _Member) -> None:
        """End a text here, behind the step that others may be in."""
        with self._held():
            if not member.ended:
                self._end(member)

    def abandon(self, member: _Member) -> None:
        """`leave` a text that nobody can read any more, without waiting: the collector may call it
        while the lock is held, whose holder ends the text then."""
        if not member.ended:
            self._left.append(member)
            self._end_left()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """With the lock; texts that were abandoned meanwhile end behind it."""
        try:
            with self._lock:
                yield
        finally:
            self._end_left()

    def _end_left(self) -> None:
        while self._left and self._lock.take_if_free():
            try:
                while self._left:
                    member = self._left.popleft()
                    if not member.ended:
                        self._end(member)
            finally:
                self._lock.release()

    def _advance(self) -> None:
        """A chunk of a prompt, and a step of all others."""
        self._admit()
        for member in self._running:
            member.recover()
        prompt = next((one for one in self._running if not one.text_tokens), None)
        steps = [one for one in self._running if one.text_tokens]
        if prompt is not None:
            self._feed(prompt, _CHUNK if steps else prompt.prompt_tokens)
        if steps:
            self._step(steps)

    def _admit(self) -> None:
        while self._waiting:
            try:
                self._waiting[0].begin()
            except RuntimeError:
                if not self._running:  # others have all sequences: nothing will end here
                    raise
                return
            self._running.append(self._waiting.popleft())

    def _feed(self, member: _Member, most: int) -> None:
        begin, logits = perf_counter(), None
        try:
            if member.sequence.length == member.known_tokens:
                member.share(self._running)
            logits = member.feed(most)
        except Exception as error:
            self._end(member, error)
        finally:
            member.prompt_seconds += perf_counter() - begin
        if logits is not None:
            self._take(member, logits)

    def _step(self, members: Sequence[_Member]) -> None:
        begin = perf_counter()
        ids = [one.last for one in members]
        rows = self._model.step([one.sequence for one in members], ids)
        for member, row in zip(members, rows, strict=True):
            self._take(member, row)
        for member in members:
            member.text_seconds += perf_counter() - begin

    def _take(self, member: _Member, logits: np.ndarray) -> None:
        try:
            member.take(logits)
        except Exception as error:
            self._end(member, error)
        else:
            if member.reason:
                self._end(member)

    def _end(self, member: _Member, error: Exception | None = None) -> None:
        member.end(error)
        for members in (self._waiting, self._running):
            if member in members:
                members.remove(member)


class _BatchStream(Stream):
    """A stream of a batch."""

    _text: _Member

    def __init__(self, batch: Batch, member: _Member) -> None:
        super().__init__(member, _pieces(batch, member))
        self._batch = batch

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._batch.leave(self._text)
        self._text.pieces.clear()

    def __del__(self) -> None:
        self._batch.abandon(self._text)


def _pieces(batch: Batch, member: _Member) -> Generator[str]:
    try:
        while (piece := batch.read(member)) is not None:
            yield piece
    except (Exception, KeyboardInterrupt):
        batch.leave(member)
        raise


class _Member(Text):
    """A text of a batch.

    pieces: what was made and not read. ended: nothing more is made. error: why, to be raised.
    sequence: from `begin` on.
    """

    sequence: TokenSequence

    def __init__(
        self, model: LanguageModel, ids: Sequence[int], max_tokens: int | None, sampling: Sampling,
        stop: str | Iterable[str],
    ) -> None:  # fmt: skip
        super().__init__(model, model.tokenizer, ids, max_tokens, sampling, stop)
        self._model, self.pieces = model, deque[str]()
        self.error: Exception | None = None
        self.ended = max_tokens == 0
        if self.ended:
            self.reason = "length"

    @property
    def last(self) -> int:
        return self._ids[-1]

    def begin(self) -> None:
        self.sequence = self._model.sequence(self._ids)
        self.known_tokens = self.sequence.length

    def share(self, others: Sequence[_Member]) -> None:
        """Take over what a prompt of others that was computed begins with, as this one does."""
        prompts = [(one.sequence.ids[: one.prompt_tokens], one.sequence) for one in others]
        shared = [(common(ids, self._ids), sequence) for ids, sequence in prompts]
        count, sequence = max(shared, key=lambda one: one[0])
        if count > self.known_tokens:
            self.sequence.copy(sequence, count)
            self.known_tokens = count

    def recover(self) -> None:
        """Feed the last token again where an interruption came before its logits were used."""
        self.sequence.rewind(len(self._ids) - 1)

    def feed(self, most: int) -> np.ndarray | None:
        """Feed so many tokens: the logits behind the last one of all."""
        first = self.sequence.length
        ids = self._ids[first : first + most]
        if first + len(ids) == len(self._ids):
            return self.sequence.feed(ids, prompt=True)
        self.sequence.hidden(ids, last=True)
        return None

    def take(self, logits: np.ndarray) -> None:
        """Choose a token."""
        piece = self._next(logits)
        self._steps += 1
        if not self.reason and self.sequence.length >= self._model.context:
            self.reason = "context"
        if self.reason:
            piece += self._rest()
        if piece:
            self.pieces.append(piece)

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error
        if hasattr(self, "sequence"):
            self.sequence.close()
