"""docs/layout.md says how products are cut as tools/schedules.py asks the dispatcher."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from repository_tools import tool

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- python tools/schedules.py -->\n", "<!-- end -->"


@pytest.fixture(scope="module")
def schedules() -> ModuleType:
    return tool("schedules")


def test_the_page_says_what_the_dispatcher_does(schedules: ModuleType) -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == schedules.table()


def test_each_product_can_be_timed(schedules: ModuleType) -> None:
    pytest.importorskip("jaxtyping")
    from lowbit_lab.bench.suites.matmul.problem import product

    for rule in schedules.rules():
        assert product(rule.shape, rule.dtypes).dtypes == rule.dtypes
