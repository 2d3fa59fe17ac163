"""What a network under measurement is: built, fed and judged in one way, by any engine."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.models.data import ImageFolder, Preprocessing
from lowbit.registry import Registry
from lowbit.registry.extras import absent, require

if TYPE_CHECKING:
    from torch import nn


# Means with standard errors, and how far outputs are from those of a reference.

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """A figure, its standard error (of the same unit), and the number of samples behind it."""

    value: float
    error: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


def mean(values: npt.ArrayLike, clusters: npt.ArrayLike | None = None) -> Metric:
    """The mean of one figure a sample [N]. clusters [N]: samples of the same number are not
    independent (views of one image), and only their means count for the error.

    The error is NaN for less than two samples or clusters. ValueError if there is no sample.
    """
    found = np.asarray(values, np.float64)
    if not found.size:
        raise ValueError("there are no samples to take a mean of")
    groups = np.arange(found.size) if clusters is None else np.asarray(clusters)
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    total = np.bincount(index, found - found.mean())
    n = len(sizes)
    # The sum of each cluster's deviations, so that larger clusters weigh more.
    error = math.sqrt(float((total**2).sum()) * n / (n - 1)) / found.size if n > 1 else math.nan
    return Metric(float(found.mean()), error, int(found.size))


def sqnr(outputs: Array, reference: Array) -> Array:
    """Signal-to-quantization-noise ratio of each sample [N], in dB: outputs [N, ...] against the
    reference's. Infinite where they are equal."""
    wanted = reference.astype(np.float64).reshape(len(reference), -1)
    noise = outputs.astype(np.float64).reshape(wanted.shape) - wanted
    with np.errstate(divide="ignore"):
        return 10 * np.log10((wanted**2).sum(1) / (noise**2).sum(1))


def classified(
    scores: Array,
    labels: Array | None,
    reference: Array | None,
    clusters: npt.ArrayLike | None = None,
) -> dict[str, Metric]:
    """Of class scores [N, classes]: `top1` where there are labels [N]; with a reference's scores,
    `agreement` of the highest class, and `sqnr_db`."""
    found: dict[str, Metric] = {}
    if labels is not None:
        found["top1"] = mean(scores.argmax(1) == labels, clusters)
    if reference is not None:
        found["agreement"] = mean(scores.argmax(1) == reference.argmax(1), clusters)
        found["sqnr_db"] = mean(np.minimum(sqnr(scores, reference), 200), clusters)
    return found


Arrays = tuple[Array, ...]
Run = Callable[..., Array]
"""A network in an engine: the arrays of one batch to the array of its outputs."""


def outputs(run: Run, reference: Run | None, batches: Iterable[Arrays]) -> tuple[Any, Any]:
    """What two networks make of all batches, [N, ...] each; None of no reference."""
    pairs = [(run(*batch), reference(*batch) if reference else None) for batch in batches]
    found, wanted = zip(*pairs, strict=True)
    return np.concatenate(found), np.concatenate(wanted) if reference else None


def in_batches(samples: Array, size: int) -> Iterator[Arrays]:
    """The one input of a network, so many samples at a time; the last batch may be smaller."""
    return ((samples[start : start + size],) for start in range(0, len(samples), size))


Weights = str | os.PathLike[str] | None


class Model(ABC):
    """A network with its data. A new one stands in `catalog.py`; nothing else names it."""

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    """Where its weights come from: "pretrained, package X" or "trained here on Fashion-MNIST"."""
    modules: ClassVar[tuple[str, ...]] = ("torch",)
    """What must be installed."""
    mask: ClassVar[str | None] = None
    """The input that is 0 where another, of tokens, is only filled up to a length."""

    def absent(self) -> str | None:
        """What is not installed and how to, or None."""
        return next((text for module in self.modules if (text := absent(module))), None)

    @abstractmethod
    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module | Path:
        """A float32 module in eval mode, or the path of an ONNX file.

        weights: a checkpoint; None gives the package's, or, where none brings any, random ones
        (fixed seed). for_speed: for the inputs of `example`, should those of `calibration` and
        `accuracy` be of another size. ValueError if keys or shapes in the file are not its own.
        """

    @abstractmethod
    def example(self, batch: int) -> Arrays:
        """Inputs on which speed is measured, [batch, ...]; images are of 224 × 224 pixels."""

    @abstractmethod
    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        """`count` batches to observe ranges on: samples that `accuracy` does not see."""

    @abstractmethod
    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """How well `run` does on at most `limit` samples.

        reference: the float network; where given, how far the outputs are from its own is told
        as well.
        """


models: Registry[Model] = Registry("model", "lowbit.models.catalog")


class ImageModel(Model):
    """A network of images float32 [batch, 3, size, size] to scores of classes."""

    preprocessing: ClassVar[Preprocessing] = Preprocessing()
    """What ImageNet's photographs go through."""

    def example(self, batch: int) -> Arrays:
        shape = (batch, 3, self.preprocessing.size, self.preprocessing.size)
        return (np.random.default_rng(0).standard_normal(shape, np.float32),)

    def accuracy_on(
        self,
        folder: str | os.PathLike[str],
        run: Run,
        limit: int | None = None,
        reference: Run | None = None,
        batch: int = 32,
    ) -> dict[str, Metric]:
        """Of photographs in one folder a class, as ImageNet's validation set is unpacked.

        FileNotFoundError or ValueError for a folder that is not like that, and ValueError if it has
        another number of classes than `run` tells.
        """
        images, labels = ImageFolder(folder), list[Array]()

        def checked(pixels: Array) -> Array:
            scores = run(pixels)
            if scores.shape[1] != len(images.classes):
                raise ValueError(
                    f"{folder} has {len(images.classes)} classes (folders), and the network "
                    f"{scores.shape[1]}: the n-th folder by name is the n-th class"
                )
            return scores

        def batches() -> Iterator[Arrays]:
            for pixels, right in images.batches(self.preprocessing, batch, limit):
                labels.append(right)
                yield (pixels,)

        scores, wanted = outputs(checked, reference, batches())
        return classified(scores, np.concatenate(labels), wanted)


def runner(network: nn.Module | Path) -> Run:
    """A PyTorch module, or an ONNX file in ONNX Runtime, as a callable of arrays."""
    if isinstance(network, Path):
        return _onnx_runner(network)
    import torch

    def run(*arrays: Array) -> Array:
        with torch.inference_mode():
            return network(*map(torch.from_numpy, arrays)).numpy()

    return run


def _onnx_runner(path: Path) -> Run:
    require("an ONNX file as it is", "peers", "onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*arrays: Array) -> Array:
        return np.asarray(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return run
