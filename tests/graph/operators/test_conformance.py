"""What ONNX's own test cases say of each operator, against its definition here."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest

from lowbit.graph.evaluate import evaluate
from lowbit.graph.onnx import OPSETS, from_onnx
from lowbit.graph.operator import operators

onnx = pytest.importorskip("onnx")
_FUNCTIONS = {
    "CenterCropPad", "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "ReduceLogSum",
    "RotaryEmbedding", "SoftmaxCrossEntropyLoss",
}  # fmt: skip
"""Operators that ONNX defines by others."""
_LIKE_ONNX = sorted({*(name for name, one in operators.load().items() if one.onnx), *_FUNCTIONS})


@cache
def _cases() -> dict[str, list[Any]]:
    """The cases of one node, with an operator and an opset that are known, by operator."""
    from onnx.backend.test.case.node import collect_testcases

    found = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = collect_testcases(None)
    for case in every:
        if case.model is None or len(case.model.graph.node) != 1:
            continue
        opset = next((one.version for one in case.model.opset_import if not one.domain), 0)
        if opset in OPSETS and not case.model.graph.node[0].domain:
            found[case.model.graph.node[0].op_type].append(case)
    return dict(found)


def _plain(array: Any) -> bool:
    """Whether it is an array of numbers that NumPy and ml-dtypes know."""
    return isinstance(array, np.ndarray | np.generic) and np.asarray(array).dtype != object


@pytest.mark.deep("Abs")
@pytest.mark.parametrize("operator", _LIKE_ONNX)
def test_an_operator_does_what_onnx_says(operator: str) -> None:
    for case in _cases().get(operator, ()):
        try:
            graph = from_onnx(case.model)
        except (NotImplementedError, ValueError):
            continue
        names = [one.name for one in case.model.graph.input]
        for given, wanted in case.data_sets:
            if not all(map(_plain, (*given, *wanted))):
                continue
            with np.errstate(all="ignore"):
                made = evaluate(graph, dict(zip(names, map(np.asarray, given), strict=True)))
            for got, one in zip(made.values(), wanted, strict=True):
                assert got.shape == np.shape(one), case.name
                expected, half = np.asarray(one), np.asarray(one).dtype.name == "bfloat16"
                assert got.dtype == expected.dtype, case.name
                wide = (got.astype(np.float32), expected.astype(np.float32))
                got, expected = wide if half else (got, expected)
                tolerance = 1e-2 if half else 1e-3
                np.testing.assert_allclose(
                    got, expected, rtol=tolerance, atol=1e-5, err_msg=case.name
                )
