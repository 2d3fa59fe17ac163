"""Masked loads of one element, with and without a value for a lane that is masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Bool, Float32, Int32

from lowbit.spec import Case, from_function
from lowbit_lab.backends.backend import Request, Variant, Way
from lowbit_lab.backends.language import bound
from lowbit_lab.run.outcome import Run, Trial

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


def runs(kernel: Any, spec: Any, constants: Mapping[str, Any], size: int = 20) -> list[Run]:
    """The kernel with zeros in undefined lanes, and with poison."""
    request = Request(Variant(kernel, grid=blocks, constants=constants), from_function(spec))
    subject = bound(request)
    trial = Trial.of(Case(subject.operation, {"N": size}), 0)
    return [subject.run(trial, Way(poisoned=poisoned)) for poisoned in (False, True)]


def defined(several: list[Run]) -> bool:
    """Whether the kernel is right, and no lane of a load is undefined."""
    return all(
        not (run.crash or run.memory.findings or run.wrong.any() or run.memory.undefined)
        for run in several
    )


def before_blocks(x: Any, first: Any) -> Any:
    """For each element the last one of the block of 8 before, `first` for the first block."""
    block = np.arange(len(x)) // 8
    return np.where(block > 0, x[np.maximum(block * 8 - 1, 0)], first)


def plus_before(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + before_blocks(x, 0)


def plus_before_or_seven(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + before_blocks(x, 7)


def plus_before_or_first(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + before_blocks(x, x[0])


def integer_plus_before(x: Int32[np.ndarray, "N"]) -> Int32[np.ndarray, "N"]:
    return (x + before_blocks(x, 0) + 2**31) % 2**32 - 2**31


def either_before(x: Bool[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
    return x | before_blocks(x, False)


@triton.jit
def of_a_scalar(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    before = tl.load(x_ptr + p * B - 1, mask=p > 0, other=OTHER)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) + before, mask=i < N)


@triton.jit
def of_a_block_of_one(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    at = p * B - 1 + tl.arange(0, 1)
    before = tl.load(x_ptr + at, mask=at >= 0, other=OTHER)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) + before, mask=i < N)


@triton.jit
def of_a_plane_of_one(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)[None, :]
    at = p * B - 1 + tl.zeros((1, 1), tl.int32)
    before = tl.load(x_ptr + at, mask=p > 0, other=OTHER)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) + before, mask=i < N)


@triton.jit
def by_a_helper(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    before = before_block(x_ptr, p, OTHER, B)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) + before, mask=i < N)


@triton.jit
def before_block(x_ptr, p, OTHER: tl.constexpr, B: tl.constexpr):
    return tl.load(x_ptr + p * B - 1, mask=p > 0, other=OTHER)


@triton.jit
def of_bools(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    before = tl.load(x_ptr + p * B - 1, mask=p > 0, other=OTHER)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) | before, mask=i < N)


@triton.jit
def by_a_tensor(x_ptr, z_ptr, N, OTHER: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    first = tl.load(x_ptr) if OTHER else p.to(tl.float32)  # of program 0, whose load is masked
    before = tl.load(x_ptr + p * B - 1, mask=p > 0, other=first)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0) + before, mask=i < N)


@pytest.mark.parametrize(
    ("kernel", "spec", "other"),
    [
        (of_a_scalar, plus_before, 0.0),
        (of_a_scalar, plus_before, 0),
        (of_a_scalar, plus_before, -0.0),
        (of_a_scalar, plus_before_or_seven, 7),
        (of_a_scalar, integer_plus_before, 0),
        (of_a_scalar, integer_plus_before, False),
        (of_a_block_of_one, plus_before, 0.0),
        (of_a_block_of_one, plus_before_or_seven, 7.0),
        (of_a_plane_of_one, plus_before, 0),
        (by_a_helper, plus_before, 0.0),
        (of_bools, either_before, 0),
        (of_bools, either_before, False),
        (by_a_tensor, plus_before, False),
        (by_a_tensor, plus_before_or_first, True),
    ],
)
def test_a_masked_lane_has_the_value_that_other_gives(kernel: Any, spec: Any, other: Any) -> None:
    assert defined(runs(kernel, spec, {"OTHER": other, "B": 8}))


@pytest.mark.parametrize("kernel", [of_a_scalar, of_a_block_of_one, of_a_plane_of_one, by_a_helper])
def test_without_other_it_has_none(kernel: Any) -> None:
    plain, poisoned = runs(kernel, plus_before, {"OTHER": None, "B": 8})
    assert len(plain.memory.undefined) == 1
    assert not plain.wrong.any(), "zeros are what an interpreter happens to give"
    assert poisoned.wrong.any()


def test_another_value_than_the_specification_has_is_wrong() -> None:
    assert runs(of_a_scalar, plus_before, {"OTHER": 7.0, "B": 8})[0].wrong.any()
    assert runs(of_a_scalar, plus_before_or_seven, {"OTHER": 0.0, "B": 8})[0].wrong.any()
