"""What runs language models from GGUF files."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowbit import isa, lm
from lowbit.lm.gguf import read
from lowbit_lab.bench.core.case import LIMIT, OURS, implementation
from lowbit_lab.bench.core.peak import Reader
from lowbit_lab.bench.core.stamps import RUNS, outside_kernels
from lowbit_lab.bench.lm.contender import TEXT, Array, Contender, Loaded, ModelWork
from lowbit_lab.bench.lm.files import step_matrices


@implementation("lm", "grouped", "float")
class LowbitModel(Contender):
    """`LanguageModel`, by what its products multiply."""

    kind = OURS

    def __init__(self, activations: str) -> None:
        self.activations = activations
        self.name = "lowbit" if activations == "grouped" else f"lowbit {activations}"
        super().__init__()

    def open(self, work: ModelWork) -> Loaded:
        return _LowbitLoaded(work, self.activations)


class _LowbitLoaded(Loaded):
    def __init__(self, work: ModelWork, activations: str) -> None:
        super().__init__(work)
        most = max(map(len, work.prompts)) + max(work.steps, RUNS + 1)
        self._model = lm.LanguageModel.load(
            work.path, threads=work.threads, context=most, sequences=len(work.prompts),
            activations=activations,
        )  # fmt: skip
        self._sequences = list[Any]()
        self.detail = f"activations: {activations}; cache: bfloat16"

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Sequences that know all but the last token of each of these."""
        for sequence in self._sequences:
            sequence.close()
        self._sequences = [self._model.sequence(prompt) for prompt in prompts]

    def prompt(self) -> Array:
        self._begin([()] * len(self.work.prompts))
        pairs = zip(self._sequences, self.work.prompts, strict=True)
        return np.stack([sequence.feed(prompt) for sequence, prompt in pairs])

    def rewind(self) -> None:
        self._begin([[*prompt, 0] for prompt in self.work.prompts])

    def step(self, tokens: Array) -> Array:
        return self._model.step(self._sequences, tokens.tolist())

    def logits(self) -> Array:
        self._begin(())
        return self._model.logits(self.work.prompts[0])

    def figures(self) -> Mapping[str, float]:
        if self.work.operation != TEXT:
            return {}
        self.rewind()
        tokens = np.zeros(len(self._sequences), np.int64)
        return {"outside_kernels": outside_kernels(lambda: self.step(tokens).argmax(-1))}


@implementation("lm")
class ModelRead(Contender):
    """A read of as many bytes as the weights have, which does nothing with them."""

    name, kind = "plain read", LIMIT

    def open(self, work: ModelWork) -> Loaded:
        return _Read(work)


class _Read(Loaded):
    """Steps that only read."""

    def __init__(self, work: ModelWork) -> None:
        super().__init__(work)
        size = sum(one.data.nbytes for one in step_matrices(read(work.path)))
        self._reader = Reader(isa.active(), size, work.threads)
        self.nbytes = self._reader.nbytes

    def prompt(self) -> Array:
        return np.zeros((1, 1), np.float32)

    def rewind(self) -> None:
        pass

    def step(self, tokens: Array) -> Array:
        self._reader()
        return np.zeros((1, 1), np.float32)


@implementation("lm")
class LlamaCpp(Contender):
    """llama.cpp, through the C functions of `llama-cpp-python`."""

    name = "llama.cpp"
    needs = ("llama_cpp",)
    package = "llama.cpp", "llama_cpp_python"

    def open(self, work: ModelWork) -> Loaded:
        return _LlamaCpp(work)


class _LlamaCpp(Loaded):
    """One context with a sequence for each prompt."""

    detail = "cache: float16"
    _MOST = 512  # tokens of a batch, as llama.cpp takes them itself

    def __init__(self, work: ModelWork) -> None:
        super().__init__(work)
        self._library: Any = importlib.import_module("llama_cpp")
        lib = self._library
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(work.path.encode(), lib.llama_model_default_params())
        if not model:
            raise ValueError("llama.cpp does not read the file")
        options = lib.llama_context_default_params()
        sequences = len(work.prompts)
        options.n_ctx = sequences * (max(map(len, work.prompts)) + work.steps + 1)
        options.n_batch = options.n_ubatch = self._MOST
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = work.threads
        self._context = lib.llama_init_from_model(model, options)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(self._MOST, 0, 1)

    def _decode(self, tokens: Sequence[tuple[int, int, int]], every: bool = False) -> Array:
        """Feed some tokens (id, position, sequence): logits [1, V] of the last, or of every one."""
        lib, batch = self._library, self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = every or index + 1 == len(tokens)
        if lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        indices = range(len(tokens)) if every else [len(tokens) - 1]
        rows = [lib.llama_get_logits_ith(self._context, index) for index in indices]
        return np.stack([np.ctypeslib.as_array(row, (self._vocabulary,)) for row in rows])

    def _read(self, prompt: Sequence[int], sequence: int, every: bool = False) -> list[Array]:
        tokens = [(token, position, sequence) for position, token in enumerate(prompt)]
        starts = range(0, len(tokens), self._MOST)
        return [self._decode(tokens[first : first + self._MOST], every) for first in starts]

    def _clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def prompt(self) -> Array:
        self._clear()
        prompts = enumerate(self.work.prompts)
        return np.concatenate([self._read(prompt, sequence)[-1] for sequence, prompt in prompts])

    def rewind(self) -> None:
        memory = self._library.llama_get_memory(self._context)
        self._length = len(self.work.prompts[0])
        for sequence in range(len(self.work.prompts)):
            self._library.llama_memory_seq_rm(memory, sequence, self._length, -1)

    def step(self, tokens: Array) -> Array:
        places = [(token, self._length, index) for index, token in enumerate(tokens.tolist())]
        self._length += 1
        return self._decode(places, every=True)

    def logits(self) -> Array:
        self._clear()
        return np.concatenate(self._read(self.work.prompts[0], 0, every=True))
