from __future__ import annotations

import dataclasses
import json

import pytest

from lowbit.torch import Int8DynamicConfig, QuantizeConfig, config_from_json


@pytest.mark.parametrize("config", [Int8DynamicConfig(), Int8DynamicConfig(symmetric=True)])
def test_round_trip_through_json(config: Int8DynamicConfig) -> None:
    text = config.to_json()
    assert json.loads(text) == {"kind": "int8_dynamic", "symmetric": config.symmetric}
    assert config_from_json(text) == config


def test_is_frozen_and_checks_its_fields() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Int8DynamicConfig().symmetric = True  # type: ignore[misc]
    with pytest.raises(TypeError, match="symmetric must be True or False, got 1"):
        Int8DynamicConfig(symmetric=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "as JSON"),
        ("[]", "string 'kind'"),
        ('{"symmetric": true}', "string 'kind'"),
        ('{"kind": "int3"}', "unknown configuration kind 'int3'; known: int8_dynamic"),
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
