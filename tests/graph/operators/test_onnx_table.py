"""docs/graph.md names the operators of ONNX that do not run, as tools/operators.py counts them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- python tools/operators.py -->\n", "<!-- end -->"


def test_the_page_says_what_the_tool_counts() -> None:
    spec = importlib.util.spec_from_file_location("operators_tool", ROOT / "tools" / "operators.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rows = list(tool.onnx_rows())
    runs = {name: (count, of) for name, count, of, _ in rows}
    for operator in ("GatherND", "GRU", "LSTM", "RNN", "Col2Im", "MatMul", "Softmax", "GridSample",
                     "OneHot", "Acosh", "BitwiseXor", "RotaryEmbedding", "AffineGrid"):  # fmt: skip
        assert runs[operator][0] == runs[operator][1]
    page = (ROOT / "docs" / "graph.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == tool.table(rows)
