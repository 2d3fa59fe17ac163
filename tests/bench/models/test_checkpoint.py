"""Weights go to files and come back; what is no checkpoint is refused, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lowbit.models import checkpoint  # noqa: E402
from lowbit.models.model import models  # noqa: E402
from lowbit.models.networks import (  # noqa: E402
    SMALL,
    ResNet,
    VisionTransformer,
)


@pytest.fixture(scope="module")
def resnet() -> ResNet:
    torch.manual_seed(1)
    return ResNet(3).eval()


def test_what_is_saved_is_loaded(resnet: ResNet, tmp_path: Path) -> None:
    path, state = tmp_path / "net.safetensors", resnet.state_dict()
    checkpoint.save(path, state, "a test")
    loaded = checkpoint.load(path)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    metadata, _ = checkpoint.FILE.read(path, verify=True)
    assert metadata["made"] == "a test"


def test_matrices_are_halved(resnet: ResNet, tmp_path: Path) -> None:
    path, state = tmp_path / "net.safetensors", resnet.state_dict()
    checkpoint.save(path, checkpoint.halved(state), "a test")
    loaded = checkpoint.load(path)
    assert loaded["conv1.weight"].dtype == torch.float32
    assert torch.equal(loaded["conv1.weight"], state["conv1.weight"].half().float())
    assert torch.equal(loaded["bn1.running_var"], state["bn1.running_var"])
    assert path.stat().st_size < 2.02 * 21_286_211


def test_bfloat16_and_files_of_other_writers(resnet: ResNet, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the safetensors library writes it")
    path = tmp_path / "net.safetensors"
    state = {name: t.bfloat16() if t.dim() == 4 else t for name, t in resnet.state_dict().items()}
    library.save_file(state, path)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["conv1.weight"], state["conv1.weight"].float())
    checkpoint.load_into(ResNet(3), loaded, "the file")


@pytest.mark.parametrize("wrapped", [False, True])
def test_files_of_pytorch(resnet: ResNet, tmp_path: Path, wrapped: bool) -> None:
    path, state = tmp_path / "net.pth", resnet.state_dict()
    # Older checkpoints have no counters.
    kept = {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}
    torch.save({"state_dict": kept, "epoch": 3} if wrapped else kept, path)
    built = models.get("resnet34").build(path)
    assert isinstance(built, ResNet)
    assert built.fc.out_features == 3
    assert not built.training
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(built(x), resnet(x))


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("unpickled",)


def test_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.pth"
    torch.save({"fc.weight": _Harmful()}, path)
    with pytest.raises(ValueError, match=r"net\.pth cannot be read as tensors"):
        checkpoint.load(path)
    assert "unpickled" not in capsys.readouterr().out


def test_what_is_no_checkpoint(resnet: ResNet, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        checkpoint.load(tmp_path / "absent.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        checkpoint.load(tmp_path / "list.pth")
    path = tmp_path / "cut.safetensors"
    checkpoint.save(path, resnet.state_dict(), "a test")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut\.safetensors is not a safetensors file.*truncated"):
        checkpoint.load(path)


def test_keys_and_shapes_that_do_not_fit(resnet: ResNet, tmp_path: Path) -> None:
    state = dict(resnet.state_dict())
    del state["layer1.0.conv1.weight"]
    state["layer9.weight"] = torch.zeros(3)
    state["bn1.bias"] = torch.zeros(65)
    with pytest.raises(ValueError, match="F is no checkpoint of ResNet") as caught:
        checkpoint.load_into(ResNet(3), state, "F")
    text = str(caught.value)
    assert "missing: layer1.0.conv1.weight;" in text
    assert "unknown: layer9.weight;" in text
    assert "bn1.bias is (65,), expected (64,)" in text
    checkpoint.save(tmp_path / "net.safetensors", resnet.state_dict(), "a test")
    with pytest.raises(ValueError, match="is no checkpoint of vit_b_16: it has no"):
        models.get("vit_b_16").build(tmp_path / "net.safetensors")


@pytest.mark.deep
def test_a_transformer_for_larger_images(tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    checkpoint.save(path, VisionTransformer(SMALL, 4, 48).state_dict(), "a test")
    model = models.get("vit_s_16")
    small, large = model.build(path), model.build(path, for_speed=True)
    assert isinstance(small, VisionTransformer)
    assert isinstance(large, VisionTransformer)
    assert (small.size, large.size) == (48, 224)
    (x,) = model.example(1)
    with torch.inference_mode():
        assert large(torch.from_numpy(x)).shape == (1, 4)
