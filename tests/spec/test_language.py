"""Operations stated as annotated functions, and the twelve of the ladder."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("jaxtyping")
from jaxtyping import Float16, Float32

from lowbit.spec import Case, Operation, TensorType, exercises, from_function, operation
from lowbit.spec.dtypes import FLOAT32_UNIT

RNG = np.random.default_rng(0)


def _f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_dimensions_are_names_numbers_and_expressions() -> None:
    tensor = TensorType("x", "float32", ("N0", "MID//8", "4", "2*T+1"))
    assert tensor.names == ("N0", "MID", "T")
    assert tensor.shape({"N0": 3, "MID": 64, "T": 5}) == (3, 8, 4, 11)


def test_sizes_are_checked() -> None:
    spec = exercises.quantized_matmul
    assert spec.complete({"MID": 128, "N0": 1, "N1": 2}) == {"N0": 1, "MID": 128, "N1": 2}
    with pytest.raises(ValueError, match="MID is 65; it must be a multiple of 64"):
        spec.complete({"MID": 65, "N0": 1, "N1": 2})
    with pytest.raises(ValueError, match="has the sizes N0, MID, N1; got N0"):
        spec.complete({"N0": 1})


def test_sums_have_as_many_terms_as_are_summed() -> None:
    sizes = {"N2": 2, "N0": 3, "MID": 50, "N1": 7}
    assert exercises.batched_matmul.sum_length(sizes) == 50
    assert exercises.long_softmax.sum_length({"N0": 4, "T": 30}) == 30
    assert exercises.add_constant.sum_length({"N0": 30}) == 1
    assert exercises.conv2d.sum_length({"N0": 2, "H": 9, "W": 9, "KH": 3, "KW": 4}) == 12


def test_sum_softmax_and_attention_by_loops() -> None:
    x = _f32(3, 5).astype(np.float64)
    z = exercises.long_softmax(x)
    for i, j in np.ndindex(3, 5):
        assert np.isclose(z[i, j], np.exp(x[i, j]) / sum(np.exp(v) for v in x[i]))
    assert np.allclose(exercises.long_sum(x), [sum(row) for row in x])
    q, k, v = (_f32(n).astype(np.float64) for n in (3, 4, 4))
    for i, z_i in enumerate(exercises.flash_attention(q, k, v)):
        weights = [np.exp(q[i] * k_j) for k_j in k]
        assert np.isclose(
            z_i, sum(w * v_j for w, v_j in zip(weights, v, strict=True)) / sum(weights)
        )


def test_convolution_by_loops() -> None:
    x, k = _f32(2, 4, 5), _f32(2, 3)
    expected = np.zeros(x.shape)
    for b, i, j, u, v in itertools.product(range(2), range(4), range(5), range(2), range(3)):
        if i + u < 4 and j + v < 5:
            expected[b, i, j] += float(k[u, v]) * float(x[b, i + u, j + v])
    assert np.allclose(exercises.conv2d(x.astype(np.float64), k.astype(np.float64)), expected)


def test_derivative_of_relu_is_zero_at_zero() -> None:
    x = np.array([[-1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]])
    dz = np.full((2, 3), 5.0)
    dx = exercises.mul_relu_backward(x, np.array([3.0, -3.0]), dz)
    assert np.array_equal(dx, [[0, 0, 15], [-15, 0, 0]])


def test_quantized_product_by_loops() -> None:
    rng = np.random.default_rng(1)
    weight, offset = (rng.integers(-(2**31), 2**31, (3, n)) for n in (16, 2))
    scale, activation = rng.standard_normal((3, 16)), rng.standard_normal((128, 2))
    expected = np.zeros((3, 2))
    for n, m, p in np.ndindex(3, 128, 2):
        group = m // 8
        nibble = (int(weight[n, group]) >> 4 * (m % 8)) % 16
        zero = (int(offset[n, group // 8]) >> 4 * (group % 8)) % 16
        expected[n, p] += scale[n, group] * (nibble - zero) * activation[m, p]
    assert np.allclose(exercises.quantized_matmul(scale, offset, weight, activation), expected)


@pytest.mark.parametrize("magnitude", [1e-3, 1, 1e4])
@pytest.mark.parametrize("length", [1, 37, 1000])
def test_the_budget_holds_float32_and_not_less(length: int, magnitude: float) -> None:
    x, y = _f32(2, 8, length) * np.float32(magnitude), _f32(2, length, 9)
    sizes = {"N2": 2, "N0": 8, "MID": length, "N1": 9}
    expected = Case(exercises.batched_matmul, sizes).expect({"x": x, "y": y})

    in_order = np.zeros((2, 8, 9), np.float32)
    for m in range(length):
        in_order += x[:, :, m, None] * y[:, None, m]
    assert not expected.wrong(in_order.astype(np.float64)).any()
    rounded = (x.astype(np.float16).astype(np.float64)) @ y
    assert expected.wrong(rounded).any()


def test_exact_zeros_have_next_to_no_budget() -> None:
    x, y = np.array([-2, 3], np.float32), np.array([1, 0, -1], np.float32)
    expected = Case(exercises.outer_mul_relu, {"N0": 2, "N1": 3}).expect({"x": x, "y": y})
    zero = expected.reference == 0
    assert zero.sum() == 4
    assert (expected.budget[zero] < 1e-36).all()
    assert expected.wrong(np.where(zero, 1e-30, expected.reference)).sum() == 4


def test_overflow_of_the_result_is_an_infinity() -> None:
    def square(x: Float16[np.ndarray, "N"]) -> Float16[np.ndarray, "N"]:
        return x * x

    spec = from_function(square)
    expected = Case(spec, {"N": 3}).expect({"x": np.array([300, -300, 2], np.float16)})
    assert list(expected.wrong(np.array([np.inf, np.inf, 4.0]))) == [False, False, False]
    assert list(expected.wrong(np.array([-np.inf, np.nan, np.inf]))) == [True, True, True]


def test_nan_is_wrong_where_the_reference_has_none() -> None:
    expected = Case(exercises.add_constant, {"N0": 3}).expect({"x": _f32(3)})
    assert list(expected.wrong(np.where([1, 0, 0], np.nan, expected.reference))) == [
        True,
        False,
        False,
    ]


def test_the_decorator_checks_the_exercise() -> None:
    def row_sum(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
        return x.sum(axis=1)

    made = operation(exercise={"N": 2, "T": 3}, summed=("T",))(row_sum)
    assert isinstance(made, Operation)
    assert made.names == ("N", "T")
    with pytest.raises(ValueError, match="has the sizes N, T; got N, K"):
        operation(exercise={"N": 2, "K": 3})(row_sum)


def test_sums_that_the_result_keeps_make_the_budget_longer() -> None:
    def running(x: Float32[np.ndarray, "R T"]) -> Float32[np.ndarray, "R T"]:
        return np.cumsum(x, axis=1)

    def of_each(x: Float32[np.ndarray, "R T"]) -> Float32[np.ndarray, "R T"]:
        return x + 1

    relative = []
    for function in (running, of_each):
        case = Case(from_function(function), {"R": 2, "T": 1025}, "offset")
        expected = case.expect(case.inputs(0))
        relative.append(expected.budget[0, -1] / abs(expected.reference[0, -1]) / FLOAT32_UNIT)
    # (1 + 8 + 32) roundings of the sum; 9 of an element, and 9 of its move by one.
    assert relative[0] > 41
    assert relative[1] <= 20
