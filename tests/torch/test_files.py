"""Saving and loading: what is in a file, and that nothing is half loaded."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    QuantizedLinear,
    QuantizedWeight,
    load,
    quantize_,
    save,
)
from lowbit.torch.files import _stored
from lowbit.torch.header import FILE

INT8 = Int8DynamicConfig()
FOUR_BITS = Int4DynamicConfig(group_size=16, weight_range="minmax")
# For tests to which the configuration makes no difference, or that take the file apart.
ONLY_INT8 = pytest.mark.parametrize("config", [INT8], ids=["int8"])
ONLY_FOUR_BITS = pytest.mark.parametrize("config", [FOUR_BITS], ids=["int4"])


@pytest.fixture
def path(tmp_path: Path, model: nn.Module) -> Path:
    """A file that holds `model`."""
    save(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if not k.endswith("sha256")}
        return {key: file.get_tensor(key).clone() for key in file.keys()}, metadata  # noqa: SIM118


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that loading could change."""
    state = {
        key: (value.dequantize() if isinstance(value, QuantizedWeight) else value).clone()
        for key, value in model.state_dict().items()
    }
    types = {name: type(module) for name, module in model.named_modules()}
    return {"state": state, "types": types, "ids": {n: id(p) for n, p in model.named_parameters()}}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after["types"] == before["types"]
    assert after["ids"] == before["ids"]
    for key, value in before["state"].items():
        assert torch.equal(after["state"][key], value)


def test_into_a_float_model(
    path: Path, model: nn.Module, float_model: nn.Module, tokens: Tensor
) -> None:
    fresh = type(float_model)().eval()
    assert load(fresh, path) is fresh
    assert torch.equal(fresh(tokens), model(tokens))
    for name, parameter in model.named_parameters():
        assert fresh.get_parameter(name).requires_grad == parameter.requires_grad


def test_into_a_quantized_model(
    path: Path, model: nn.Module, float_model: nn.Module, tokens: Tensor
) -> None:
    fresh = quantize_(type(float_model)(), Int8DynamicConfig(symmetric=True)).eval()
    load(fresh, path)
    assert torch.equal(fresh(tokens), model(tokens))


def test_each_layer_keeps_its_configuration(
    float_model: nn.Module, tmp_path: Path, tokens: Tensor
) -> None:
    fresh = type(float_model)().eval()
    configs = {"first": Int8DynamicConfig(symmetric=True), "head": Int4WeightOnlyConfig(8, True)}
    for layer, config in configs.items():
        quantize_(float_model, config, lambda _, name, layer=layer: name == layer)
    save(float_model, tmp_path / "file")
    load(fresh, tmp_path / "file")
    for layer, config in configs.items():
        assert fresh.get_submodule(layer).config == config
    assert type(fresh.get_submodule("second")) is nn.Linear
    assert torch.equal(fresh(tokens), float_model(tokens))


@ONLY_INT8
def test_what_is_in_the_file(path: Path, model: nn.Module) -> None:
    tensors, metadata = content(path)
    assert tensors.keys() == model.state_dict().keys() | {
        f"{name}.weight.scale" for name in ("embedding", "first", "second", "head")
    }
    assert tensors["first.weight"].dtype == torch.int8
    assert tensors["first.weight"].shape == (70, 40)
    assert tensors["first.weight.scale"].shape == (70,)
    assert metadata["format"] == "lowbit.torch"
    assert metadata["format_version"] == "4"
    assert json.loads(metadata["layers"]) == {
        f"{name}.weight": json.loads(INT8.to_json())
        for name in ("embedding", "first", "second", "head")
    }


