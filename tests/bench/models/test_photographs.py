"""Folders of photographs, one a class, as ImageNet's; the test draws them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lowbit.models.model import ImageModel, models

Image = pytest.importorskip("PIL.Image", reason="PIL is not installed: extra models")

from lowbit.models.data import (  # noqa: E402
    ImageFolder,
    Preprocessing,
    boxes,
    opened,
)

COLOURS = {"n01": (250, 20, 20), "n02": (20, 250, 20), "n03": (20, 20, 250)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imagenet")
    # Made in another order than that of the names.
    for name in ("n03", "n01", "n02"):
        (root / name).mkdir()
        for i, size in enumerate([(300, 260), (500, 333), (224, 600)]):
            Image.new("RGB", size, COLOURS[name]).save(root / name / f"{i}.JPEG")
        (root / name / "notes.txt").write_text("no image")
    Image.new("L", (256, 256), 128).save(root / "n02" / "grey.png")
    return root


def by_colour(pixels: np.ndarray) -> np.ndarray:
    return pixels.mean((2, 3))


def model() -> ImageModel:
    found = models.get("resnet34")
    assert isinstance(found, ImageModel)
    return found


def test_accuracy_on_a_folder(folder: Path) -> None:
    found = model().accuracy_on(folder, by_colour, reference=by_colour, batch=4)
    assert found["top1"].count == 10
    # A grey image has no colour: its class is left to the normalization.
    assert found["top1"].value >= 0.9
    assert found["agreement"].value == 1
    assert model().accuracy_on(folder, by_colour, limit=4)["top1"].count == 4


def test_classes_go_by_the_names_of_folders(folder: Path) -> None:
    images = ImageFolder(folder)
    assert images.classes == ["n01", "n02", "n03"]
    assert [images.classes[label] for label in images.labels] == [
        path.parent.name for path in images.paths
    ]


def test_preprocessing_is_that_of_torchvision() -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (331, 517, 3), dtype=np.uint8))
    # By hand: 331 → 256, 517 → 517 · 256 / 331 = 399.9, cut off; the middle 224 of each.
    resized = image.resize((399, 256), Image.Resampling.BILINEAR)
    cut = np.asarray(resized)[16 : 16 + 224, 88 : 88 + 224] / 255
    wanted = (cut - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    found = Preprocessing().middle(image)
    assert (found.shape, found.dtype) == ((3, 224, 224), np.float32)
    np.testing.assert_allclose(found, wanted.transpose(2, 0, 1), atol=1e-5)


def test_parts_of_an_image() -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (300, 400, 3), dtype=np.uint8))
    cut = boxes(image, 50, 3)
    for left, top, right, bottom in cut:
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        assert right - left == pytest.approx(bottom - top)
    plain = Preprocessing((0.0,) * 3, (1.0,) * 3, size=100)
    found = plain.part(image, (10, 20, 110, 120))
    np.testing.assert_allclose(
        found, np.asarray(image)[20:120, 10:110].transpose(2, 0, 1) / 255, atol=1e-6
    )


def test_folders_that_are_not_like_that(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        ImageFolder(tmp_path / "absent")
    Image.new("RGB", (9, 9)).save(tmp_path / "flat.png")
    with pytest.raises(ValueError, match="expected a folder for each class"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match=r"has 3 classes .* and the network 1000"):
        model().accuracy_on(folder, lambda x: np.zeros((len(x), 1000)))
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no more")
    with pytest.raises(ValueError, match=r"broken\.jpg cannot be read as an image"):
        opened(tmp_path / "broken.jpg")
