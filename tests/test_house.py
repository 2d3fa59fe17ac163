"""The house stays in order: tools/house.py counts it, and nothing is over its bound."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from repository_tools import tool

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return tool("house")


@pytest.mark.deep
def test_nothing_is_over_its_bound(house: ModuleType) -> None:
    found = house.measures(house.House(ROOT / "src"))
    assert not [str(measure) for measure in found if measure.over]


PLANTED = {
    "__init__.py": "",
    "loose.py": "",
    "isa/__init__.py": "",
    "isa/low.py": "from lowbit.jit import high\n",
    "jit/__init__.py": "",
    "jit/high.py": "def f():\n    from lowbit.isa.low import x\n" + "    y = 1\n" * 70,
    "torch/__init__.py": 'SET = "avx2"\n' + "x = 1\n" * 600,
}


def test_what_is_out_of_order_is_found(house: ModuleType, tmp_path: Path) -> None:
    for name, text in PLANTED.items():
        path = tmp_path / "lowbit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    over = {m.name: m.found for m in house.measures(house.House(tmp_path)) if m.over}
    assert over.keys() == {
        "modules at the root",
        "imports that climb",
        "circles of files that cross a folder",
        "files that are too long",
        "functions that are too long",
        "names of instruction sets elsewhere",
    }
    assert over["modules at the root"] == ("lowbit.loose",)
    assert "lowbit.isa.low imports lowbit.jit.high" in over["imports that climb"]
    assert over["circles of files that cross a folder"] == ("lowbit.isa.low ↔ lowbit.jit.high",)
