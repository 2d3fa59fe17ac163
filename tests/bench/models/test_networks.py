"""Networks have the sizes and the keys that the usual checkpoints have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from lowbit.models.networks import (  # noqa: E402
    BASE,
    SMALL,
    Crepe,
    EfficientNetLite0,
    ResNet,
    VisionTransformer,
    resized_positions,
)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_resnet34_is_the_standard_one() -> None:
    network = ResNet()
    # As published: 21.8 M parameters, and torchvision's number of them.
    assert count(network) == 21_797_672
    state = network.state_dict()
    assert len(state) == 218
    for key, shape in {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.bias": (128,),
        "layer3.5.bn2.weight": (256,),
        "layer4.2.conv2.weight": (512, 512, 3, 3),
        "fc.weight": (1000, 512),
    }.items():
        assert tuple(state[key].shape) == shape
    assert "layer1.0.downsample.0.weight" not in state


@pytest.mark.parametrize(("widths", "parameters"), [(BASE, 86_567_656), (SMALL, 22_050_664)])
def test_vision_transformers_are_the_standard_ones(widths: object, parameters: int) -> None:
    with torch.device("meta"):
        network = VisionTransformer(widths)  # pyright: ignore[reportArgumentType]
    assert count(network) == parameters
    keys = network.state_dict().keys()
    assert len(keys) == 152
    assert {
        "class_token",
        "conv_proj.weight",
        "encoder.pos_embedding",
        "encoder.layers.encoder_layer_0.ln_1.weight",
        "encoder.layers.encoder_layer_11.self_attention.in_proj_weight",
        "encoder.layers.encoder_layer_3.self_attention.out_proj.bias",
        "encoder.layers.encoder_layer_0.mlp.0.weight",
        "encoder.layers.encoder_layer_0.mlp.3.bias",
        "encoder.ln.bias",
        "heads.head.weight",
    } <= keys


def test_others_have_the_size_of_their_checkpoints() -> None:
    assert count(EfficientNetLite0()) == 4_652_008
    assert count(Crepe()) == 22_239_976


@pytest.mark.deep
@pytest.mark.parametrize(
    ("network", "shape", "outputs"),
    [
        (lambda: ResNet(7), (2, 3, 64, 96), 7),
        (lambda: VisionTransformer(SMALL, 5, 32), (2, 3, 32, 32), 5),
        (lambda: EfficientNetLite0(11), (2, 3, 64, 64), 11),
        (lambda: Crepe(), (2, 1024), 360),
    ],
)
def test_shapes(network: object, shape: tuple[int, ...], outputs: int) -> None:
    built = network().eval()  # pyright: ignore[reportCallIssue]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores = built(x)
        assert scores.shape == (2, outputs)
        # Each sample for itself.
        torch.testing.assert_close(built(x[1:]), scores[1:], rtol=1e-3, atol=1e-4)
    assert scores.std() > 0


def test_sizes_of_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="size 100 is no positive multiple of 16"):
        VisionTransformer(SMALL, 10, 100)


def test_positions_are_resized_as_a_picture() -> None:
    rows, columns = torch.meshgrid(torch.arange(7.0), torch.arange(7.0), indexing="ij")
    grid = torch.stack([rows, columns], -1).reshape(1, 49, 2)
    positions = torch.cat([torch.full((1, 1, 2), 9.0), grid], 1)
    assert resized_positions(positions, 112) is positions
    larger = resized_positions(positions, 224)
    assert larger.shape == (1, 197, 2)
    assert (larger[:, 0] == 9).all()
    middle = larger[0, 1:].reshape(14, 14, 2)[4:10, 4:10]
    # A ramp stays a ramp, away from the borders: two new rows are one old one.
    torch.testing.assert_close((middle[2:] - middle[:-2])[..., 0], torch.ones(4, 6))
    torch.testing.assert_close((middle[:, 2:] - middle[:, :-2])[..., 1], torch.ones(6, 4))
    torch.testing.assert_close(middle[..., 0], middle[:, :1, 0].expand(6, 6))
