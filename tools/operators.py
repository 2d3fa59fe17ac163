"""Which operators of others run: `python tools/operators.py [onnx | aten]`.

The measures are lists of others: the node tests of ONNX, and the core operators of ATen. A row is
an operator, how many of its cases run with the right numbers, of how many, and why the rest do not.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from lowbit.graph import Session
from lowbit.graph.onnx import OPSETS, from_onnx

Row = tuple[str, int, int, str]
"""Operator, the cases that run, all its cases, the commonest reason of those that do not."""


def onnx_cases() -> dict[str, list[Any]]:
    """ONNX's node tests by operator: those of one node of ONNX's own domain."""
    from onnx.backend.test.case.node import collect_testcases

    cases = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = collect_testcases(None)
    for case in every:
        if case.model is None or len(case.model.graph.node) != 1:
            continue
        opset = next((one.version for one in case.model.opset_import if not one.domain), 0)
        (node,) = case.model.graph.node
        if opset >= OPSETS[0] and not node.domain:
            cases[node.op_type].append(case)
    return dict(cases)


def onnx_rows() -> Iterator[Row]:
    """How many of ONNX's node tests run in a Session, by operator."""
    for operator, cases in sorted(onnx_cases().items()):
        reasons = [reason for case in cases if (reason := onnx_refusal(case))]
        reason = Counter(reasons).most_common(1)[0][0] if reasons else ""
        yield operator, len(cases) - len(reasons), len(cases), reason


def onnx_refusal(case: Any) -> str:
    """Why a node test does not run, or how its numbers are wrong; "": it runs.

    A case in which everything is an input is tried again as networks are: with what sizes and
    weights depend on, all inputs but the first, as constants. An operator that newer opsets only
    gave more types is read as one of the newest opset that is supported."""
    try:
        for inputs, expected in case.data_sets:
            try:
                results = _results(case.model, inputs, len(inputs))
            except (NotImplementedError, ValueError):
                results = _results(case.model, inputs, 1)
            for array, wanted in zip(results, expected, strict=True):
                _compare(array, _array(wanted))
    except Exception as error:  # whatever it is, the case does not run
        return _short(f"{error}" or type(error).__name__)
    return ""


def _results(model: Any, inputs: Sequence[Any], count: int) -> list[np.ndarray]:
    """What a Session makes of a model whose inputs behind the first `count` are constants."""
    from onnx import ModelProto, numpy_helper

    copy = ModelProto()
    copy.CopyFrom(model)
    for opset in copy.opset_import:
        if not opset.domain:
            opset.version = min(opset.version, OPSETS[-1])
    names = [value.name for value in copy.graph.input]
    arrays = dict(zip(names, map(_array, inputs), strict=True))
    for name in names[count:]:
        copy.graph.initializer.append(numpy_helper.from_array(arrays.pop(name), name))
    del copy.graph.input[count:]
    session = Session(from_onnx(copy), threads=1)
    return list(session.run(**arrays).values())


def _array(value: Any) -> np.ndarray:
    """An input or output of a case; types that NumPy lacks come as ONNX's own tensors."""
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _short(text: str) -> str:
    """The part of a refusal that says why, in a line, without the names of nodes and values."""
    text = (
        text.split("\n")[0].partition("; take it out of")[0].partition(", which are known only")[0]
    )
    if text.startswith(("operators that are not", "no kernel serves the operators")):
        return "no kernel" if text.startswith("no kernel") else "not supported"
    text = re.sub(r"^\w+ '[^']*'( of inputs [^:]*)?: ", "", text)
    return re.sub(r"'[^']*'", "a value", text).replace("<", "").replace(">", "")


def _compare(array: np.ndarray, expected: np.ndarray) -> None:
    """AssertionError: other numbers, another shape or dtype."""
    if (array.dtype, array.shape) != (expected.dtype, expected.shape):
        raise AssertionError(
            f"{array.dtype}{list(array.shape)} for {expected.dtype}{list(expected.shape)}"
        )
    tolerance = 1e-2 if expected.dtype.itemsize < 4 else 1e-3
    if expected.dtype.kind == "V" or expected.dtype.name == "bfloat16":
        array, expected = array.astype(np.float32), expected.astype(np.float32)
    if not np.allclose(array, expected, rtol=tolerance, atol=1e-5, equal_nan=True):
        raise AssertionError("the numbers are wrong")


MEASURES: dict[str, Callable[[], Iterator[Row]]] = {"onnx": onnx_rows}
if find_spec("operators_aten") is not None:
    MEASURES["aten"] = import_module("operators_aten").aten_rows


def table(rows: Iterable[Row]) -> str:
    """Markdown of the operators of which a case does not run, by the commonest reason."""
    groups = defaultdict(list)
    for name, runs, of, reason in rows:
        if reason:
            groups[reason].append(f"{name} ({runs} of {of})" if runs else name)
    lines = ["| operators (cases that run) | why not, or not all |", "|---|---|"]
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "\n".join([*lines, *(f"| {', '.join(names)} | {why} |" for why, names in ordered)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measure", nargs="?", default="onnx", choices=[*MEASURES])
    rows = list(MEASURES[parser.parse_args().measure]())
    whole = [name for name, runs, of, _ in rows if runs == of]
    print(table(rows))
    print(f"\n{len(whole)} of {len(rows)} operators run in all cases: {', '.join(whole)}")


if __name__ == "__main__":
    main()
