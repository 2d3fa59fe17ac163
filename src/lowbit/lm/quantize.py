"""A language model of floats, quantized a layer at a time, and what that costs.

The layers run one after another over a calibration text. Where a method wants to know a layer's
inputs, they are those that the layers before, quantized already, give it; then the layer runs once
more with its own quantized weights, for the next one. So only one layer is in memory as floats, and
its inputs as sums. Embeddings, norms, routers and the head stay what they are.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Graph
from lowbit.graph.session import Session
from lowbit.lm.checkpoint import Checkpoint, FolderCheckpoint, open_checkpoint
from lowbit.lm.convert import Tensor, Writer, Written, tensors_of
from lowbit.lm.model import LanguageModel
from lowbit.lm.network import Weights, layer_graph
from lowbit.lm.tokenizer import Tokenizer
from lowbit.numerics.methods import Activations, QuantizedWeight
from lowbit.weights.format import WeightFormat
from lowbit.weights.tensor_file import StoredTensor

Floats = npt.NDArray[np.float32]
_ROWS = 512  # tokens of a sequence
_EVALUATED = 16  # sequences, at most
_HELD_OUT = 5  # the last of so many parts of a text is evaluated


@dataclass(frozen=True)
class Report:
    """What became of a model. perplexities: of evaluated_tokens that calibration has not seen, with
    activations in float; None where there was no text. calibration_tokens: 0 if none were needed.
    """

    format: str
    layers: int
    written: Written
    perplexity_before: float | None
    perplexity_after: float | None
    evaluated_tokens: int
    calibration_tokens: int
    seconds: float

    def __str__(self) -> str:
        files = self.written
        lines = [
            f"{files.quantized:,} weights: {self.format}",
            f"{files.bytes_before:,} bytes became {files.bytes_after:,}, in {self.seconds:,.0f} s",
        ]
        before, after = self.perplexity_before, self.perplexity_after
        if before is not None and after is not None:
            loss = math.log(after / before)
            lines.append(
                f"perplexity {before:.4g} became {after:.4g}, {loss:+.4f} in its logarithm, on "
                f"{self.evaluated_tokens:,} tokens"
            )
        if self.calibration_tokens:
            lines.append(f"calibrated on {self.calibration_tokens:,} others")
        return "\n".join(lines)


def quantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], format: WeightFormat, *,
    calibration: str | None = None, evaluation: str | None = None, tokens: int = 32768,
    threads: int | None = None, on_layer: Callable[[int, int], None] | None = None,
) -> Report:  # fmt: skip
    """Quantize a language model, and write it as a folder of lowbit's.

    - source: a Hugging Face folder or a GGUF file, with weights of floats. target: a folder, new or
      empty.
    - format: of all weights of products in layers, and the method: "nearest", "gptq" or "awq".
      AWQ's factors go into the norm that products read from; where there is none, as before the
      output of attention, numbers are the nearest. So are those of experts, with any method.
    - calibration: a text like those that the model is for; of it, up to so many tokens are taken.
      evaluation: another, of which the perplexity is taken before and after; if left out, the last
      fifth of the first, which is not calibrated with.
    - on_layer: is called with the number of each layer that is done, and of all.

    ValueError: the method needs a text, or there is too little; weights are quantized already.
    NotImplementedError: a method whose factors go nowhere, such as SmoothQuant. What
    `LanguageModel.load` and `convert` raise.
    """
    if format.method not in ("nearest", "gptq", "awq"):
        raise NotImplementedError(
            f"language models are quantized by nearest, gptq or awq, not {format.method!r}"
        )
    if format.needs_activations and calibration is None:
        raise ValueError(f"{format.method} needs a text to calibrate with")
    begin, checkpoint = time.perf_counter(), open_checkpoint(source)
    length = min(_ROWS, checkpoint.description.context)
    first, held_out = _sequences(source, checkpoint, length, calibration, evaluation)
    if not format.needs_activations:
        first = []
    elif len(first) > (most := max(tokens // length, 1)):
        first = [first[i] for i in np.linspace(0, len(first) - 1, most).astype(int)]
    before = _perplexity(source, held_out, threads)
    writer, layers = Writer(target), _Layers(checkpoint, format, first, threads)
    written: set[str] = set()
    for number in range(layers.count):
        for name, tensor in layers.quantized(number):
            writer.add(name, tensor)
            written.add(name if isinstance(tensor, StoredTensor) else f"{name}.weight")
        if on_layer is not None:
            on_layer(number + 1, layers.count)
    for name, tensor, _ in tensors_of(checkpoint):
        if name not in written:
            writer.add(name, tensor)
    how: dict[str, Any] = {"method": format.method}
    if format.four_bits:
        how |= {"group_size": format.group_size, "symmetric_weight": not format.zero_points,
                "weight_range": format.range}  # fmt: skip
    made = writer.finish(source, checkpoint, how)
    return Report(
        str(format), layers.count, made, before, _perplexity(target, held_out, threads),
        sum(map(len, held_out)), sum(map(len, first)), time.perf_counter() - begin,
    )  # fmt: skip


def _sequences(
    source: str | os.PathLike[str], checkpoint: Checkpoint, length: int, calibration: str | None,
    evaluation: str | None,
) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """Sequences of tokens to calibrate with, and to evaluate. ValueError: a text is too short."""
    if calibration is None and evaluation is None:
        return [], []
    tokenizer = Tokenizer.of(source, checkpoint.metadata)
    first = [] if calibration is None else tokenizer.encode(calibration)
    if evaluation is None:
        cut = len(first) - len(first) // _HELD_OUT
        first, second = first[:cut], first[cut:]
    else:
        second = tokenizer.encode(evaluation)
    if (calibration is not None and len(first) < 2) or len(second) < 2:
        raise ValueError("the text to calibrate with, or to evaluate, has too few tokens")
    return _cut(first, length), _cut(second, length)[:_EVALUATED]


def _cut(ids: Sequence[int], length: int) -> list[list[int]]:
    """In sequences of one length, or in one that is shorter."""
    whole = [list(ids[i : i + length]) for i in range(0, len(ids) - length + 1, length)]
    return whole or [list(ids)] * bool(ids)


def _perplexity(
    path: str | os.PathLike[str], sequences: Sequence[Sequence[int]], threads: int | None
) -> float | None:
    if not sequences:
        return None
    length = len(sequences[0])
    model = LanguageModel.load(path, activations="float", cache="float32", threads=threads,
                               context=length, sequences=1)  # fmt: skip
    return model.perplexity([id for one in sequences for id in one], length)


class _Layers:
    """A model's layers, each quantized after those before it."""

    def __init__(
        self, checkpoint: Checkpoint, format: WeightFormat, sequences: Sequence[Sequence[int]],
        threads: int | None,
    ) -> None:  # fmt: skip
        d = self._description = checkpoint.description
        self._checkpoint, self._format, self._threads = checkpoint, format, threads
        self.count = d.layers
        scale = np.float32(d.embedding_scale)
        self._rows = [checkpoint.rows("token_embd.weight", ids) * scale for ids in sequences]
        self._length = max(map(len, sequences), default=1)
        self._files = _files(checkpoint)

    def quantized(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a layer that are others now, by their names in a folder."""
        graph, inputs = self._graph(number, Weights(self._checkpoint, "float", None))
        known = self._activations(graph, inputs) if self._rows else {}
        own = Weights(self._checkpoint, "float", None)
        for name, x in inputs.items():
            norm = _norm(graph, x)
            made, factors = self._product(name, known.get(x), bool(norm))
            own.quantized |= made
            if factors is not None and (factors != 1).any():
                own.constants[norm] = value = self._checkpoint.vector(norm) / factors
                value = value - np.float32(self._description.norm_offset)
                file = self._files[norm.removesuffix(".weight")][0]
                yield f"{file}.weight", StoredTensor.of(value)
        if self._rows:
            graph, _ = self._graph(number, own)
            self._rows = [made[graph.outputs[0]] for made in self._run(graph)]
        for name, weight in own.quantized.items():
            files = self._files[name.removesuffix(".weight")]
            rows = weight.weight.shape[0] // len(files)  # of an expert
            for i, file in enumerate(files):
                yield file, weight.rows(slice(i * rows, (i + 1) * rows))

    def _graph(self, number: int, weights: Weights) -> tuple[Graph, dict[str, str]]:
        return layer_graph(self._description, weights, number, self._length)

    def _run(self, graph: Graph) -> Iterator[dict[str, Floats]]:
        session = Session(graph, threads=self._threads)
        cache = np.empty(graph.tensors["cache"].sizes, np.float32)
        for x in self._rows:
            yield session.run(x, np.arange(len(x)), cache)

    def _activations(self, graph: Graph, inputs: dict[str, str]) -> dict[str, Activations]:
        """Of what products read, by its name in the graph."""
        found: dict[str, Activations] = {}
        for made in self._run(replace(graph, outputs=tuple(dict.fromkeys(inputs.values())))):
            for name, x in made.items():
                part = _activations_of(x)
                found[name] = found[name] + part if name in found else part
        return found

    def _product(
        self, name: str, known: Activations | None, foldable: bool
    ) -> tuple[dict[str, QuantizedWeight], Floats | None]:
        """The weights of a product, by name, and what its inputs are to be divided by."""
        names = [f"{stem}.weight" for stem in name.split("+")]
        parts: list[Floats] = []
        for one in names:
            matrix = self._checkpoint.matrix(one)
            if isinstance(matrix, QuantizedWeight):
                raise ValueError(f"{one} is quantized already; `--weights kept` keeps it as it is")
            parts.append(matrix)
        format = self._format
        if "_exps" in name or known is None or (format.method == "awq" and not foldable):
            format = format._replace(method="nearest")
        whole = format.quantize(np.concatenate(parts), known)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        slices = map(slice, [0, *ends], ends)
        plain = replace(whole, input_scale=None)
        made = {one: plain.rows(rows) for one, rows in zip(names, slices, strict=True)}
        return made, whole.input_scale


def _files(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Of each module its name in a folder; of experts that have one each, all in their order."""
    if not isinstance(checkpoint, FolderCheckpoint):
        return {stem: [stem] for stem in (name.rpartition(".")[0] for name in checkpoint.names)}
    found: dict[str, dict[int, str]] = {}
    for file in (name.rpartition(".")[0] for name in checkpoint.files):
        if (known := checkpoint.name(file)) is not None:
            match = re.fullmatch(r"(.*_exps)\.(\d+)", known)
            stem, number = (match[1], int(match[2])) if match else (known, 0)
            found.setdefault(stem, {})[number] = file
    return {stem: [files[i] for i in sorted(files)] for stem, files in found.items()}


def _norm(graph: Graph, x: str) -> str:
    """The weight of the norm that a single product reads; "": there is none, or several read it."""
    if sum(x in node.inputs for node in graph.nodes) > 1:
        return ""
    made = (node.inputs for node in graph.nodes if x in node.outputs)
    return next((name for inputs in made for name in inputs if name.endswith("norm.weight")), "")


def _activations_of(x: Floats) -> Activations:
    """Of rows [rows, K]; products in float32, sums of several in float64."""
    size = np.abs(x)
    mean, magnitude, largest, gram = (
        part.astype(np.float64) for part in (x.mean(0), size.mean(0), size.max(0), x.T @ x / len(x))
    )
    return Activations(len(x), mean, magnitude, largest, gram)
