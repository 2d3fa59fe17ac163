"""magika, which tells what type a file is of; it comes as ONNX."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from lowbit.bench.models.data.files import features, installation, typed_files
from lowbit.bench.models.metrics import Metric, classified
from lowbit.bench.models.model import Arrays, Model, Run, Weights, models
from lowbit.registry.extras import folder_of

BATCH = 32
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
        scores, wanted = [], []
        for start in range(0, len(judged), BATCH):
            batch = np.stack([features(path) for path, _ in judged[start : start + BATCH]])
            scores.append(run(batch))
            if reference is not None:
                wanted.append(reference(batch))
        labels = np.array([names.index(label) for _, label in judged])
        return classified(
            np.concatenate(scores), labels, np.concatenate(wanted) if wanted else None
        )


models.add(Magika.name, Magika())


def _folder() -> Path:
    """The newest network in the package."""
    return max((folder_of("magika", "magika") / "models").glob("standard_v*"))


@lru_cache(maxsize=1)
def _files() -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Files with their types: those to calibrate on, and those to judge by."""
    repository = Path(__file__).parents[5]
    own = ("src", "tests", "docs", "tools", "examples")
    folders = [repository / name for name in own if (repository / "pyproject.toml").is_file()]
    found = typed_files(*folders, *installation())
    first = round(len(found) * CALIBRATED)
    return found[:first], found[first:]
