"""The two scripts: a network is trained, and evaluated, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lowbit.models import checkpoint
from lowbit.models.networks import ResNet

ROOT = Path(__file__).parents[3]


def called(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / script), *map(str, arguments)]
    # Two threads on a busy machine wait for each other more than they compute.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.deep
def test_a_network_is_trained(fashion_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "vit.safetensors"
    done = called(
        "train_fashion.py", "vit_s_16", "--data", fashion_folder, "--out", out, "--device", "cpu",
        "--limit", 16, "--batch", 8, "--epochs", 1, "--size", 32,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"1/1 +loss \d+\.\d+ +test \d+\.\d\d%", done.stdout)
    assert "trained on Fashion-MNIST at 32 pixels, 1 epochs, seed 0" in done.stdout
    state = checkpoint.load(out)
    assert state["heads.head.weight"].shape == (10, 384)
    assert state["encoder.pos_embedding"].shape == (1, 5, 384)


def test_photographs_are_evaluated(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="PIL is not installed: extra models")
    for name in ("a", "b"):
        (tmp_path / "photographs" / name).mkdir(parents=True)
        image.new("RGB", (256, 300)).save(tmp_path / "photographs" / name / "1.jpg")
    weights = tmp_path / "net.safetensors"
    checkpoint.save(weights, ResNet(2).state_dict(), "a test")
    folder = tmp_path / "photographs"
    done = called("evaluate.py", "resnet34", "--weights", weights, "--imagenet", folder)
    assert done.returncode == 0, done.stderr
    # Two equal images of two classes.
    assert "top1 0.5 ± 0.5 of 2" in done.stdout
    wrong = called("evaluate.py", "resnet34", "--weights", weights, "--imagenet", tmp_path / "no")
    assert wrong.returncode == 2
    assert "there is no folder" in wrong.stderr
