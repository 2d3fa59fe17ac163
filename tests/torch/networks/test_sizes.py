from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lowbit.graph import load, save
from lowbit.graph.session import Session
from lowbit.torch import StaticInt8Config, compile, quantize_, to_graph


@pytest.mark.deep
def test_a_batch_that_a_model_fixes_stays_fixed(caplog: pytest.LogCaptureFixture) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(rows, 12) * 2

    caplog.set_level("INFO")
    for rows in (1, 3):
        assert to_graph(Fixed(), torch.randn(rows, 12)).tensors["x"].shape == (rows, 12)
    assert caplog.text.count("Fixed: the batch stays that of the example: ") == 2
    assert to_graph(nn.ReLU(), torch.randn(4, 3), batch=False).tensors["input"].shape == (4, 3)


@pytest.mark.parametrize("given", [{"x": 0}, {"x": 0, "y": 1}, (0, 1), (0, 1, 2)])
def test_the_batch_is_free_of_arguments_of_all_kinds(given: Any) -> None:
    class Taking(nn.Module):
        def forward(self, x: Tensor, *more: Tensor, y: Tensor | None = None) -> Tensor:
            return sum(more, x) if y is None else x - y

    given = pytree.tree_map(lambda _: torch.randn(2, 5), given)
    graph = to_graph(Taking(), given)
    assert {graph.tensors[name].shape for name in graph.inputs} == {("batch", 5)}


_OF_SIZES = {
    "float": lambda y, x: y * (1.0 / x.shape[0]),
    "power": lambda y, x: y * x.shape[0] ** -0.5,
    "sum": lambda y, x: y + x.shape[0] * 0.1,
    "tensor": lambda y, x: y / torch.tensor(x.shape[0]),
    "full": lambda y, x: y * torch.full((8,), x.shape[0]),
    "full_like": lambda y, x: y * torch.full_like(x, x.shape[0]),
    "clamp": lambda y, x: (y * 30).clamp(max=x.shape[0]),
    "alpha": lambda y, x: torch.add(y, x, alpha=x.shape[0]),
    "mask": lambda y, x: y * (torch.arange(x.shape[0]) < torch.tensor(x.shape[0] - 2))[:, None],
}


