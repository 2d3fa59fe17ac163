"""A language model: loaded, and run over sequences with caches of keys and values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from lowbit.lm.arguments import whole
from lowbit.lm.backend import ROWS, Backend, CpuBackend, filled
from lowbit.lm.batch import Batch
from lowbit.lm.checkpoint import Checkpoint, open_checkpoint
from lowbit.lm.generation import Prompt, Stream, common, generate
from lowbit.lm.naming import naming
from lowbit.lm.network import Networks, Weights
from lowbit.lm.sampling import Sampling
from lowbit.lm.tokenizer import Tokenizer
from lowbit.registry.extras import require
from lowbit.registry.locks import Lock, cached_property
from lowbit.weights.format import WeightFormat

Logits = npt.NDArray[np.float32]
_CONTEXT = 4096  # positions, unless more are asked for
_CACHES = ("float32", "bfloat16", "int8")


class LanguageModel:
    """A decoder on the CPU or a GPU. Made by `LanguageModel.load`.

    Several threads may use one: each `sequence` belongs to one thread at a time.

    - description: what it is. context: the most positions of a sequence. notes: weights that were
      rounded once more when they were loaded, by reason, as numbers of elements.
    """

    def __init__(
        self, path: str | os.PathLike[str], checkpoint: Checkpoint, backend: Backend, context: int
    ) -> None:
        """Of `load`."""
        self.path, self.context = os.fspath(path), context
        self.description, self.notes = checkpoint.description, checkpoint.notes
        self.vocabulary = self.description.vocabulary
        self._checkpoint, self._backend = checkpoint, backend
        self._free = list(range(backend.slots))
        self._known: dict[int, list[int]] = {slot: [] for slot in self._free}
        self._lock = Lock()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, threads: int | None = None,
        context: int | None = None, sequences: int = 4, activations: str | None = None,
        weights: str | WeightFormat | None = None, cache: str = "bfloat16", isa: str | None = None,
        device: str = "cpu",
    ) -> LanguageModel:  # fmt: skip
        """A GGUF file, or a folder with config.json and safetensors.

        - threads: of products; all that a product may use, if left out. isa: the instruction set to
          use at most.
        - context: positions of a sequence, at most those that the model was made for; 4,096, or
          fewer, if left out. sequences: how many there may be at once.
        - activations: what products with weights in groups multiply: "grouped": 8 bits, with a
          scale for each group of a token; "dynamic": one for each token, as products with other
          integers have it; "float": as good as float32. If left out, "grouped"; on a GPU "float",
          which is the only one there, and bfloat16.
        - weights: what weights that are floats are quantized to: "int8", "int4" (groups of 32), or
          a WeightFormat; None: they stay what they are, float32, bfloat16 or float16, and products
          are of float32.
        - cache: of keys and values, "bfloat16", "float32", or "int8" with a scale for each head
          and token, which no GPU serves.
        - device: "cpu", or a GPU of PyTorch's: "cuda", "cuda:1". There weights of 4 bits, and
          of 8 without zero points, stay what they are; others are bfloat16.

        FileNotFoundError, ValueError: no such model, or it is damaged. NotImplementedError names
        what is not served, before weights are read.
        """
        if activations not in (None, "grouped", "dynamic", "float"):
            raise ValueError(
                f"activations must be 'grouped', 'dynamic' or 'float', got {activations!r}"
            )
        if cache not in _CACHES:
            raise ValueError(f"cache must be one of {', '.join(_CACHES)}, got {cache!r}")
        sequences = whole("sequences", sequences, least=1)
        if device != "cpu":
            _check_gpu(device, activations, cache, threads, isa)
        checkpoint = open_checkpoint(path)
        most = checkpoint.description.context
        length = min(_CONTEXT, most) if context is None else whole("context", context, 1, most)
        if isinstance(weights, str):
            weights = WeightFormat(weights, 32 if weights != "int8" else None)
        if device != "cpu":
            backend = _of_torch(path, checkpoint, weights, cache, sequences, length, device)
            return cls(path, checkpoint, backend, length)
        held = Weights(checkpoint, activations or "grouped", weights)
        with naming(path):
            # Rows that fill a chunk up are written behind the last token.
            networks = Networks(checkpoint.description, held, cache, sequences, length,
                                length + ROWS[-1])  # fmt: skip
        return cls(path, checkpoint, CpuBackend(checkpoint, networks, threads, isa), length)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of text. ValueError: the model's files hold none."""
        return Tokenizer.of(self.path, self._checkpoint.metadata)

    def generate(
        self, prompt: Prompt, *, max_tokens: int | None = 512, sampling: Sampling | None = None,
        stop: str | Iterable[str] = (), raw: bool = False, speculate: int = 0,
    ) -> Stream:  # fmt: skip
        """The text that follows a prompt, in pieces: see `lowbit.lm.generation.generate`."""
        return generate(
            self, self.tokenizer, prompt, max_tokens=max_tokens, sampling=sampling, stop=stop,
            raw=raw, speculate=speculate,
        )  # fmt: skip

    def batch(self) -> Batch:
        """What answers prompts together, which join and leave at any time."""
        return Batch(self)

    def generate_many(
        self, prompts: Iterable[Prompt], *, max_tokens: int | None = 512,
        sampling: Sampling | Sequence[Sampling] | None = None, stop: str | Iterable[str] = (),
        raw: bool = False,
    ) -> list[Stream]:  # fmt: skip
        """The texts that follow prompts, as streams of one `batch`: reading one moves all on.

        sampling: of all, each with random numbers of its own from the same seed, or one for each
        prompt. The rest is as in `generate`. ValueError: as there, with the prompt's index.
        TypeError: a single text."""
        if isinstance(prompts, str):
            raise TypeError("prompts are several, in a list; generate takes one")
        prompts, stop = list(prompts), (stop,) if isinstance(stop, str) else tuple(stop)
        ways = [sampling] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        if len(ways) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts, and sampling for {len(ways)}")
        batch, streams = self.batch(), list[Stream]()
        for index, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
            try:
                streams.append(
                    batch.add(prompt, max_tokens=max_tokens, sampling=way, stop=stop, raw=raw)
                )
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        return streams

    def sequence(self, ids: Sequence[int] = ()) -> TokenSequence:
        """A new sequence; of those that ended, one that began like `ids` lends what it knows.

        RuntimeError: as many are open as there may be."""
        with self._lock:
            if not self._free:
                count = self._backend.slots
                raise RuntimeError(
                    f"{count} sequences are open: close one, or load the model with more"
                )
            shared = [(common(self._known[slot], ids), slot) for slot in self._free]
            most, slot = max(shared, key=lambda one: one[0])
            self._free.remove(slot)
            return TokenSequence(self, slot, self._known[slot][:most])

    def logits(self, ids: Sequence[int]) -> Logits:
        """The logits of the token behind each of `ids`, float32 [tokens, vocabulary].

        ValueError: no tokens, too many, or one that the model does not have."""
        with self.sequence() as sequence:
            return self._head_of(sequence.hidden(ids))

    def perplexity(self, text: str | Sequence[int], window: int | None = None) -> float:
        """exp of the mean negative log-likelihood of each token of a text after the first, in
        windows of the context, or of so many tokens, each on its own."""
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        size = self.context
        if window is not None:
            size = min(whole("window", window, least=2), size)
        total, count = 0.0, 0
        for first in range(0, len(ids), size):
            part = ids[first : first + size]
            if len(part) > 1:
                total += float(losses(self.logits(part)[:-1], part[1:]).sum())
                count += len(part) - 1
        if not count:
            raise ValueError("perplexity needs two tokens or more")
        return math.exp(total / count)

    def step(self, sequences: Sequence[TokenSequence], ids: Sequence[int]) -> Logits:
        """Add a token to each of several sequences, together: logits [sequences, vocabulary]."""
        if len({one.slot for one in sequences}) != len(ids) or len(ids) != len(sequences):
            raise ValueError(f"{len(sequences)} different sequences and as many ids are expected")
        for one in sequences:
            one.check(1)
        self._check(ids)
        places = [one.length for one in sequences], [one.slot for one in sequences]
        logits = self._backend.step(ids, *places)
        for one, token in zip(sequences, ids, strict=True):
            one.ids.append(token)
        return self._capped(logits)

    def _check(self, ids: Sequence[int]) -> None:
        wrong = [one for one in ids if not 0 <= one < self.vocabulary]
        if wrong:
            raise ValueError(f"the model has tokens 0 to {self.vocabulary - 1}, not {wrong[0]}")

    def _head_of(self, hidden: npt.NDArray[np.float32]) -> Logits:
        return self._capped(self._backend.head(hidden))

    def _capped(self, logits: Logits) -> Logits:
        cap = np.float32(self.description.logit_cap)
        return cap * np.tanh(logits / cap) if cap else logits


