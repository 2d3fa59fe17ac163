"""GGUF files with random weights: for sizes of which there is no file at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.jit import cache
from lowbit.registry.extras import require

_DEVIATION = 0.02
_FLOAT = np.dtype(np.float32)
_PART = 1 << 22  # elements that are drawn together


@dataclass(frozen=True)
class Shape:
    """A Llama: its layers, widths, heads and vocabulary. Input and output share the embedding."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    context: int = 8192

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The names and sizes [N, K] of the weights."""
        keys = self.width * self.key_heads // self.heads
        yield "token_embd", (self.vocabulary, self.width)
        for layer in range(self.layers):
            for name, sizes in (
                ("attn_q", (self.width, self.width)),
                ("attn_k", (keys, self.width)),
                ("attn_v", (keys, self.width)),
                ("attn_output", (self.width, self.width)),
                ("ffn_gate", (self.hidden, self.width)),
                ("ffn_up", (self.hidden, self.width)),
                ("ffn_down", (self.width, self.hidden)),
            ):
                yield f"blk.{layer}.{name}", sizes

    def norms(self) -> Iterator[str]:
        """The names of the vectors, of ones."""
        yield "output_norm"
        for layer in range(self.layers):
            yield from (f"blk.{layer}.{name}" for name in ("attn_norm", "ffn_norm"))


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49_152),
    "llama-1b": Shape(16, 2048, 32, 8, 8192, 128_256),
}
BLOCKS = ("Q4_0", "Q4_1", "Q8_0")


def cached_file(name: str, blocks: str) -> Path:
    """The file of a shape of `SHAPES` in lowbit's cache, which is written if it is not there."""
    path = cache.folder() / "models" / f"{name}-{blocks}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            write(part, SHAPES[name], blocks)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def write(path: Path, shape: Shape, blocks: str, seed: int = 0) -> None:
    """Weights N(0, 0.02²) in blocks of one type, tensor by tensor, without a tokenizer.

    ModuleNotFoundError, in one line, without the package gguf."""
    require("a file of random weights", "peers", "gguf")
    import gguf

    kind = gguf.GGMLQuantizationType[blocks]
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, shape)
    for name in shape.norms():
        writer.add_tensor_info(f"{name}.weight", (shape.width,), _FLOAT, 4 * shape.width)
    for name, sizes in shape.matrices():
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        size = sizes[0] * sizes[1] // elements * nbytes
        writer.add_tensor_info(f"{name}.weight", sizes, _FLOAT, size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for _ in shape.norms():
        writer.write_tensor_data(np.ones(shape.width, np.float32))
    for _, sizes in shape.matrices():
        writer.write_tensor_data(_blocks(random, sizes, lambda rows: gguf.quantize(rows, kind)))
    writer.close()


def _describe(writer: Any, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")


def _blocks(random: np.random.Generator, sizes: tuple[int, int], quantize: Any) -> Any:
    """Random rows, quantized: some at a time, so that few are floats at once."""
    rows = max(1, _PART // sizes[1])
    parts = (
        random.standard_normal((min(rows, sizes[0] - first), sizes[1]), np.float32)
        for first in range(0, sizes[0], rows)
    )
    return np.concatenate([quantize(_DEVIATION * part) for part in parts])
