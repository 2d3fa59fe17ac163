"""What torch.export gives that a graph has no place for, and what it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.export import Dim  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lowbit.torch import compile, to_graph  # noqa: E402


class Of(torch.nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Shorter(torch.nn.Module):
    def forward(self, a: Any, b: Any) -> Any:
        return (a[:, 1:] * b).sum(-1)


@pytest.mark.parametrize("shapes", ["derived", True])
def test_a_size_may_follow_from_another(shapes: Any) -> None:
    short = Dim("short", min=2, max=100)
    wanted = ({1: short + 1}, {1: short}) if shapes == "derived" else True
    model, a, b = Shorter().eval(), torch.randn(2, 9), torch.randn(2, 8)
    compiled = compile(model, (a, b), dynamic_shapes=wanted)
    for count in (9, 12, 33):
        a, b = torch.randn(2, count), torch.randn(2, count - 1)
        torch.testing.assert_close(compiled(a, b), model(a, b))
    with pytest.raises(ValueError, match="_1"):
        compiled(torch.randn(2, 12), torch.randn(2, 12))


POOLS: dict[str, Callable[[Any], Any]] = {
    "1": lambda x: F.max_pool1d(x[0], 2, return_indices=True),
    "2": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]),
    "3": lambda x: F.max_pool3d(x[None], 2, return_indices=True)[1],
    "adaptive": lambda x: sum(F.adaptive_max_pool2d(x, 2, return_indices=True)),
}


@pytest.mark.parametrize("name", POOLS)
def test_indices_of_pools_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"max_(un)?pool"):
        to_graph(Of(POOLS[name]), torch.randn(2, 4, 8, 8))


@pytest.mark.parametrize("name", ["inv", "cholesky", "inv_ex"])
def test_operators_with_effects_are_refused_by_name(name: str) -> None:
    function = getattr(torch.linalg, name)
    with pytest.raises(NotImplementedError, match=f"linalg_{name.removesuffix('_ex')}"):
        to_graph(Of(lambda x: function(x @ x.mT + torch.eye(3))), torch.randn(2, 3, 3))


def test_all_that_export_explains_is_said() -> None:
    def fixes(x: Any) -> Any:
        return x.view(x.shape[0], 8, -1) if x.shape[1] == 16 else x

    with pytest.raises(RuntimeError, match=r"(?s)specialized it to be a constant \(16\).*q = 16"):
        to_graph(Of(fixes), torch.randn(2, 16), dynamic_shapes=(({1: Dim("q", min=2)},),))


@pytest.mark.parametrize("within", [True, False])
def test_models_and_examples_made_in_inference_mode(within: bool) -> None:
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 3)
        model = torch.nn.Sequential(layer, torch.nn.BatchNorm1d(3), torch.nn.ReLU()).eval()
        x = torch.randn(2, 4)
    weight = layer.weight
    with torch.inference_mode(within):
        compiled = compile(model, x)
    assert layer.weight is weight
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