@pytest.mark.parametrize("name", _OF_SIZES)
def test_numbers_follow_from_the_batch_of_a_run(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return _OF_SIZES[name](self.layer(x), x)

    model = Scaled().eval()
    network = compile(model, torch.randn(3, 8))
    for batch in (3, 5):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(network(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.deep
def test_a_size_that_must_be_a_number_stays_that_of_the_example() -> None:
    """An attribute of a node, and a result."""
    weight = torch.randn(6, 3, 3, 3)

    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x.reshape(1, -1, 5, 5), weight, groups=x.shape[0])

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x * 2, x.shape[0]

    for model, shape in ((Grouped(), (2, 3, 5, 5)), (Counted(), (3, 8))):
        graph = to_graph(model, torch.randn(shape))
        assert graph.tensors[graph.inputs[0]].shape == shape

    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[1:])

    made = to_graph(Normed(), torch.randn(2, 6, 8), dynamic_shapes=True)
    assert made.tensors["x"].shape == ("batch", 6, 8)


_CHOOSING: dict[str, tuple[Callable[[Tensor], Tensor], set[int]]] = {
    "even": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x * 3, {2, 4, 8}),
    "half": (lambda x: x[: int(x.shape[0] / 2)] * 2, {4, 5}),
    "split": (lambda x: x.split(2)[-1] * 2, {4}),
    "tensor_split": (lambda x: x.tensor_split(2)[1] * 2, {2, 4, 8}),
    "all but one": (lambda x: x * 2 if x.shape[0] != 7 else x * 3, {1, 2, 4, 5, 8}),
    "small": (lambda x: x * 2 if x.numel() < 300 else x * 3, {1, 2, 4}),
    "squeeze": (lambda x: x.mean(1).squeeze() * 2, {2, 4, 5, 7, 8}),
    "pairs": (lambda x: x.view(x.shape[0] // 2, 2, -1) * 2, {2, 4, 8}),
    "scale": (lambda x: F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[0]), {4}),
    "larger half": (lambda x: x[: -(-x.shape[0] // 2)] * 2, {1, 2, 4, 5, 7, 8}),
    "odd number": (lambda x: x + (1 - x.shape[0]) // 2, {1, 2, 4, 5, 7, 8}),
    "remainder": (lambda x: x * (x.shape[0] % 3), {1, 2, 4, 5, 7, 8}),
    "a part": (lambda x: x[:3] + 1, {4, 5, 7, 8}),
    "lerp": (lambda x: torch.lerp(x, x.roll(1, 1).transpose(1, 2), 0.3), {1, 2, 4, 5, 7, 8}),
}


@pytest.mark.deep("lerp", "pairs")
@pytest.mark.parametrize("name", _CHOOSING)
def test_other_sizes_are_right_or_refused(name: str, tmp_path: Path) -> None:
    """Python's own choices by sizes, and PyTorch's, become conditions, which files keep."""
    function, served = _CHOOSING[name]

    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    network = compile(Choosing(), torch.randn(4, 8, 8))
    save(network.graph, tmp_path / "kept")
    again = Session(load(tmp_path / "kept"))
    for batch in (1, 2, 4, 5, 7, 8):
        x = torch.randn(batch, 8, 8)
        if batch in served:
            torch.testing.assert_close(network(x), function(x), rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(again(x.numpy()), network(x).numpy())
            continue
        with pytest.raises(ValueError, match=r"the network is (right where|for)|cannot reshape"):
            network(x)
        with pytest.raises(ValueError, match=r"the network is (right where|for)|cannot reshape"):
            again(x.numpy())


@pytest.mark.parametrize("wrong", [5, [["eq"]], [["eq", "nope", 1]], [["is", "batch", 1]], [{}]])
def test_damaged_conditions_are_refused(wrong: Any, tmp_path: Path) -> None:
    graph = to_graph(nn.ReLU(), torch.randn(2, 3))
    save(replace(graph, conditions=wrong), tmp_path / "kept")
    with pytest.raises(ValueError, match="does not hold together"):
        load(tmp_path / "kept")


@pytest.mark.deep
def test_a_bias_that_follows_from_the_input_is_added() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.linear(x, self.layer.weight, x.mean() * self.layer.bias))

    model, x = Biased().eval(), torch.randn(2, 3, 8)
    torch.testing.assert_close(compile(model, x)(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="a bias is served where it is a constant"):
        Session(to_graph(model, x))(x.numpy())


@pytest.mark.deep
def test_an_empty_batch_has_an_empty_result() -> None:
    for model, shape in (
        (nn.Sequential(nn.Linear(10, 8)), (4, 10)),
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8)), (4, 3, 9)),
    ):
        x = torch.randn(shape)
        assert compile(model.eval(), x)(x[:0]).shape == model(x[:0]).shape


class Reader(nn.Module):
    """Tokens and mask [batch, length], at most 20, to vectors [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(20, 8)
        self.mixed = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.mixed(x, x, x, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(x)))
        weights = mask[..., None].float()
        return (x * weights).sum(1) / weights.sum(1)


def _sentences(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.arange(length) <= torch.randint(length, (batch, 1))
    return torch.randint(50, (batch, length)), mask.long()


@pytest.mark.deep
@pytest.mark.parametrize("example", [(2, 7), (1, 5)])
def test_all_sizes_that_a_model_allows_are_free(example: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Reader().eval()
    graph = to_graph(model, _sentences(*example), dynamic_shapes=True)
    assert {graph.tensors[name].shape for name in graph.inputs} == {("batch", "tokens_1")}
    session = Session(graph, threads=1)
    for batch, length in ((3, 4), (1, 20), (2, 1)):
        inputs = _sentences(batch, length)
        with torch.no_grad():
            expected = model(*inputs)
        np.testing.assert_allclose(session(*(x.numpy() for x in inputs)), expected, atol=1e-5)
    with pytest.raises(ValueError, match="Gather 'places'"):
        session(*(x.numpy() for x in _sentences(1, 21)))


class Longer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 4 else x + 1


@pytest.mark.deep
def test_sizes_that_a_model_fixes_are_numbers_and_ranges_are_kept(tmp_path: Path) -> None:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4)).eval()
    for model, x, shape in (
        (nn.Linear(8, 5), torch.randn(2, 6, 8), ("batch", "input_1", 8)),
        (nn.LayerNorm(8), torch.randn(1, 6, 8), ("batch", "input_1", 8)),
        (convolution, torch.randn(2, 3, 9, 8), ("batch", 3, "input_2", "input_3")),
    ):
        graph = to_graph(model, x, dynamic_shapes=True)
        assert graph.tensors[graph.inputs[0]].shape == shape
        sizes = zip(x.shape[1:], shape[1:], strict=True)
        other = torch.randn(3, *(n + 3 if isinstance(one, str) else n for n, one in sizes))
        with torch.no_grad():
            np.testing.assert_allclose(Session(graph)(other.numpy()), model(other), atol=1e-5)
    save(to_graph(Longer(), torch.randn(2, 6), dynamic_shapes=True), tmp_path / "net")
    session = Session(load(tmp_path / "net"))
    np.testing.assert_array_equal(session(np.ones((1, 5), np.float32)), 2)
    with pytest.raises(ValueError, match="x_1 is 4; the network is for at least 5"):
        session(np.ones((1, 4), np.float32))


class Beside(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x], 1) + y


@pytest.mark.deep
def test_where_not_all_sizes_can_be_free_the_batch_is(caplog: pytest.LogCaptureFixture) -> None:
    graph = to_graph(nn.Upsample(scale_factor=2), torch.randn(2, 3, 4, 4), dynamic_shapes=True)
    assert graph.tensors["input"].shape == ("batch", 3, 4, 4)
    assert "only the batch is free: upsample_nearest2d" in caplog.text
    graph = to_graph(Beside(), (torch.randn(2, 3), torch.randn(2, 6)), dynamic_shapes=True)
    assert graph.tensors["y"].shape == ("batch", 6)
    length = torch.export.Dim("length", min=2)
    inputs, shapes = (torch.randn(2, 3), torch.randn(2, 6)), ({1: length}, {1: 2 * length})
    with pytest.raises(NotImplementedError, match=r"2\*"):
        to_graph(Beside(), inputs, dynamic_shapes=shapes)


@pytest.mark.deep
def test_sizes_as_torch_export_takes_them() -> None:
    length = torch.export.Dim("length", max=20)
    shapes = {"tokens": {1: length}, "mask": {1: length}}
    model = compile(Reader().eval(), _sentences(2, 7), dynamic_shapes=shapes)
    assert {model.graph.tensors[name].shape for name in model.graph.inputs} == {(2, "tokens_1")}
    assert model(*_sentences(2, 9)).shape == (2, 8)
    with pytest.raises(ValueError, match=r"tokens must have shape \[2, tokens_1\], got \[3, 9\]"):
        model(*_sentences(3, 9))


@pytest.mark.deep
def test_calibration_of_several_lengths_leaves_them_free() -> None:
    torch.manual_seed(0)
    model, batches = Reader().eval(), [_sentences(4, length) for length in (6, 9, 20)]
    exact = copy.deepcopy(model)
    quantize_(model, StaticInt8Config(), calibration=batches)
    for batch, length in ((1, 3), (5, 12)):
        inputs = _sentences(batch, length)
        with torch.no_grad():
            got, wanted = model(*inputs), exact(*inputs)
        assert float((got - wanted).abs().max()) < 0.1 * float(wanted.abs().max())
