"""Fashion-MNIST is read, enlarged, and judged by; a wrong file is refused."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from lowbit.models import fashion
from lowbit.models.catalog import ResNet34


@pytest.fixture
def model(fashion_folder: Path) -> ResNet34:
    model = ResNet34()
    model.folder, model.batch = str(fashion_folder), 16
    return model


def by_rows(pixels: np.ndarray) -> np.ndarray:
    """A classifier of the test's images: the brightness of each pair of rows."""
    return pixels[:, 0, : 112 * 20 // 28].reshape(len(pixels), 10, -1).mean(2)


def test_images_and_labels(fashion_folder: Path) -> None:
    images, labels = fashion.fashion("test", str(fashion_folder))
    assert (images.shape, images.dtype, labels.shape) == ((40, 28, 28), np.uint8, (40,))
    assert (images[0, 2 * labels[0] : 2 * labels[0] + 2] >= 190).all()


def test_enlarging_is_that_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    pixels = (torch.from_numpy(images)[:, None] / 255 - fashion.MEAN) / fashion.DEVIATION
    for size in (28, 64, 112, 224, 20):
        wanted = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear").numpy()
        found = fashion.prepared(images, size)
        assert (found.shape, found.dtype) == ((3, 3, size, size), np.float32)
        assert found.flags.c_contiguous
        for channel in range(3):
            np.testing.assert_allclose(found[:, channel], wanted[:, 0], atol=2e-5)


def test_accuracy_counts(model: ResNet34) -> None:
    found = model.accuracy(by_rows)
    assert found.keys() == {"top1"}
    assert (found["top1"].value, found["top1"].count) == (1.0, 40)
    labels = fashion.fashion("test", model.folder)[1]
    always = model.accuracy(lambda x: np.eye(10)[np.full(len(x), 4)], limit=20)["top1"]
    assert always.value == pytest.approx((labels[:20] == 4).mean())
    assert always.count == 20


def test_a_reference_is_compared_with(model: ResNet34) -> None:
    same = model.accuracy(by_rows, reference=by_rows)
    assert same["agreement"].value == 1
    half = model.accuracy(lambda x: 1.5 * by_rows(x), reference=by_rows)
    assert half["agreement"].value == 1
    assert half["sqnr_db"].value == pytest.approx(10 * np.log10(4))


def test_calibration_is_of_other_images(model: ResNet34) -> None:
    batches = list(model.calibration(3, 8))
    assert [batch[0].shape for batch in batches] == [(8, 3, 112, 112)] * 3
    np.testing.assert_array_equal(next(model.calibration(1, 8))[0], batches[0][0])
    train = fashion.prepared(fashion.fashion("train", model.folder)[0], 112)
    for image in batches[1][0]:
        assert (train == image).all((1, 2, 3)).sum() == 1
    with pytest.raises(ValueError, match="20 batches of 8 are more than 96 images"):
        next(model.calibration(20, 8))


def test_an_absent_file_says_which_package(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Debian's package dataset-fashion-mnist"):
        fashion.fashion("train", str(tmp_path))


@pytest.mark.parametrize("damage", ["truncated", "of floats", "empty"])
def test_a_damaged_file_is_refused(fashion_folder: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / damage
    shutil.copytree(fashion_folder, folder)
    path = folder / "t10k-images-idx3-ubyte.gz"
    data = gzip.decompress(path.read_bytes())
    wrong = {"truncated": data[:-5], "of floats": data[:2] + b"\x0d" + data[3:], "empty": b""}
    path.write_bytes(gzip.compress(wrong[damage]))
    with pytest.raises(ValueError, match="is no IDX file of bytes in 3 dimensions, or truncated"):
        fashion.fashion("test", str(folder))
