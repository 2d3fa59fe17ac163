"""What the checker takes for right and for wrong: undefined lanes, leaks of NaN, orders, rounding,
ranges of indices, functions that are passed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32, Int32

from lowbit.spec import from_function, operation
from lowbit_lab import check

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportOptionalOperand=false, reportGeneralTypeIssues=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


def whole(sizes: Any) -> int:
    return triton.next_power_of_2(sizes["T"])


def checked(kernel: Any, spec: Any, **given: Any) -> Any:
    return check(kernel, spec, grid=rows, B=whole, device="cpu", stop=True, **given)


# Undefined lanes.


def products(
    x: Float32[np.ndarray, "N T"], y: Float32[np.ndarray, "N T"]
) -> Float32[np.ndarray, "N"]:
    return (x * y).sum(axis=1)


def largest_or_zero(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return np.maximum(x.max(axis=1), 0)


def totals(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@triton.jit
def one_other_is_missing(x_ptr, y_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    y = tl.load(y_ptr + tl.program_id(0) * T + j, mask=j < T)  # the guilty one
    tl.store(z_ptr + tl.program_id(0), tl.sum(x * y, axis=0))


@triton.jit
def one_of_two_is_used(x_ptr, y_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T)
    y = tl.load(y_ptr + tl.program_id(0) * T + j, mask=j < T)  # the guilty one
    tl.store(z_ptr + tl.program_id(0), tl.sum(tl.where(j < T, x, 0.0) * y, axis=0))


@triton.jit
def maximum_with_undefined_lanes(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T)  # the guilty one
    tl.store(z_ptr + tl.program_id(0), tl.maximum(tl.max(x, axis=0), 0.0))


@triton.jit
def masked_again(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T)
    tl.store(z_ptr + tl.program_id(0), tl.sum(tl.where(j < T, x, 0.0), axis=0))


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        (one_other_is_missing, products),
        (one_of_two_is_used, products),
        (maximum_with_undefined_lanes, largest_or_zero),
    ],
)
def test_the_load_whose_undefined_lanes_are_used_is_named(kernel: Any, spec: Any) -> None:
    result = checked(kernel, spec)
    assert result.kinds == ("undefined-lanes",), str(result)
    place = result.findings[0].place
    assert place is not None
    assert "# the guilty one" in Path(place.file).read_text().splitlines()[place.line - 1]


def gathered(x: Float32[np.ndarray, "T"], i: Int32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x[i]


indexed = operation(ranges={"i": (0, "T")})(gathered)


@triton.jit
def address_from_undefined_lanes(x_ptr, i_ptr, z_ptr, N, T, B: tl.constexpr):
    k = tl.program_id(0) * B + tl.arange(0, B)
    i = tl.load(i_ptr + k, mask=k < N)
    tl.store(z_ptr + k, tl.load(x_ptr + i), mask=k < N)


@triton.jit
def gather(x_ptr, i_ptr, z_ptr, N, T, B: tl.constexpr):
    k = tl.program_id(0) * B + tl.arange(0, B)
    i = tl.load(i_ptr + k, mask=k < N)
    tl.store(z_ptr + k, tl.load(x_ptr + i, mask=k < N), mask=k < N)


def test_an_address_from_undefined_lanes() -> None:
    result = check(address_from_undefined_lanes, indexed, grid=blocks, device="cpu", stop=True)
    assert result.kinds == ("undefined-lanes",), str(result)


@pytest.mark.deep
def test_what_is_masked_again_is_right() -> None:
    assert checked(masked_again, totals)
    assert check(gather, indexed, grid=blocks, device="cpu", stop=True)


# NaN from beside.


def of_first_three(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x[:, :3].sum(axis=1)


@triton.jit
def first_three(x_ptr, z_ptr, N, T, CHOOSE: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    x = tl.where(j < 3, x, 0.0) if CHOOSE else x * (j < 3).to(tl.float32)
    tl.store(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@pytest.mark.deep
def test_a_nan_from_beside_is_an_error() -> None:
    assert checked(first_three, of_first_three, CHOOSE=False).kinds == ("nan-leak",)
    right = checked(first_three, of_first_three, CHOOSE=True)
    assert not right.findings, str(right)


# Orders.


@operation(exercise={"N": 3, "T": 20})
def in_order(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return np.sort(x, axis=1)


def scales(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return np.abs(x).max(axis=1) / 127


@triton.jit
def scales_of_rows(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.max(tl.abs(x), axis=0) / 127)


@triton.jit
def sort_rows(x_ptr, z_ptr, N, T, DOWN: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=float("inf"))
    tl.store(z_ptr + tl.program_id(0) * T + j, tl.sort(x, descending=DOWN), mask=j < T)


@triton.jit
def largest_by_place(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=-float("inf"))
    largest, _ = tl.max(x, axis=0, return_indices=True)
    tl.store(z_ptr + tl.program_id(0), tl.maximum(largest, 0.0))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kernel", "spec", "given"),
    [
        (scales_of_rows, scales, {}),
        (sort_rows, in_order, {"DOWN": False}),
        (largest_by_place, largest_or_zero, {}),
    ],
    ids=["scales", "sort", "largest"],
)
def test_an_order_may_lose_a_nan(kernel: Any, spec: Any, given: Any) -> None:
    result = checked(kernel, spec, **given)
    assert result.ok, str(result)
    assert "nan-chosen" in {f.kind for f in result.findings}


def test_a_wrong_order_is_wrong() -> None:
    assert checked(sort_rows, in_order, DOWN=True).kinds == ("wrong-values",)


# Reductions and scans with a function of one's own.


@triton.jit
def _step(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _multiplied(a, b):
    return a * b


@triton.jit
def recurrence(x_ptr, y_ptr, z_ptr, N, T, BACK: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=1.0)
    y = tl.load(y_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    x = 1.0 / (1.0 + tl.abs(x))
    _, z = tl.associative_scan((x, y), 0, _step, reverse=BACK)
    tl.store(z_ptr + tl.program_id(0) * T + j, z, mask=j < T)


def recurred(
    x: Float32[np.ndarray, "N T"], y: Float32[np.ndarray, "N T"]
) -> Float32[np.ndarray, "N T"]:
    state, states = np.zeros(len(x)), list[Any]()
    for gate, value in zip((1 / (1 + np.abs(x))).T, y.T, strict=True):
        state = state * gate + value
        states.append(state)
    return np.stack(states, axis=1)


@triton.jit
def product_of_rows(x_ptr, z_ptr, N, T, B: tl.constexpr):
    i, j = tl.program_id(0) * 4 + tl.arange(0, 4)[:, None], tl.arange(0, B)[None, :]
    inside = (i < N) & (j < T)
    x = tl.load(x_ptr + i * T + j, mask=inside, other=1.0)
    tl.store(z_ptr + i, tl.reduce(x, 1, _multiplied, keep_dims=True), mask=i < N)


def multiplied(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return np.prod(x, axis=1)


@pytest.mark.deep
def test_scans_and_reductions_by_a_function() -> None:
    spec = operation(exercise={"N": 5, "T": 40}, summed=("T",), excludes=("largest", "huge"))(
        recurred
    )
    assert checked(recurrence, spec, BACK=False).ok
    assert checked(recurrence, spec, BACK=True).kinds == ("wrong-values",)
    quarters = lambda meta: triton.cdiv(meta["N"], 4)  # noqa: E731
    assert check(product_of_rows, multiplied, grid=quarters, B=whole, device="cpu", stop=True)


# Rounding: terms that cancel in any float32.


def gelu(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2)))


def cross_entropy(
    x: Float32[np.ndarray, "N T"], label: Int32[np.ndarray, "N"]
) -> Float32[np.ndarray, "N"]:
    largest = x.max(axis=1)
    total = np.exp(x - largest[:, None]).sum(axis=1)
    return largest + np.log(total) - x[np.arange(len(x)), label]


@triton.jit
def gelu_by_erf(x_ptr, z_ptr, N, HALF: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, HALF * x * (1 + tl.erf(x * 0.7071067811865476)), mask=i < N)


@triton.jit
def loss_of_rows(x_ptr, label_ptr, z_ptr, N, T, SHIFT: tl.constexpr, B: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(x_ptr + row * T + j, mask=j < T, other=-float("inf"))
    largest = tl.max(x, axis=0)
    total = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    tl.store(z_ptr + row, total - tl.load(x_ptr + row * T + tl.load(label_ptr + row)) + SHIFT)


losses = operation(ranges={"label": (0, "T")})(cross_entropy)


@pytest.mark.deep
def test_what_float32_cannot_keep_is_no_fault() -> None:
    assert check(gelu_by_erf, gelu, grid=blocks, HALF=0.5, device="cpu")
    assert checked(loss_of_rows, losses, SHIFT=0.0)


def test_a_small_error_is_one_still() -> None:
    wrong = check(gelu_by_erf, gelu, grid=blocks, HALF=0.50001, device="cpu", stop=True)
    assert wrong.kinds == ("wrong-values",)
    assert checked(loss_of_rows, losses, SHIFT=1e-3).kinds == ("wrong-values",)


def by_halves(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x * 0.0


@triton.jit
def cancels(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, (x * 1.1 - x) - 0.1 * x, mask=i < N)


@pytest.mark.deep
def test_where_terms_cancel_in_the_kernel_slack_is_named() -> None:
    assert "slack=" in check(cancels, by_halves, grid=blocks, device="cpu").findings[0].message
    kept = operation(slack=lambda case, x: 8 * 2.0**-24 * np.abs(x))(by_halves)
    assert not check(cancels, kept, grid=blocks, device="cpu", stop=True).kinds


# Ranges of integers.


def test_indices_without_a_range_are_named_with_a_cure() -> None:
    with pytest.raises(ValueError, match=r"IndexError.*label any int32.*ranges=\{'label': \(0, "):
        checked(loss_of_rows, cross_entropy, SHIFT=0.0)


def test_values_stay_in_their_range() -> None:
    for fill in ("normal", "zeros", "negative", "large", "low", "tiny"):
        labels = losses.case({"N": 300, "T": 7}, fill=fill).inputs()["label"]
        assert labels.min() >= 0
        assert labels.max() <= 6
    assert set(losses.case({"N": 300, "T": 7}).inputs()["label"].tolist()) == set(range(7))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"ranges": {"x": (0, 1)}}, "inputs of integers"),
        ({"ranges": {"label": (0, "C")}}, "sizes N, T"),
        ({"ranges": {"label": (0, "T.real")}}, "not understood"),
        ({"excludes": ("NaN",)}, "no kind of data"),
    ],
)
def test_facts_that_do_not_fit_are_refused(facts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        operation(**facts)(cross_entropy)


def test_an_empty_range_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"leaves no number at"):
        operation(ranges={"label": ("T", 3)})(cross_entropy).case({"N": 2, "T": 5}).inputs()


def test_factors_may_be_floats() -> None:
    def product(
        a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
    ) -> Float32[np.ndarray, "M N"]:
        return a @ b

    spec = from_function(product, factors=("a", "b"))
    assert spec.case({"M": 3, "K": 4, "N": 5}).operations == 2 * 3 * 4 * 5
    assert spec.longest_reduction() is None


# A function that is passed.


@triton.jit
def _positive(x):
    return tl.where(x > 0, x, 0.0)


@triton.jit
def _negative(x):
    return tl.where(x < 0, x, 0.0)


@triton.jit
def applied(x_ptr, z_ptr, N, F: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, F(x), mask=i < N)


def positive(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.where(x > 0, x, 0)


def exponential(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.exp(x)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("function", "spec"), [(_positive, positive), (tl.exp, exponential)], ids=["helper", "exp"]
)
def test_a_function_may_be_passed_as_a_constant(function: Any, spec: Any) -> None:
    assert check(applied, spec, grid=blocks, F=function, device="cpu", stop=True)
    wrong = check(applied, spec, grid=blocks, F=_negative, device="cpu", stop=True)
    assert wrong.kinds == ("wrong-values",)


# A largest number that comes last, and what cancels then.


def softmax(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@triton.jit
def softmax_by_the_first_block(x_ptr, z_ptr, N, T, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * T
    j = tl.arange(0, B)
    largest = tl.max(tl.load(x_ptr + row + j, mask=j < T, other=-float("inf")), axis=0)
    total = 0.0
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row + j, mask=j < T, other=-float("inf"))
        total += tl.sum(tl.exp(x - largest), axis=0)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row + j, mask=j < T, other=0.0)
        tl.store(z_ptr + row + j, tl.exp(x - largest) / total, mask=j < T)


def below_the_sum(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    largest = x.max(axis=1)
    return np.log(np.exp(x - largest[:, None]).sum(axis=1)) + (largest - x[:, -1])


@triton.jit
def subtracted_at_the_end(x_ptr, z_ptr, N, T, B: tl.constexpr):
    row = x_ptr + tl.program_id(0).to(tl.int64) * T
    j = tl.arange(0, B)
    x = tl.load(row + j, mask=j < T, other=-float("inf"))
    largest = tl.max(x, axis=0)
    total = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    tl.store(z_ptr + tl.program_id(0), total - tl.load(row + T - 1))


@pytest.mark.deep
def test_the_largest_may_come_in_a_later_block() -> None:
    result = check(softmax_by_the_first_block, softmax, grid=rows, B=32, device="cpu", stop=True)
    assert result.kinds == ("wrong-values",), str(result)
    assert result.findings[0].fill == "rising"


@pytest.mark.deep
def test_what_cancels_among_large_numbers_is_a_warning() -> None:
    result = checked(subtracted_at_the_end, below_the_sum)
    assert result.ok, str(result)
    assert "cancellation" in {f.kind for f in result.findings}
