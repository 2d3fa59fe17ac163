from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowbit.numerics import quantize
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    config_from_json,
    load,
    quantize_,
    save,
)


@pytest.mark.parametrize(
    ("config", "content"),
    [
        (Int8DynamicConfig(), {"kind": "int8_dynamic", "symmetric": False}),
        (Int8DynamicConfig(symmetric=True), {"kind": "int8_dynamic", "symmetric": True}),
        (
            Int4WeightOnlyConfig(),
            {
                "kind": "int4_weight_only",
                "group_size": 128,
                "symmetric_weight": False,
                "weight_range": "mse",
            },
        ),
        (
            Int4WeightOnlyConfig(group_size=None, symmetric_weight=True, weight_range="mse"),
            {
                "kind": "int4_weight_only",
                "group_size": None,
                "symmetric_weight": True,
                "weight_range": "mse",
            },
        ),
        (
            Int4DynamicConfig(group_size=8, symmetric=True, weight_range="mse"),
            {
                "kind": "int4_dynamic",
                "group_size": 8,
                "symmetric": True,
                "symmetric_weight": False,
                "weight_range": "mse",
            },
        ),
    ],
)
def test_round_trip_through_json(config: QuantizeConfig, content: dict[str, Any]) -> None:
    text = config.to_json()
    assert json.loads(text) == content | {"embeddings": 8, "method": "nearest"}
    assert config_from_json(text) == config


def test_is_frozen_and_checks_its_fields() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Int8DynamicConfig().symmetric = True  # type: ignore[misc]
    with pytest.raises(TypeError, match="symmetric must be True or False, got 1"):
        Int8DynamicConfig(symmetric=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="symmetric must be True or False, got None"):
        Int4DynamicConfig(symmetric=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Int4WeightOnlyConfig, Int4DynamicConfig])
def test_checks_of_four_bits(kind: Any) -> None:
    for wrong in (True, 32.0, "32"):
        with pytest.raises(TypeError, match=f"group_size must be an integer .* got {wrong!r}"):
            kind(group_size=wrong)
    for wrong in (0, -8, 12):
        with pytest.raises(ValueError, match=f"positive multiple of 8, got {wrong}; None is"):
            kind(group_size=wrong)
    with pytest.raises(TypeError, match="symmetric_weight must be True or False, got 0"):
        kind(symmetric_weight=0)
    with pytest.raises(ValueError, match="positive multiple of 8"):
        config_from_json(kind().to_json().replace("128", "20"))
    with pytest.raises(ValueError, match="unknown weight_range 'max'; pass 'minmax' or 'mse'"):
        kind(weight_range="max")
    with pytest.raises(TypeError, match="weight_range must be 'minmax' or 'mse', got True"):
        kind(weight_range=True)


@pytest.mark.parametrize("kind", [Int4WeightOnlyConfig, Int4DynamicConfig])
def test_json_from_before_there_was_a_range_means_minmax(kind: Any) -> None:
    older = json.loads(kind(group_size=16).to_json())
    del older["weight_range"]
    assert config_from_json(json.dumps(older)) == kind(group_size=16, weight_range="minmax")


def layer() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(300, 20, bias=False))


def weight_of(model: nn.Module) -> Any:
    return model.get_parameter("0.weight")


@pytest.mark.parametrize("kind", [Int4WeightOnlyConfig, Int4DynamicConfig])
@pytest.mark.parametrize(("symmetric", "part"), [(False, 0.95), (True, 0.85)])
def test_the_weight_is_quantized_with_the_range_that_is_asked_for(
    kind: Any, symmetric: bool, part: float
) -> None:
    original = weight_of(layer())
    errors = []
    for name in ("mse", "minmax"):
        config = kind(group_size=64, symmetric_weight=symmetric, weight_range=name)
        weight = weight_of(quantize_(layer(), config))
        errors.append(float((weight.dequantize() - original).detach().square().sum()))
        numbers = quantize(
            original.detach().numpy(),
            "int4" if symmetric else "uint4",
            axis=0,
            group_size=64,
            symmetric=symmetric,
            range=name,
        )
        np.testing.assert_array_equal(weight.int_values(), numbers.values)
        np.testing.assert_array_equal(weight.scales(), numbers.scale)
        assert f"range {name}" in repr(weight)
    assert errors[0] < part * errors[1]


def test_copies_and_files_keep_the_numbers_whatever_their_range(tmp_path: Path) -> None:
    mse = Int4WeightOnlyConfig(64, weight_range="mse")
    plain = quantize_(layer(), Int4WeightOnlyConfig(64, weight_range="minmax"))
    searched = quantize_(layer(), mse)
    numbers = weight_of(plain).dequantize()
    assert not torch.equal(weight_of(searched).dequantize(), numbers)
    save(plain, tmp_path / "file")
    loaded = load(quantize_(layer(), mse), tmp_path / "file")
    assert torch.equal(weight_of(loaded).dequantize(), numbers)
    assert weight_of(loaded).format.range == "minmax"
    searched.load_state_dict(plain.state_dict())
    assert torch.equal(weight_of(searched).dequantize(), numbers)
    # What is quantized into a weight later is quantized as the weight was.
    searched.load_state_dict(layer().state_dict())
    again = quantize_(layer(), mse)
    assert torch.equal(weight_of(searched).dequantize(), weight_of(again).dequantize())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "as JSON"),
        ("[]", "string 'kind'"),
        ('{"symmetric": true}', "string 'kind'"),
        ('{"kind": "int3"}', "no configuration kind is called 'int3'; known: .*int8_dynamic"),
        ('{"kind": "int8_dynamic"}', r"fields .*'symmetric'\], got \["),
        ('{"kind": "int8_dynamic", "symmetric": true, "bits": 8}', "fields"),
    ],
)
def test_refuses_other_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_json(text)


def test_a_kind_is_taken_once() -> None:
    with pytest.raises(ValueError, match="configuration kind called 'int8_dynamic' already"):

        class Second(QuantizeConfig, kind="int8_dynamic"):
            pass
