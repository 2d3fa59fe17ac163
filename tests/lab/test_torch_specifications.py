"""Specifications that are functions of torch, as exercises have them, taken as they stand."""

# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from jaxtyping import Float32, Int32

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from lowbit_lab import check  # noqa: E402


def softmax(x: Float32[Tensor, "N0 T"]) -> Float32[Tensor, "N0 T"]:
    largest = x.max(1, keepdim=True)[0]
    e = (x - largest).exp()
    return e / e.sum(1, keepdim=True)


def gathered(x: Float32[Tensor, "4 200"]) -> Float32[Tensor, "4"]:
    return torch.sum(torch.relu(x), dim=1)


def places(x: Float32[Tensor, "N0 T"]) -> Int32[Tensor, "N0"]:
    return torch.argmax(x, dim=1).to(torch.int32)


@triton.jit
def softmax_kernel(x_ptr, z_ptr, N0, T, SHIFT: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    at = tl.program_id(0) * T + j
    x = tl.load(x_ptr + at, mask=j < T, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0)) if SHIFT else tl.exp(x)
    tl.store(z_ptr + at, e / tl.sum(e, axis=0), mask=j < T)


@triton.jit
def sum_kernel(x_ptr, z_ptr, T, B: tl.constexpr):
    total = tl.zeros((B,), tl.float32)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
        total += tl.where(x <= 0, 0.0, x)
    tl.store(z_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def places_kernel(x_ptr, z_ptr, N0, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=-float("inf"))
    tl.store(z_ptr + tl.program_id(0), tl.argmax(x, axis=0))


def _rows(sizes: Any) -> int:
    return sizes["N0"]


def _whole(sizes: Any) -> int:
    return triton.next_power_of_2(sizes["T"])


@pytest.mark.deep
@pytest.mark.parametrize("shift", [True, False])
def test_softmax(shift: bool) -> None:
    result = check(softmax_kernel, softmax, grid=_rows, B=_whole, SHIFT=shift, device="cpu")
    assert result.ok is shift, result


def test_fixed_sizes_are_one_case() -> None:
    assert check(sum_kernel, gathered, grid=4, T=200, device="cpu")


@pytest.mark.deep
def test_places() -> None:
    assert check(places_kernel, places, grid=_rows, B=_whole, device="cpu")
