"""What a specification can state: sizes in the reference, size 0; and memory of a kernel's own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

from lowbit.spec import cases_of, edge_cases, fill_cases, from_function, operation
from lowbit_lab import Scratch, check, view

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def ramp(x: Float32[np.ndarray, "N"], M: int) -> Float32[np.ndarray, "N M"]:
    return x[:, None] + np.arange(M)


@triton.jit
def ramp_rows(x_ptr, z_ptr, N, M, FIRST: tl.constexpr, B: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    for start in range(0, M, B):
        j = start + tl.arange(0, B)
        tl.store(z_ptr + tl.program_id(0) * M + j, x + (j + FIRST), mask=j < M)


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


@pytest.mark.deep
def test_a_reference_is_given_sizes() -> None:
    assert check(ramp_rows, ramp, grid=rows, FIRST=0, device="cpu", stop=True)


def test_a_wrong_kernel_of_such_a_reference() -> None:
    result = check(ramp_rows, ramp, grid=rows, FIRST=1, device="cpu", stop=True)
    assert result.kinds == ("wrong-values",)


def test_a_size_that_there_is_not_is_refused() -> None:
    def of_nothing(x: Float32[np.ndarray, "N"], K: int) -> Float32[np.ndarray, "N"]:
        return x + K

    with pytest.raises(ValueError, match=r"K is annotated int.* N;"):
        from_function(of_nothing)


@operation(summed=("T",), at_least={"N": 0, "T": 0})
def totals(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@triton.jit
def sum_of_rows(x_ptr, z_ptr, N, T, EARLY: tl.constexpr, B: tl.constexpr):
    if not EARLY or T > 0:
        total = tl.zeros((B,), tl.float32)
        for start in range(0, T, B):
            j = start + tl.arange(0, B)
            total += tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
        tl.store(z_ptr + tl.program_id(0), tl.sum(total, axis=0))


@pytest.mark.deep
def test_size_0_is_tried_where_a_specification_has_it() -> None:
    assert check(sum_of_rows, totals, grid=rows, EARLY=False, device="cpu", stop=True)
    result = check(sum_of_rows, totals, grid=rows, EARLY=True, device="cpu", stop=True)
    assert result.kinds == ("unwritten",)
    assert result.findings[0].sizes is not None
    assert result.findings[0].sizes["T"] == 0


def test_size_0_is_refused_where_it_has_not() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        from_function(ramp).case({"N": 0, "M": 3})


@operation(at_least={"E": 2}, exercise={"N": 9, "E": 5})
def second(x: Float32[np.ndarray, "N E"]) -> Float32[np.ndarray, "N"]:
    return x[:, 1]


@triton.jit
def takes_the_second(x_ptr, z_ptr, N, E, WRONG_FROM: tl.constexpr, B: tl.constexpr):
    n = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + n * E + 1, mask=n < N)
    tl.store(z_ptr + n, tl.where(E < WRONG_FROM, x, 0.0), mask=n < N)


def test_all_sizes_are_at_least_what_a_specification_says() -> None:
    for strided in (False, True):
        cases = cases_of(second, (32,), strided, long=True)
        assert {case.sizes["E"] for case in cases} >= {2, 5, 31, 32, 33}
        assert min(case.sizes["E"] for case in cases) == 2
        assert min(case.sizes["N"] for case in cases) == 1
    assert min(case.sizes["E"] for case in (*edge_cases(second), *fill_cases(second))) == 2
    stepped = operation(at_least={"E": 5}, multiple_of={"E": 4})(second.reference)
    assert {case.sizes["E"] for case in cases_of(stepped, (8,), False, long=False)} >= {8, 12}
    assert stepped.fitted({"N": 3, "E": 1}) == {"N": 3, "E": 8}


def test_a_least_size_in_a_check_and_in_a_view() -> None:
    few = {"stop": True, "device": "cpu", "grid": blocks_of_n}
    result = check(takes_the_second, second, WRONG_FROM=2, **few)
    assert result.kinds == ("wrong-values",)
    assert result.viewer is not None
    data = json.loads(result.viewer().json())
    assert data["sizes"]["E"] == 2, "the smallest at which it is wrong"
    page = view(takes_the_second, second, grid=blocks_of_n, WRONG_FROM=99)
    assert not json.loads(page.json())["findings"]
    with pytest.raises(ValueError, match="E is 1; it must be at least 2"):
        view(takes_the_second, second, grid=blocks_of_n, sizes={"E": 1}, WRONG_FROM=99)


def blocks_of_n(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"at_least": {"T": 2}}, "at_least names 'T', which is no size; there are N, E"),
        ({"at_least": {"E": 2}, "at_most": {"E": 1}}, "at_least is 2 for E"),
        ({"at_least": {"E": -1}}, "at_least is -1 for E"),
    ],
)
def test_a_least_size_that_leaves_none_is_refused(facts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        operation(**facts)(second.reference)


def sums(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@triton.jit
def last_one_adds(x_ptr, parts_ptr, count_ptr, z_ptr, N, T, B: tl.constexpr):
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    j = part * B + tl.arange(0, B)
    x = tl.load(x_ptr + row * T + j, mask=j < T, other=0.0)
    tl.store(parts_ptr + row * parts + part, tl.sum(x, axis=0))
    if tl.atomic_add(count_ptr + row, 1) == parts - 1:
        total = 0.0
        for one in range(parts):
            total += tl.load(parts_ptr + row * parts + one)
        tl.store(z_ptr + row, total)


def parts(meta: dict[str, Any]) -> tuple[int, int]:
    return meta["N"], triton.cdiv(meta["T"], meta["B"])


PARTS = Scratch("float32", "N (T+B-1)//B")


@pytest.mark.deep
def test_memory_of_a_kernels_own() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N", initial=0)}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert result.ok, str(result)


def test_scratch_that_nobody_has_filled_or_that_is_too_small() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N")}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert "unwritten-read" in result.kinds
    given = {"parts_ptr": Scratch("float32", "N"), "count_ptr": Scratch("int32", "N", initial=0)}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert "out-of-bounds-store" in result.kinds


def test_scratch_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no dtype 'f32'"):
        Scratch("f32", "N")
    with pytest.raises(ValueError, match="not understood"):
        Scratch("int32", "N.real")
    given = {"parts_ptr": Scratch("float32", "Q"), "count_ptr": Scratch("int32", "N", initial=0)}
    with pytest.raises(ValueError, match=r"shape of parts_ptr.*'Q'.* there are N"):
        check(last_one_adds, sums, grid=parts, device="cpu", **given)


def test_scratch_is_in_a_view() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N", initial=0)}
    page = view(last_one_adds, sums, grid=parts, sizes={"N": 2, "T": 40}, **given)
    assert '"name":"parts_ptr"' in page.json()
