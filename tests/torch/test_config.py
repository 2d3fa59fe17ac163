from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    config_from_json,
)


@pytest.mark.parametrize(
    ("config", "content"),
    [
        (Int8DynamicConfig(), {"kind": "int8_dynamic", "symmetric": False}),
        (Int8DynamicConfig(symmetric=True), {"kind": "int8_dynamic", "symmetric": True}),
        (
            Int4WeightOnlyConfig(),
            {"kind": "int4_weight_only", "group_size": 128, "symmetric_weight": False},
        ),
        (
            Int4WeightOnlyConfig(group_size=None, symmetric_weight=True),
            {"kind": "int4_weight_only", "group_size": None, "symmetric_weight": True},
        ),
        (
            Int4DynamicConfig(group_size=8, symmetric=True),
            {
                "kind": "int4_dynamic",
                "group_size": 8,
                "symmetric": True,
                "symmetric_weight": False,
            },
        ),
    ],
)
def test_round_trip_through_json(config: QuantizeConfig, content: dict[str, Any]) -> None:
    text = config.to_json()
    assert json.loads(text) == content
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
        with pytest.raises(ValueError, match=f"positive multiple of 8, .* got {wrong}"):
            kind(group_size=wrong)
    with pytest.raises(TypeError, match="symmetric_weight must be True or False, got 0"):
        kind(symmetric_weight=0)
    with pytest.raises(ValueError, match="positive multiple of 8"):
        config_from_json(kind().to_json().replace("128", "20"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "as JSON"),
        ("[]", "string 'kind'"),
        ('{"symmetric": true}', "string 'kind'"),
        ('{"kind": "int3"}', "unknown configuration kind 'int3'; known: .*int8_dynamic"),
        ('{"kind": "int8_dynamic"}', r"fields \['symmetric'\], got \[\]"),
        ('{"kind": "int8_dynamic", "symmetric": true, "bits": 8}', "fields"),
    ],
)
def test_refuses_other_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_json(text)


def test_a_kind_is_taken_once() -> None:
    with pytest.raises(ValueError, match="taken by Int8DynamicConfig"):

        class Second(QuantizeConfig, kind="int8_dynamic"):
            pass
