"""docs/graph.md names the operators of ONNX that do not run, as tools/operators.py counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository_tools import tool

pytest.importorskip("onnx")
ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- python tools/operators.py -->\n", "<!-- end -->"


@pytest.mark.deep
def test_the_page_says_what_the_tool_counts() -> None:
    operators = tool("operators")
    rows = list(operators.onnx_rows())
    runs = {name: (count, of) for name, count, of, _ in rows}
    for operator in ("GatherND", "GRU", "LSTM", "RNN", "Col2Im", "MatMul", "Softmax", "GridSample",
                     "Acosh", "BitwiseXor", "RotaryEmbedding", "AffineGrid"):  # fmt: skip
        assert runs[operator][0] == runs[operator][1]
    page = (ROOT / "docs" / "graph.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == operators.table(rows)
