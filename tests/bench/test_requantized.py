"""The specification of the product with 8 bits out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit import api
from lowbit.bench.problem import Problem, gemm_case
from lowbit.bench.requantized import MATMUL_REQUANTIZED, quantization_of, quantized
from lowbit.numerics import QTensor, int_format
from lowbit.spec.operation import edge_cases


def run(inputs: dict[str, Any]) -> np.ndarray:
    """lowbit's result for inputs of the specification."""
    b = inputs["b"]
    zero = inputs.get("b_zero_point", np.zeros(b.shape[1], np.int32))
    weight = QTensor(b, inputs["b_scale"], zero, int_format(b.dtype.name), axis=1)
    return api.matmul_scaled(
        inputs["a"],
        api.pack(weight),
        a_scale=inputs["a_scale"],
        a_zero_point=inputs.get("a_zero_point"),
        bias=inputs.get("bias"),
        out_dtype="uint8",
        out_scale=float(inputs["out_scale"]),
        out_zero_point=int(inputs["out_zero_point"]),
    )


@pytest.mark.parametrize("case", edge_cases(MATMUL_REQUANTIZED), ids=str)
def test_lowbit_is_within_the_budget(case: Any) -> None:
    inputs = case.inputs(seed=5)
    verdict = case.expect(inputs).check(run(inputs))
    assert verdict.ok, verdict.message


def test_a_result_one_off_is_caught() -> None:
    """Unless the value lies next to a half, where either neighbour is right."""
    problem = Problem.make(gemm_case("33x64:64x40", "u8:s8:u8"))
    expected = problem.reference.expected
    result = run(dict(problem.reference.inputs))
    assert expected.check(result).ok
    settled = np.argwhere(np.broadcast_to(expected.budget, result.shape) == 0)
    assert len(settled) > 0.99 * result.size
    result[tuple(settled[0])] ^= 1
    assert not expected.check(result).ok


def test_output_is_spread_over_its_range() -> None:
    problem = Problem.make(gemm_case("33x64:64x40", "u8:s8:u8"))
    values = problem.reference.ideal
    assert values.min() <= 1
    assert values.max() >= 254


def test_quantization() -> None:
    assert quantization_of(np.array([-1.0, 1.55])) == (pytest.approx(0.01), 100)
    assert quantization_of(np.array([2.0, 2.55])) == (pytest.approx(0.01), 0)
    assert quantization_of(np.zeros(3)) == (1.0, 0)
    real = np.array([-9.0, -0.015, 0.005, 0.015, 9.0])
    np.testing.assert_array_equal(quantized(real, 0.01, 100), [0, 98, 100, 102, 255])