def _check_gpu(
    device: str, activations: str | None, cache: str, threads: int | None, isa: str | None
) -> None:
    """Arguments of `load` that are none of a GPU's, or a device that there is not."""
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if threads is not None or isa is not None:
        raise ValueError(f"threads and isa are the CPU's; {device!r} takes neither")
    if activations not in (None, "float"):
        raise NotImplementedError(f"activations {activations!r} have no kernel on {device!r}")
    if cache == "int8":
        raise NotImplementedError(f"a cache of int8 has no kernel on {device!r}")


def _of_torch(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    weights: WeightFormat | None,
    cache: str,
    sequences: int,
    context: int,
    device: str,
) -> Backend:
    require("lowbit.lm on a GPU", "torch", "torch")
    from lowbit.lm.torch_backend import TorchBackend, gpu

    place = gpu(device)
    with naming(path):
        return TorchBackend(checkpoint, weights, cache, sequences, context, place)


def losses(logits: Logits, ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """The negative log-likelihood of each of some tokens, [tokens], by logits [tokens, V]."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    return np.log(np.exp(rows).sum(-1)) - rows[np.arange(len(ids)), list(ids)]


class TokenSequence:
    """Tokens, and what a model keeps of them. A context manager that closes it.

    ids: the tokens that were fed.
    """

    def __init__(self, model: LanguageModel, slot: int, ids: list[int]) -> None:
        self._model, self.slot, self.ids, self._closed = model, slot, ids, False

    @property
    def length(self) -> int:
        return len(self.ids)

    def feed(self, ids: Sequence[int], *, prompt: bool = False) -> Logits:
        """Add tokens: the logits of what comes next, float32 [vocabulary].

        prompt: a token that comes alone is computed as those of a prompt are, in a chunk: logits
        are the same, to the bit, however many tokens before it were known.
        ValueError: none, more than the context has room for, or an unknown one."""
        if len(ids) == 1 and not prompt:
            return self._model.step([self], ids)[0]
        return self._model._head_of(self.hidden(ids, last=True))[0]

    def rows(self, ids: Sequence[int]) -> Logits:
        """Add 8 tokens or fewer: the logits behind each, float32 [tokens, vocabulary]."""
        x = self.hidden(ids)
        return self._model._head_of(filled(x, ROWS[0]))[: len(ids)]

    def hidden(self, ids: Sequence[int], last: bool = False) -> npt.NDArray[np.float32]:
        """Add tokens: what the head reads, of each or of the last, float32 [tokens, width]."""
        backend, made = self._model._backend, []
        self.check(len(ids))
        self._model._check(ids)
        first = 0
        for rows in backend.cut(len(ids)):
            part = ids[first : first + rows]
            made.append(backend.chunk(part, self.length, self.slot, rows, last=last))
            self.ids.extend(part)
            first += rows
        return made[-1] if last else np.concatenate(made)

    def rewind(self, length: int) -> None:
        """Forget what is behind the first `length` tokens."""
        del self.ids[length:]

    def copy(self, other: TokenSequence, count: int) -> None:
        """Know the first `count` tokens of another sequence, of which it knows the first."""
        rows = slice(self.length, count)
        self._model._backend.copy(other.slot, self.slot, rows)
        self.ids.extend(other.ids[rows])

    def check(self, count: int) -> None:
        """ValueError: no tokens, no room for so many more, or the sequence is closed."""
        if self._closed:
            raise ValueError("the sequence is closed")
        if not count:
            raise ValueError("no tokens are given")
        if self.length + count > self._model.context:
            raise ValueError(
                f"{self.length} tokens and {count} more do not fit the context of "
                f"{self._model.context}"
            )

    def close(self) -> None:
        """Give its place to others. Without a lock: the collector may call it while one is held."""
        if not self._closed:
            self._closed = True
            self._model._known[self.slot] = self.ids
            self._model._free.append(self.slot)

    __del__ = close

    def __enter__(self) -> TokenSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