def test_reads_a_file_of_the_first_version(tmp_path: Path) -> None:
    values = torch.arange(-63, 63, dtype=torch.int8).reshape(6, 21)
    scale = torch.linspace(0.01, 0.06, 6)
    metadata = {
        "format": "lowbit.torch",
        "format_version": "1",
        "layers": '{"weight": {"kind": "int8_dynamic", "symmetric": true}}',
        "shared": "{}",
    }
    tensors = {"weight": values, "weight.scale": scale, "bias": torch.zeros(6)}
    save_file(tensors, tmp_path / "file", metadata)
    layer = load(nn.Linear(21, 6), tmp_path / "file")
    assert isinstance(layer, QuantizedLinear)
    assert layer.config == Int8DynamicConfig(symmetric=True, embeddings=None)
    assert torch.equal(layer.weight.dequantize(), values * scale[:, None])


@ONLY_FOUR_BITS
def test_what_is_in_a_file_of_four_bits(
    path: Path, model: nn.Module, float_model: nn.Module
) -> None:
    tensors, metadata = content(path)
    parts = {name: tensors[f"second.weight{name}"] for name in ("", ".scale", ".zero_point")}
    assert [(part.dtype, *part.shape) for part in parts.values()] == [
        (torch.uint8, 40, 35),
        (torch.float32, 40, 5),
        (torch.uint8, 40, 5),
    ]
    assert json.loads(metadata["layers"])["second.weight"] == json.loads(FOUR_BITS.to_json())
    nibbles = torch.stack([parts[""] & 15, parts[""] >> 4], dim=-1).reshape(40, 70)
    group = torch.arange(70) // 16
    values = (nibbles.float() - parts[".zero_point"][:, group]) * parts[".scale"][:, group]
    assert torch.equal(values, model.get_submodule("second").weight.dequantize())  # type: ignore[union-attr]
    original = float_model.get_parameter("second.weight")
    assert ((values - original).abs() <= 0.501 * parts[".scale"][:, group]).all()


def test_symmetric_weights_have_no_zero_points(tmp_path: Path, float_model: nn.Module) -> None:
    save(quantize_(float_model, Int4WeightOnlyConfig(None, True)), tmp_path / "file")
    tensors, _ = content(tmp_path / "file")
    assert not [key for key in tensors if key.endswith("zero_point")]
    assert tensors["second.weight.scale"].shape == (40, 1)


@pytest.mark.parametrize(("config", "part"), [(INT8, 0.26), (Int4DynamicConfig(), 0.15)])
def test_size_of_the_file(tmp_path: Path, config: QuantizeConfig, part: float) -> None:
    layer = nn.Linear(512, 512)
    save(layer, tmp_path / "float")
    save(quantize_(layer, config), tmp_path / "quantized")
    sizes = [(tmp_path / name).stat().st_size for name in ("float", "quantized")]
    assert sizes[1] < part * sizes[0]


def test_root_layer_and_float_model(tmp_path: Path, config: QuantizeConfig) -> None:
    layer, x = nn.Linear(9, 4), torch.randn(3, 9)
    save(layer, tmp_path / "float")
    assert torch.equal(load(nn.Linear(9, 4), tmp_path / "float")(x), layer(x))
    save(quantize_(layer, config), tmp_path / "quantized")
    loaded = load(nn.Linear(9, 4), tmp_path / "quantized")
    assert isinstance(loaded, QuantizedLinear)
    assert torch.equal(loaded(x), layer(x))


def test_half_precision_model(
    float_model: nn.Module, config: QuantizeConfig, tmp_path: Path, tokens: Tensor
) -> None:
    model = quantize_(float_model.to(torch.bfloat16), config)
    save(model, tmp_path / "file")
    fresh = load(type(float_model)().to(torch.bfloat16).eval(), tmp_path / "file")
    assert fresh.get_parameter("first.weight").dtype == torch.bfloat16
    assert torch.equal(fresh(tokens), model(tokens))


