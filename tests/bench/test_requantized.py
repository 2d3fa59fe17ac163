"""Products with 8 bits out."""

from __future__ import annotations

import numpy as np

from lowbit_lab.bench.suites.matmul.problem import MatmulProblem, product
from lowbit_lab.checks.cpu import cpu_functions


def test_a_result_one_off_is_caught() -> None:
    """Unless the value lies next to a half, where either neighbour is right."""
    problem = MatmulProblem.make(product("33x64:64x40", "u8:s8:u8"))
    expected = problem.expected
    case, inputs = problem.stated, problem.inputs
    result = cpu_functions.get("matmul_scaled")(case, inputs).copy()
    assert expected.check(result).ok
    settled = np.argwhere(np.broadcast_to(expected.budget, result.shape) == 0)
    assert len(settled) > 0.99 * result.size
    result[tuple(settled[0])] ^= 1
    assert not expected.check(result).ok


def test_output_is_spread_over_its_range() -> None:
    problem = MatmulProblem.make(product("33x64:64x40", "u8:s8:u8"))
    values = problem.ideal
    assert values.min() <= 1
    assert values.max() >= 254
