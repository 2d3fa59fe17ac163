"""Specifications that return several tensors, beside kernels and functions that write them all."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32, Int8

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from lowbit.spec import from_function, operation  # noqa: E402
from lowbit_lab import CheckResult, Scratch, check  # noqa: E402
from lowbit_lab.backends.backend import Request, Variant  # noqa: E402
from lowbit_lab.checks.cases import check_request  # noqa: E402


def ends(x: Float32[Tensor, "R C"]) -> tuple[Float32[Tensor, "R"], Float32[Tensor, "R"]]:
    return x.amax(-1), x.amin(-1)


@operation(excludes=("nan",))
def quantized(
    x: Float32[np.ndarray, "R C"],
) -> tuple[Int8[np.ndarray, "R C"], Float32[np.ndarray, "R"]]:
    scale = np.maximum(abs(x).max(-1), 1e-30) / 127
    return np.trunc(x / scale[:, None]), scale


@triton.jit
def of_rows(x_ptr, z0_ptr, z1_ptr, R, C, PAD: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    high = -float("inf")
    low = float("inf")
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + r * C + j, mask=j < C, other=-float("inf"))
        high = tl.maximum(high, tl.max(x, 0))
        y = tl.load(x_ptr + r * C + j, mask=j < C, other=PAD)
        low = tl.minimum(low, tl.min(y, 0))
    tl.store(z0_ptr + r, high)
    tl.store(z1_ptr + r, low)


@triton.jit
def to_bytes(x_ptr, q_ptr, scale_ptr, C, stride_x0, stride_q0, LONG: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LONG)
    x = tl.load(x_ptr + r * stride_x0 + j, mask=j < C, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / 127
    tl.store(scale_ptr + r, scale)
    tl.store(q_ptr + r * stride_q0 + j, (x / scale).to(tl.int8), mask=j < C)


@triton.jit
def copied(x_ptr, z_ptr, C):
    tl.store(z_ptr + tl.program_id(0), tl.load(x_ptr + tl.program_id(0) * C))


def few(kernel: Any, spec: Any, grid: Any = None, **given: Any) -> CheckResult:
    return check_request(
        Request(Variant(kernel, grid=grid, constants=given), spec), "cpu", few=True
    )


def each_row(meta: Any) -> tuple[int]:
    return (meta["R"],)


def test_each_result_is_an_operation() -> None:
    first = from_function(ends)
    (second,) = first.others
    assert [first.result.name, second.result.name] == ["z0", "z1"]
    assert [first.part, second.part] == [0, 1]
    assert [one.name for one in (*first.beside, *second.beside)] == ["z1", "z0"]
    x = np.array([[1, 2], [4, 3]], np.float32)
    assert first.reference(x).tolist() == [2, 4]
    assert second.reference(x).tolist() == [1, 3]


@pytest.mark.deep
def test_a_kernel_that_writes_both_is_right_and_proved() -> None:
    result = few(of_rows, ends, each_row, PAD=float("inf"))
    assert result.ok, str(result)
    pytest.importorskip("z3")
    assert set(result.bounds) == {"x_ptr", "z0_ptr", "z1_ptr"}
    assert all(said.endswith("proved") for said in result.bounds.values()), result.bounds


@pytest.mark.deep
def test_the_second_may_be_what_is_wrong() -> None:
    result = check(of_rows, ends, grid=each_row, device="cpu", stop=True, PAD=0.0)
    assert not result.ok
    assert result.findings[0].tensor == "z1"


def test_names_follow_the_order_and_have_strides() -> None:
    blocks = {"LONG": lambda sizes: triton.next_power_of_2(sizes["C"])}
    result = few(to_bytes, quantized, each_row, **blocks)
    wrong = [one for one in result.findings if one.severity == "error"]
    # A quotient next to an integer may be cut to the one below.
    assert not [one for one in wrong if one.tensor != "z0" or one.kind != "wrong-values"], wrong


def test_too_few_pointers_are_named() -> None:
    with pytest.raises(ValueError, match="returns 2 tensors; name the parameters z0_ptr, z1_ptr"):
        check(copied, ends, grid=each_row, device="cpu")


def launched(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    high, low = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device)
    of_rows[(rows,)](x.contiguous(), high, low, rows, x.shape[1], float("inf"), 32)
    return high, low


@pytest.mark.deep
def test_functions_return_them_in_order() -> None:
    result = few(launched, ends)
    assert result.ok, str(result)
    result = check(lambda x: launched(x)[::-1], ends, device="cpu", stop=True)
    assert result.kinds == ("wrong-values",)
    result = check(lambda x: launched(x)[0], ends, device="cpu", stop=True)
    assert "must return 2 tensors, as ends does" in result.findings[0].message


def doubled(x: Float32[Tensor, "R C"]) -> Float32[Tensor, "R C"]:
    return 2 * x


@triton.jit
def by_scratch(x_ptr, z_ptr, part_ptr, R, C, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    for start in range(0, C, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + r.to(tl.int64) * C + j, mask=j < C)
        tl.store(part_ptr + r * C + j, x, mask=j < C)
        tl.store(z_ptr + r.to(tl.int64) * C + j, 2 * x, mask=j < C)


def test_offsets_into_scratch_are_looked_at() -> None:
    scratch = Scratch("float32", "R C")
    result = few(by_scratch, doubled, each_row, part_ptr=scratch)
    assert result.ok, str(result)
    assert any("offsets wrap" in note and "part_ptr" in note for note in result.notes), result.notes
