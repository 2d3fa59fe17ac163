"""Kernels, plans and benchmarks are those of tests/golden, by a share of tools/golden.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from repository_tools import tool

ROOT = Path(__file__).parent.parent
SHARE = 24


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    return tool("golden")


@pytest.mark.deep
def test_all_is_as_golden_files_say(golden: ModuleType) -> None:
    for needed in ("onnx", "onnxruntime", "torch", "transformers"):
        pytest.importorskip(needed)
    assert not golden.wrong_parts(golden.PARTS, share=SHARE)
