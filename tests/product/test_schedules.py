"""docs/layout.md says how products are cut as tools/schedules.py asks the dispatcher."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- python tools/schedules.py -->\n", "<!-- end -->"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedules", ROOT / "tools" / "schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_dispatcher_does(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == tool.table()


def test_each_product_can_be_timed(tool: ModuleType) -> None:
    pytest.importorskip("jaxtyping")
    from lowbit.bench.suites.matmul.problem import product

    for rule in tool.rules():
        assert product(rule.shape, rule.dtypes).dtypes == rule.dtypes
