from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit.graph.evaluate import evaluate
from lowbit.graph.sensitivity import Sensitivity, sqnr
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


@pytest.mark.deep
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


NAMES = "one", "two", "three"


class Masked(nn.Module):
    """A norm with an outlier, an uneven weight, and a layer that reads what only fills."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in NAMES)
        with torch.no_grad():
            self.norm.weight[3] = 30
            self.one.weight *= torch.arange(1, 9)[:, None]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.two(torch.relu(self.one(self.norm(x))))
        return self.three(x + y) * mask[..., None]


@pytest.mark.deep
@pytest.mark.parametrize(
    "config",
    [
        StaticInt8Config(observer="percentile", observer_options={"percentile": 60.0}),
        StaticInt8Config(mask="mask"),
        StaticInt8Config(smooth=0.5),
        StaticInt8Config(equalize=True),
        StaticInt8Config(correct_bias=True),
        StaticInt8Config(weights="gptq", activations="int8"),
    ],
)
def test_layers_are_quantized_as_the_configuration_says(config: StaticInt8Config) -> None:
    """A layer alone is what `quantize_` makes of the model with all others in float."""
    torch.manual_seed(0)
    x, mask = torch.randn(6, 5, 8), torch.tensor([[1, 1, 1, 1, 0]] * 6)
    x[:, 4] *= 100
    model = Masked().eval()
    found = sensitivity(model, [(x, mask)], config=config)
    assert found != sensitivity(model, [(x, mask)])
    arrays = {"x": x.numpy(), "mask": mask.numpy()}
    exact = evaluate(to_graph(model, (x, mask)), arrays)
    for one in found:
        alone = replace(config, choices={n: "float" for n in NAMES if n != one.layer})
        made = quantize_(copy.deepcopy(model), alone, calibration=[(x, mask)])
        assert isinstance(made, CompiledModule)
        (got,), (wanted,) = (evaluate(made.graph, arrays).values(), exact.values())
        assert sqnr([{"y": got}], [{"y": wanted}]) == pytest.approx(one.sqnr, abs=0.3)


@pytest.mark.deep
def test_batches_of_several_lengths_that_ask_for_gradients() -> None:
    data = [torch.randn(3, length, 32).requires_grad_() for length in (4, 7)]
    assert {one.layer for one in sensitivity(uneven(), data)} == {"0", "2", "4"}
    assert set(mixed(uneven(), data, 10**6).values()) == {"float"}


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
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
