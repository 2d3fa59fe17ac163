"""examples/search.py, on a few sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.deep
def test_the_example_finds_neighbours(
    example: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = example("search")
    # All installed docstrings take half a minute to look through; NumPy's own core is enough here.
    folder = Path(search.np.__file__).parent / "lib"
    found = list(dict.fromkeys(search.extract(search.docstrings(folder))))[:90]
    assert len(found) == 90
    monkeypatch.setattr(search, "sentences", lambda count: found[:count])
    monkeypatch.setattr(sys, "argv", ["search.py", "--sentences", "90", "--queries", "20"])
    search.main()
    printed = capsys.readouterr().out
    assert printed.count("recall@10 with 40 rescored: 1.0000") >= 3
    recalls = [float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if "recall@" in line]
    assert len(recalls) == 8
    assert min(recalls) > 0.6
