"""What every operation means.

A `Specification` states an operation once: its tensors, a reference in exact integers or
float64, and how far a kernel may be from it. Tests, benchmarks and the lab read everything else
from there: the operation count, the least bytes moved, the longest sum that cannot overflow,
input data, and the sizes worth testing.

    case = MATMUL.case({"M": 3, "N": 17, "K": 65}, dtypes="u8:s8:s32")
    inputs = case.inputs(seed=1)
    verdict = case.expect(inputs).check(my_kernel(**inputs))
    assert verdict.ok, verdict.message

A tensor is written as `name: dtype[dims]`, for example `a: u8|s8[M K]` (either dtype) or
`bias: f32[N]?` (may be left out).
"""

from __future__ import annotations

from lowbit.spec.check import Expected, Verdict
from lowbit.spec.dtypes import DTYPES, DType, longest_sum
from lowbit.spec.gemm import LINEAR_DYNAMIC, MATMUL, MATMUL_SCALED
from lowbit.spec.linear import LINEAR_GROUPS, LINEAR_WEIGHT_ONLY
from lowbit.spec.operation import EDGE_SIZES, Case, Specification, edge_cases
from lowbit.spec.tensors import FILLS, Draw, Tensor

__all__ = [
    "DTYPES",
    "EDGE_SIZES",
    "FILLS",
    "LINEAR_DYNAMIC",
    "LINEAR_GROUPS",
    "LINEAR_WEIGHT_ONLY",
    "MATMUL",
    "MATMUL_SCALED",
    "Case",
    "DType",
    "Draw",
    "Expected",
    "Specification",
    "Tensor",
    "Verdict",
    "edge_cases",
    "longest_sum",
]
