"""What every operation means, in one language.

An operation is an annotated function; the body is its reference, in exact integers or float64.
`operation` makes an Operation of it, from which tests, benchmarks, checker and course take the
rest: the operation count, the least bytes moved, the error budget, cases and data.

    case = matmul.case({"M": 3, "N": 17, "K": 65}, dtypes="u8:s8:s32")
    inputs = case.inputs(seed=1)
    verdict = case.expect(inputs).check(my_kernel(**inputs))
    assert verdict.ok, verdict.message

The operations themselves are in `lowbit.spec.operations`, the exercises in `lowbit.spec.exercises`.
"""

from __future__ import annotations

from lowbit.spec.case import Case, Expected, Inputs, Layout, Verdict, fills_of
from lowbit.spec.cases import EDGE_SIZES, cases_of, edge_cases, fill_cases
from lowbit.spec.data import CORNERS, FILLS, SPECIAL
from lowbit.spec.dtypes import DTYPES, Array, DType
from lowbit.spec.language import from_function, one_of, operation
from lowbit.spec.operation import Block, Operation, Sizes, TensorType

__all__ = [
    "CORNERS",
    "DTYPES",
    "EDGE_SIZES",
    "FILLS",
    "SPECIAL",
    "Array",
    "Block",
    "Case",
    "DType",
    "Expected",
    "Inputs",
    "Layout",
    "Operation",
    "Sizes",
    "TensorType",
    "Verdict",
    "cases_of",
    "edge_cases",
    "fill_cases",
    "fills_of",
    "from_function",
    "one_of",
    "operation",
]