def tied() -> nn.Sequential:
    """Two tied linears, an embedding tied with a linear, and a buffer that is half of another."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(5, 8), nn.Linear(8, 5))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    whole = torch.arange(6.0)
    model[2].register_buffer("whole", whole)
    model[2].register_buffer("part", whole[:3])
    return model


@pytest.mark.parametrize("quantized", [None, INT8, FOUR_BITS], ids=["float", "int8", "int4"])
def test_shared_tensors(tmp_path: Path, quantized: QuantizeConfig | None) -> None:
    model = tied()
    if quantized is not None:
        quantize_(model, quantized)
    save(model, tmp_path / "file")
    tensors, metadata = content(tmp_path / "file")
    assert "1.weight" not in tensors
    assert json.loads(metadata["shared"])["1.weight"] == "0.weight"
    assert "3.weight" not in tensors  # the embedding's and the linear layer's, in one format
    separate = nn.Sequential(*(copy.deepcopy(layer) for layer in tied()))
    assert separate[0].weight is not separate[1].weight
    for fresh in (tied(), separate):
        load(fresh, tmp_path / "file")
        assert_same_state(fresh, model)
        assert not quantized or fresh[0].weight is fresh[1].weight


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    one, other = snapshot(ours)["state"], snapshot(theirs)["state"]
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def test_file_with_two_tensors_for_one_is_refused(tmp_path: Path) -> None:
    separate = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5, bias=False))
    save(separate, tmp_path / "file")
    model = copy.deepcopy(separate)
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="one tensor in the model, two in the file"):
        load(model, tmp_path / "file")


@ONLY_INT8
def test_replaces_a_file_and_leaves_no_other(path: Path, float_model: nn.Module) -> None:
    save(quantize_(float_model, Int8DynamicConfig(symmetric=True)), path)
    assert os.listdir(path.parent) == [path.name]
    assert '"symmetric": true' in content(path)[1]["layers"]


def test_state_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    with pytest.raises(TypeError, match="'_extra_state' in the state_dict is a dict"):
        save(WithExtra(2, 2), tmp_path / "file")
    assert os.listdir(tmp_path) == []


@ONLY_INT8
def test_missing_file_and_folder(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load(model, tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        load(model, tmp_path)


@ONLY_INT8
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.999])
def test_truncated_file(path: Path, float_model: nn.Module, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    before = snapshot(float_model)
    with pytest.raises(ValueError, match=r"truncated|not a safetensors file|goes on after"):
        load(float_model, path)
    assert_unchanged(float_model, before)


def test_other_kinds_of_file(tmp_path: Path, float_model: nn.Module) -> None:
    path = tmp_path / "file"
    before = snapshot(float_model)
    path.write_bytes(os.urandom(4096))
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(float_model, path)
    torch.save(float_model.state_dict(), path)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(float_model, path)
    save_file({k: v.clone() for k, v in float_model.state_dict().items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"format 'pt', expected 'lowbit\.torch'"):
        load(float_model, path)
    assert_unchanged(float_model, before)


Change = Callable[[dict[str, Tensor], dict[str, str]], object]

CHANGES: list[tuple[str, Change]] = [
    ("format version '5'; .* '2', '3', '4'", lambda t, m: m.update(format_version="5")),
    ("damaged metadata", lambda t, m: m.update(layers="{")),
    ("damaged metadata", lambda t, m: m.pop("shared")),
    ("damaged metadata", lambda t, m: m.update(layers="[1]")),
    ("damaged metadata", lambda t, m: m.update(layers="[" * 100_000)),
    ("damaged metadata", lambda t, m: m.update(shared="[" * 100_000)),
    ("no configuration kind is called", lambda t, m: m.update(layers='{"a": {"kind": "int1"}}')),
    ("missing in the file: 'norm.bias'", lambda t, m: t.pop("norm.bias")),
    ("missing in the file: 'first.weight'", lambda t, m: t.pop("first.weight")),
    ("'first.weight.scale'", lambda t, m: t.pop("first.weight.scale")),
    ("not in the model: 'new'", lambda t, m: t.update(new=torch.zeros(2))),
    ("not in the model: 'new'", lambda t, m: m.update(shared='{"new": "norm.bias"}')),
    ("not stored: 'gone'", lambda t, m: m.update(shared='{"norm.bias": "gone"}')),
    ("'norm.bias' is .* expected", lambda t, m: t.update({"norm.bias": torch.zeros(41)})),
    ("'norm.bias' is .*float16", lambda t, m: t.update({"norm.bias": torch.zeros(40).half()})),
    ("'first.weight' is", lambda t, m: t.update({"first.weight": torch.zeros(70, 40)})),
    ("'first.weight' is", lambda t, m: t.update({"first.weight": t["second.weight"].clone()})),
    ("'first.weight.scale' is", lambda t, m: t.update({"first.weight.scale": torch.ones(1)})),
    ("positive and finite", lambda t, m: t["first.weight.scale"].fill_(float("nan"))),
    ("positive and finite", lambda t, m: t["first.weight.scale"].fill_(0)),
    (
        "not the weight of a",
        lambda t, m: (
            m.update(layers=m["layers"].replace("first.weight", "norm.weight")),
            t.update({"norm.weight.scale": t.pop("first.weight.scale")}),
        ),
    ),
]


# The weight of the layer "first" is [70, 40], in groups of 16.
CHANGES_OF_FOUR_BITS: list[tuple[str, Change]] = [
    ("'first.weight.scale' is", lambda t, m: t.update({"first.weight.scale": torch.ones(70)})),
    (
        "'first.weight' is .* expected torch.uint8 .70, 20",
        lambda t, m: t["first.weight"].resize_(1),
    ),
    ("'first.weight.zero_point'", lambda t, m: t.pop("first.weight.zero_point")),
    ("zero_point' must lie between 0", lambda t, m: t["first.weight.zero_point"].fill_(16)),
    ("not in the model: 'first.weight.zero", lambda t, m: m.update(four_bits(m, True, 16))),
    (
        "'first.weight.scale' is .* expected .* .70, 5",
        lambda t, m: m.update(four_bits(m, False, 8)),
    ),
    ("damaged metadata.* multiple of 8", lambda t, m: m.update(four_bits(m, False, 12))),
    (
        "'second.weight' shares 'first.weight', which is quantized to another format",
        lambda t, m: (
            t.pop("second.weight"),
            t.pop("second.weight.scale"),
            t.pop("second.weight.zero_point"),
            m.update(four_bits(m, False, 8, "second"), shared='{"second.weight": "first.weight"}'),
        ),
    ),
]


def four_bits(
    metadata: dict[str, str], symmetric: bool, group_size: int, layer: str = "first"
) -> dict[str, str]:
    """Metadata in which one layer has another configuration."""
    layers = json.loads(metadata["layers"])
    layers[f"{layer}.weight"] |= {"symmetric_weight": symmetric, "group_size": group_size}
    return {"layers": json.dumps(layers)}


@pytest.mark.parametrize(
    ("config", "message", "change"),
    [(INT8, *each) for each in CHANGES] + [(FOUR_BITS, *each) for each in CHANGES_OF_FOUR_BITS],
)
@pytest.mark.parametrize("into", ["float", "quantized"])
def test_wrong_content_changes_nothing(
    path: Path,
    float_model: nn.Module,
    config: QuantizeConfig,
    message: str,
    change: Change,
    into: str,
) -> None:
    tensors, metadata = content(path)
    change(tensors, metadata)
    FILE.write(path, metadata, {k: one for key, t in tensors.items() for k, one in _stored(key, t)})
    if into == "quantized":
        quantize_(float_model, config)
    before = snapshot(float_model)
    with pytest.raises(ValueError, match=message):
        load(float_model, path)
    assert_unchanged(float_model, before)


@ONLY_INT8
def test_models_that_do_not_fit(path: Path, float_model: nn.Module, tmp_path: Path) -> None:
    for model, message in (
        (nn.Linear(3, 3), r"missing in the file: 'bias', 'weight'; not in .* and 4 more"),
        (type(float_model)().double(), r"torch\.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            load(model, path)
    save(float_model, tmp_path / "float")
    quantize_(float_model, Int8DynamicConfig())
    with pytest.raises(ValueError, match="quantized in the model but not in the file"):
        load(float_model, tmp_path / "float")
