from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowbit.graph.sensitivity import Sensitivity
from lowbit.graph.sensitivity import mixed as chosen
from lowbit.numerics import QTensor
from lowbit.torch import (
    CompiledModule,
    StaticInt8Config,
    mixed,
    quantize_,
    sensitivity,
    to_graph,
)

pytestmark = pytest.mark.slow

Build = Callable[[str], tuple[nn.Module, Callable[[int], Any]]]


def uneven() -> nn.Module:
    """A network whose second layer has an outlier in its weight that spoils a row of it."""
    torch.manual_seed(4)
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)]
    spoilt = layers[2]
    assert isinstance(spoilt, nn.Linear)
    with torch.no_grad():
        spoilt.weight[:, 5] *= 300
    first = layers[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():  # and whose inputs of that column are 0
        first.weight[5] = 0
        first.bias[5] = 0
    return nn.Sequential(*layers).eval()


def test_the_worst_layer_comes_first() -> None:
    data = [torch.randn(16, 32), torch.randn(7, 32)]
    model = uneven()
    found = sensitivity(model, data)
    assert found[0].layer == "2"
    assert {one.layer for one in found} == {"0", "2", "4"}
    assert found[0].sqnr < 15 < 30 < found[1].sqnr
    sizes = {one.layer: one.nbytes for one in found}
    assert sizes == {"0": 32 * 36, "2": 32 * 36, "4": 8 * 36}
    arrays = [{"input": one.numpy()} for one in data]
    assert sensitivity(to_graph(model, data[0]), arrays) == found


def test_budgets() -> None:
    model, data = uneven(), [torch.randn(16, 32)]
    least, all_8_bits, whole = 32 * 72 // 2 + 72 * 5, 72 * 36, 72 * 32 * 4
    assert set(mixed(model, data, whole).values()) == {"float"}
    assert set(mixed(model, data, least).values()) == {"int4"}
    some = mixed(model, data, all_8_bits + 3 * 32 * 32)
    assert some["2"] == "float"
    with pytest.raises(ValueError, match=f"too small: the layers take {least:,} at least"):
        mixed(model, data, least - 1)
    made = quantize_(model, StaticInt8Config(choices=some), calibration=data)
    assert isinstance(made, CompiledModule)
    assert {one.node: one.choice for one in made.report} == some
    for node in made.graph.nodes:
        if node.op == "Linear":
            weight = made.graph.constants[node.inputs[1]]
            kind = {"int4": "uint4", "int8": "int8"}.get(some[node.name])
            assert (weight.format.name if isinstance(weight, QTensor) else None) == kind


def test_choices_are_the_best_of_all() -> None:
    """Of some layers, compared with every combination, where the greedy way can be exact."""
    rng = np.random.default_rng(0)
    found: list[Sensitivity] = []
    for layer in "abcd":
        found.append(Sensitivity(layer, "int4", rng.uniform(10, 20), 1))
        found.append(Sensitivity(layer, "int8", rng.uniform(30, 40), 2))
        found.append(Sensitivity(layer, "float", math.inf, 8))
    noise = {(one.layer, one.choice): one.noise for one in found}
    for extra in range(5):
        made = chosen(found, 4 + extra)
        worst = sorted("abcd", key=lambda layer: -noise[layer, "int4"] + noise[layer, "int8"])
        assert {layer for layer, one in made.items() if one == "int8"} == set(worst[:extra])


def test_convolutions_and_a_layer_called_twice(build: Build) -> None:
    model, inputs = build("residual")
    found = sensitivity(model, [inputs(2)], ("int4", "int8", "float"))
    kinds = {name: {one.choice for one in found if one.layer == name} for name in ("head",)}
    assert kinds == {"head": {"int4", "int8", "float"}}
    assert {one.choice for one in found if one.layer == "stem.0.0"} == {"int8", "float"}
    assert all(math.isinf(one.sqnr) for one in found if one.choice == "float")
    layer = nn.Linear(6, 6)
    (twice,) = sensitivity(nn.Sequential(layer, nn.ReLU(), layer), [torch.randn(3, 6)])
    assert twice.layer == "0"


def test_what_is_refused() -> None:
    model, x = uneven(), torch.randn(2, 32)
    with pytest.raises(ValueError, match="no data"):
        sensitivity(model, [])
    with pytest.raises(ValueError, match="found nan"):
        sensitivity(model, [torch.full((2, 32), math.nan)])
    with pytest.raises(ValueError, match=r"no layer is called 1; known: \['0', '2', '4'\]"):
        quantize_(model, StaticInt8Config(choices={"1": "float"}), calibration=[x])
    with pytest.raises(ValueError, match="unknown choice 'int2' for '0'; pass 'int8' or"):
        StaticInt8Config(choices={"0": "int2"})  # pyright: ignore[reportArgumentType]
