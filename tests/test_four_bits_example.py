"""examples/four_bits.py, on a few sentences."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.deep
def test_the_example_compares_ranges(
    example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    example("four_bits").main(["--sentences", "16", "--groups", "128"])
    printed = capsys.readouterr().out
    numbers = re.findall(r"(minmax|mse): squared error ([\d.]+), cosine ([\d.]+)", printed)
    assert [name for name, *_ in numbers] == ["minmax", "mse"] * 3
    for range_, error, cosine in numbers:
        assert float(error) == 1 if range_ == "minmax" else float(error) < 0.95
        assert 0.9 < float(cosine) < 1
