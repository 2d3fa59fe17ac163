"""Kernels, plans and benchmarks are those of tests/golden, by a share of tools/golden.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SHARE = 24


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", ROOT / "tools" / "golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_is_as_golden_files_say(golden: ModuleType) -> None:
    for needed in ("onnx", "onnxruntime", "torch", "transformers"):
        pytest.importorskip(needed)
    assert not golden.wrong_parts(golden.PARTS, share=SHARE)
