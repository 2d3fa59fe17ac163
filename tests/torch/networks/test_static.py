from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowbit.torch
from lowbit.graph.session import Session
from lowbit.numerics import QTensor
from lowbit.torch import (
    CompiledModule,
    Int8DynamicConfig,
    StaticInt8Config,
    compile,
    convert,
    prepare,
    quantize_,
)

Build = Callable[[str], tuple[nn.Module, Callable[[int], Any]]]


def sqnr(got: Any, expected: Any) -> float:
    """Of the first leaf, in decibels."""
    got, expected = (pytree.tree_leaves(each)[0].double() for each in (got, expected))
    return 10 * math.log10(expected.square().mean() / (got - expected).square().mean())


def called(model: nn.Module, inputs: Any) -> Any:
    with torch.no_grad():
        return model(*inputs)


def static(
    model: nn.Module, calibration: list[Any], config: StaticInt8Config | None = None, *more: Any
) -> CompiledModule:
    made = quantize_(model, config or StaticInt8Config(), *more, calibration=calibration)
    assert made is model
    assert isinstance(made, CompiledModule)
    return made


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1)).eval()


# The least SQNR that is to be had, some decibels below what was measured.
LEAST = {
    "residual": 38, "mobile": 46, "unet": 29, "volumes": 45, "vision": 32, "language": 37,
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("name", LEAST)
def test_a_network_in_8_bits_is_close(build: Build, name: str) -> None:
    model, inputs = build(name)
    x = inputs(8)
    expected = called(model, x)
    made = static(model, [inputs(8), inputs(5)])
    assert not list(made.parameters())
    assert sqnr(called(made, x), expected) > LEAST[name]
    assert {one.choice for one in made.report if one.op in ("Conv", "Linear")} == {"int8"}
    assert pytree.tree_structure(called(made, x)) == pytree.tree_structure(expected)


@pytest.mark.deep
def test_formats(build: Build) -> None:
    """Between the first layer and the last everything is in 8 bits, and neither ends are."""
    model, inputs = build("residual")
    graph = static(model, [inputs(4)]).graph
    kept = {name for name, one in graph.tensors.items() if one.scale is not None}
    values = {value for node in graph.nodes for value in node.outputs}
    assert values - kept == set(graph.outputs)
    assert graph.tensors["x"].scale is None
    for node in graph.nodes:
        if node.op == "MaxPool":
            assert graph.tensors[node.inputs[0]] == graph.tensors[node.outputs[0]]
        if node.op in ("Conv", "Linear"):
            weight = graph.constants[node.inputs[1]]
            assert isinstance(weight, QTensor)
            assert (weight.format.name, weight.axis) == ("int8", 0)
            assert not weight.zero_point.any()
            assert isinstance(graph.constants[node.inputs[2]], np.ndarray)


@pytest.mark.deep
def test_concatenated_values_share_a_format(build: Build) -> None:
    model, inputs = build("unet")
    graph = static(model, [inputs(2)]).graph
    (node,) = (one for one in graph.nodes if one.op == "Concat")
    tensors = [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
    formats = {(one.scale, one.zero_point) for one in tensors}
    assert len(formats) == 1


@pytest.mark.deep("config0", "config3", "config4")
@pytest.mark.parametrize(
    "config",
    [
        StaticInt8Config(observer="percentile", observer_options={"percentile": 99.99}),
        StaticInt8Config(observer="mse", weight_range="mse"),
        StaticInt8Config(weights="gptq"),
        StaticInt8Config(activations="int8", symmetric=True),
        StaticInt8Config(linear="dynamic"),
    ],
)
def test_ways_to_quantize(config: StaticInt8Config) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(tiny(), nn.Flatten(), nn.Linear(16, 12), nn.LayerNorm(12)).eval()
    model.append(nn.Linear(12, 4))
    x = torch.randn(32, 3, 4, 4)
    expected = called(model, (x,))
    made = static(model, [x], config)
    assert sqnr(called(made, (x,)), expected) > 28
    kinds = {one.dtype for one in made.graph.tensors.values() if one.scale is not None}
    assert kinds == {config.activations}
    choices = {one.choice for one in made.report if one.op == "Linear"}
    assert choices == {"dynamic" if config.linear == "dynamic" else "int8"}


@pytest.mark.deep
def test_two_steps_leave_the_model_as_it_is(build: Build) -> None:
    model, inputs = build("mobile")
    x = inputs(3)
    state = copy.deepcopy(model.state_dict())
    prepared = prepare(model, StaticInt8Config(), inputs(1))
    expected = called(model, x)
    torch.testing.assert_close(called(prepared, x), expected, rtol=1e-4, atol=1e-5)
    called(prepared, inputs(2))
    assert "2 batches seen" in repr(prepared)
    made = convert(prepared)
    assert sqnr(called(made, x), expected) > LEAST["mobile"]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(called(model, x), expected)


@pytest.mark.deep
def test_layers_that_are_left_out(build: Build) -> None:
    model, inputs = build("residual")

    def inner(module: nn.Module, name: str) -> bool:
        return name not in ("stem.0.0", "head")

    made = static(model, [inputs(2)], None, inner)
    choices = {one.node: (one.choice, one.why) for one in made.report}
    assert choices["stem.0.0"] == choices["head"] == ("float", "asked for")
    assert choices["first.one.0"] == ("int8", "by default")
    weights = {node.name: made.graph.constants[node.inputs[1]] for node in made.graph.nodes
               if node.op in ("Conv", "Linear")}  # fmt: skip
    assert {n for n, one in weights.items() if isinstance(one, np.ndarray)} == {"stem.0.0", "head"}


def _hook(*_: Any) -> None:
    return


@pytest.mark.deep
def test_a_copy_shares_the_graph_and_is_pickled(build: Build) -> None:
    model, inputs = build("residual")
    model.register_forward_hook(_hook)
    setattr(model, "note", {"kept": 1})  # noqa: B010
    made = static(model, [inputs(2)])
    other = copy.deepcopy(made)
    assert other is not made
    for one in (other, pickle.loads(pickle.dumps(made))):
        assert one.note == made.note
        assert one.note is not made.note
        assert len(one._forward_hooks) == 1
    assert other.graph is made.graph
    x = inputs(2)
    assert torch.equal(called(other, x), called(model, x))
    assert torch.equal(called(pickle.loads(pickle.dumps(model)), x), called(model, x))
    assert "7 int8" in repr(model)
    assert not model.train().state_dict()


@pytest.mark.deep
def test_what_a_compiled_network_is_asked_as_a_model(build: Build, tmp_path: Path) -> None:
    model, inputs = build("residual")
    static(model, [inputs(2)])
    found = lowbit.torch.summary(nn.Sequential(model)).layers
    assert [one.quantized for one in found] == [True] * 7
    assert {one.layer for one in found} == {"Conv", "Linear"}
    assert all(one.name.startswith("0.") for one in found)
    assert sum(one.bytes_after for one in found) < sum(one.bytes_before for one in found) / 2
    with pytest.raises(TypeError, match=r"lowbit\.graph\.save"):
        lowbit.torch.save(nn.Sequential(model), tmp_path / "model.safetensors")
    for again in (lowbit.torch.compile, lowbit.torch.to_graph):
        with pytest.raises(TypeError, match="compiled already"):
            again(model, inputs(2))


class Shared(nn.Module):
    """A layer that is called twice, with inputs of other ranges, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.other.weight = self.one.weight
        self.words = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.one(x))
        z = self.other(self.one(y * 50))
        return nn.functional.linear(z.mean((2, 3)), self.words.weight)


@pytest.mark.deep
def test_shared_weights_stay_one(build: Build) -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    x = torch.randn(4, 4, 8, 8)
    expected = called(model, (x,))
    made = static(model, [x], StaticInt8Config(weights="gptq"))
    convs = [node for node in made.graph.nodes if node.op == "Conv"]
    assert len(convs) == 3
    assert len({node.inputs[1] for node in convs}) == 1
    inputs = {made.graph.tensors[node.inputs[0]].scale for node in convs}
    assert len(inputs) == 3
    assert sqnr(called(made, (x,)), expected) > 27


@pytest.mark.deep
def test_part_of_a_model(build: Build) -> None:
    """References to a module that is quantized stay good."""
    model, inputs = build("residual")
    whole = nn.Sequential(model, nn.Softmax(-1)).eval()
    assert static(model, [inputs(2)]) is whole[0]
    assert called(whole, inputs(3)).shape == (3, 10)


@pytest.mark.deep
def test_compiled_float_and_quantized_layers(build: Build) -> None:
    model, inputs = build("vision")
    x = inputs(3)
    made = compile(model, inputs(1))
    torch.testing.assert_close(called(made, x), called(model, x), rtol=1e-4, atol=1e-4)
    quantize_(model, Int8DynamicConfig(), lambda module, name: "self_attn" not in name)
    made = compile(model, inputs(1))
    torch.testing.assert_close(called(made, x), called(model, x), rtol=1e-3, atol=1e-3)
    kept = [node.get("activations") for node in made.graph.nodes if node.op == "Linear"]
    assert kept.count("dynamic") == 5


@pytest.mark.deep
def test_what_calibration_refuses() -> None:
    model, config, x = tiny(), StaticInt8Config(), torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"needs data: pass calibration=\[batch, \.\.\.\]"):
        quantize_(model, config)
    for one, kind in ((x, "Tensor"), ({"x": x}, "dict")):
        with pytest.raises(TypeError, match=rf"calibration is a {kind}; give batches"):
            quantize_(model, config, calibration=one)
    with pytest.raises(ValueError, match="no data to calibrate with"):
        quantize_(model, config, calibration=[])
    with pytest.raises(ValueError, match="no data to calibrate with"):
        convert(prepare(model, config, x))
    bad = x.clone()
    bad[1, 2, 3, 0] = math.nan
    with pytest.raises(ValueError, match=r"'input': .* found nan at index \(1, 2, 3, 0\)"):
        quantize_(model, config, calibration=[x, bad])
    several = (torch.randn(2, 3, size, 4) for size in (4, 5))
    with pytest.raises(ValueError, match=r"got \[2, 3, 5, 4\]: .* as a list of all batches"):
        quantize_(model, config, calibration=several)
    assert not isinstance(model, CompiledModule)
    with pytest.raises(ValueError, match="calibration is for StaticInt8Config"):
        quantize_(model, Int8DynamicConfig(), calibration=[x])
    with pytest.raises(ValueError, match="nothing to quantize in this ReLU, which has no"):
        quantize_(nn.ReLU(), config, calibration=[x])
    with pytest.raises(ValueError, match=r"Conv 0: asked for; float +Conv 2: asked for"):
        quantize_(model, config, lambda *_: False, calibration=[x])


@pytest.mark.deep
def test_what_only_fills_is_not_calibrated_with() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) * mask[..., None]

    torch.manual_seed(1)
    model = Masked().eval()
    x, mask = torch.randn(5, 4, 8), torch.tensor([[1, 1, 1, 0]] * 5)
    x[:, 3] = 1000
    expected = called(model, (x, mask))
    for config in (StaticInt8Config(mask="mask"), StaticInt8Config(mask="mask", weights="gptq")):
        made = static(copy.deepcopy(model), [(x, mask)], config)
        assert sqnr(called(made, (x, mask)), expected) > 30
    made = static(copy.deepcopy(model), [(x, mask)])
    assert sqnr(called(made, (x, mask)), expected) < 10
    with pytest.raises(ValueError, match="no input is called 'masks', which mask names; known: x"):
        static(model, [(x, mask)], StaticInt8Config(mask="masks"))


def test_one_sample_and_constant_values() -> None:
    """One sample is a range like any other; a value that is always 0 has the scale 1."""
    model = tiny()
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    static(model, [torch.zeros(1, 3, 2, 2)])
    assert torch.equal(called(model, (torch.ones(1, 3, 2, 2),)), torch.zeros(1, 1, 2, 2))


def test_weights_that_cannot_be_quantized_stay() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2)).eval()
    with torch.no_grad():
        layer.weight[1, 1] = math.inf
    made = static(model, [torch.zeros(1, 3)], StaticInt8Config(linear="dynamic"))
    assert [(one.choice, one.why) for one in made.report] == [
        ("float", "its weight holds NaN or infinity"),
        ("dynamic", "asked for"),
    ]


def test_what_a_call_refuses() -> None:
    x = torch.randn(2, 3, 4, 4)
    made = compile(tiny(), x)
    with pytest.raises(TypeError, match=r"'input' is torch\.float64; give torch\.float32"):
        made(x.double())
    with pytest.raises(TypeError, match=r"'input' is a ndarray; give a torch\.Tensor"):
        made(x.numpy())
    with pytest.raises(TypeError, match="nested as"):
        made((x,))
    with pytest.raises(TypeError, match="argument"):
        made(x, x)
    with pytest.raises(ValueError, match="asks for a gradient"):
        made(x.requires_grad_())
    with pytest.raises(ValueError, match="is on meta; a network runs on the CPU"):
        made(x.to("meta"))


def test_configurations_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown observer 'max'; pass .*'minmax' or"):
        StaticInt8Config(observer="max")
    with pytest.raises(ValueError, match="unknown weights 'awq'; pass 'nearest' or 'gptq'"):
        StaticInt8Config(weights="awq")
    with pytest.raises(TypeError, match="symmetric must be True or False"):
        StaticInt8Config(symmetric=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="smooth must be None or from 0 to 1, got 2"):
        StaticInt8Config(smooth=2)


@pytest.mark.deep
def test_methods_that_need_data_or_change_weights(build: Build) -> None:
    """All of them together: the network is prepared as the same function, and converted closer."""
    model, inputs = build("vision")
    x = inputs(6)
    expected = called(model, x)
    config = StaticInt8Config(weights="gptq", equalize=True, smooth=0.5, correct_bias=True)
    prepared = prepare(model, config, inputs(1))
    torch.testing.assert_close(called(prepared, x), expected, rtol=1e-3, atol=1e-4)
    made = convert(prepared)
    assert sqnr(called(made, x), expected) > LEAST["vision"]
    assert torch.equal(called(convert(prepared), x), called(made, x))


def test_operators_without_kernels_are_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is right all the same."""

    def run(self: Session, **arrays: Any) -> Any:
        raise NotImplementedError("no kernel serves the operators Odd")

    monkeypatch.setattr(Session, "run", run)
    model, x = tiny(), torch.randn(2, 3, 4, 4)
    made = compile(model, x)
    torch.testing.assert_close(called(made, (x,)), called(model, (x,)), rtol=1e-5, atol=1e-6)
    called(made, (x,))
    assert caplog.text.count("slow: no kernel serves the operators Odd") == 1
