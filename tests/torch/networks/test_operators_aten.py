"""docs/networks.md says which of ATen's core operators do not run; all others are translated."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from repository_tools import tool

from lowbit.torch.capture import export
from lowbit.torch.capture.builder import converters

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def aten() -> ModuleType:
    return tool("operators_aten")


def listed() -> set[str]:
    """The operators of the page's table."""
    page = (ROOT / "docs" / "networks.md").read_text()
    table = page.partition("| operator of ATen | why it does not run |")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.count("|") > 2]
    return {name for cell in firsts for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.deep
def test_what_is_listed_does_not_run(aten: ModuleType) -> None:
    """By the first sample of each: the tool takes more."""
    rows = list(aten.aten_rows(sorted(listed()), most=1))
    assert {row.operator for row in rows} == listed()
    assert [row.operator for row in rows if row.runs or not row.of] == []


def test_what_has_no_translation_is_listed(aten: ModuleType) -> None:
    decomposed = export._decompositions()
    missing = {
        aten.name_of(one)
        for one in aten.core_operators()
        if one._schema.name not in converters.load() and one not in decomposed
    }
    assert missing - listed() == set()


def test_the_tool_notices(aten: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A translation that gives other numbers counts as one that does not run."""
    wrong = lambda b, *, x, **_: b.op("Neg", x)  # noqa: E731
    monkeypatch.setitem(converters.load(), "aten::exp", wrong)
    (row,) = aten.aten_rows(["exp"], most=2)
    assert row.runs < row.of
    assert "other numbers" in row.reason
