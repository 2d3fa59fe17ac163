"""The suite's own rules: an item that takes long is marked, and combinations are drawn."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import cpu_budget
import pytest
from drawn_parameters import covering

pytest_plugins = ("pytester",)

ITEMS = """
import os
import sys
import time
import subprocess
import pytest

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_short(): pass
def test_sleeps(): time.sleep(0.3)
def test_long(): burn(0.3)
def test_child():
    code = "import time\\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", code])

@pytest.mark.deep
def test_marked(): burn(0.3)

@pytest.mark.deep("*-large", "huge*")
@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("kind", ["huge", "thin"])
def test_some(kind, size):
    burn(0.3 if size == "large" or kind == "huge" else 0)

@pytest.fixture(scope="module")
def shared(): burn(0.3)
def test_shared(shared): pass
def test_shared_again(shared): pass

from lowbit.jit import compile as compiler

def test_compiles_much(monkeypatch):
    monkeypatch.setattr(compiler, "optimized", lambda ir_text, isa: burn(0.8))
    monkeypatch.setattr(compiler, "_target_machine", lambda isa: Machine())
    compiler.object_code("", None)

def test_compiles_little(monkeypatch):
    monkeypatch.setattr(compiler, "optimized", lambda ir_text, isa: burn(0.4))
    monkeypatch.setattr(compiler, "_target_machine", lambda isa: Machine())
    compiler.object_code("", None)

class Machine:
    def emit_object(self, module): return b""

@pytest.fixture
def own(): burn(0.3)
def test_own(own): pass

def test_slowed_down():
    "Only in the process that measures first, as by a neighbour."
    burn(0 if "LOWBIT_TEST_CPU_MEASURED" in os.environ else 0.3)
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with ITEMS, which fail beyond 0.21 seconds, also when they are measured again."""
    helpers = Path(cpu_budget.__file__).parent
    pytester.makeini(
        f"[pytest]\npythonpath = {helpers}\naddopts = -p cpu_budget --cpu-limit 0.14\n"
        "markers =\n    deep: takes long"
    )
    pytester.makeconftest(
        """
def pytest_addoption(parser):
    parser.addoption("--empty-cache", action="store_true")
    parser.addoption("--all-combinations", action="store_true")
"""
    )
    pytester.makepyfile(ITEMS)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(cpu_budget, "TOLERANCE", 1.5)
    monkeypatch.setattr(cpu_budget, "SECOND", 1e9)  # as if this machine were a fast one
    return pytester


@pytest.mark.deep
def test_what_takes_long_without_a_mark_fails(inner: pytest.Pytester) -> None:
    outcome = inner.runpytest_inprocess("-q")
    failed = {"test_long", "test_child", "test_shared", "test_own", "test_compiles_much"}
    text = outcome.stdout.str()
    assert {name for name in failed if f"::{name} takes too much CPU time" in text} == failed
    outcome.assert_outcomes(passed=15, errors=5)
    assert "shared 0." in text


def test_marks_of_parameters_select(inner: pytest.Pytester) -> None:
    def collected(mark: str) -> set[str]:
        lines = inner.runpytest_inprocess("--collect-only", "-q", "-m", mark).outlines
        return {line.partition("::")[2] for line in lines if "::" in line}

    deep = collected("deep")
    assert deep == {
        "test_marked", "test_some[huge-large]", "test_some[huge-small]", "test_some[thin-large]",
    }  # fmt: skip
    assert collected("not deep").isdisjoint(deep)
    assert "test_some[thin-small]" in collected("not deep")


def test_times_are_written_down(inner: pytest.Pytester, tmp_path: Path) -> None:
    times = tmp_path / "times"
    options = ("-q", "--cpu-limit", "0", "--cpu-times", str(times))
    outcome = inner.runpytest_inprocess(*options, "-k", "shared or short")
    outcome.assert_outcomes(passed=3, deselected=12)
    rows = {name.partition("::")[2]: parts for name, _, parts in map(json.loads, times.open())}
    assert max(rows["test_short"].values()) < 0.2
    assert rows["test_shared"]["shared"] > 0.25 > rows["test_shared"][cpu_budget.ITSELF]
    assert rows["test_shared_again"].keys() == {cpu_budget.ITSELF, cpu_budget.LLVM}


@pytest.mark.parametrize("counts", [(3, 1, 4, 2), (2, 2, 2), (5, 3, 4)])
def test_every_two_values_meet_whatever_is_drawn(counts: tuple[int, ...]) -> None:
    draws = [covering(counts, seed) for seed in range(4)]
    for chosen in draws:
        for first, second in combinations(range(len(counts)), 2):
            met = {(places[first], places[second]) for places in chosen}
            assert met == set(product(range(counts[first]), range(counts[second])))
        assert len(chosen) < len(set(product(*map(range, counts)))) or counts == (2, 2, 2)
    assert len({frozenset(chosen) for chosen in draws}) > 1


def test_halves_of_two_parameters_take_turns() -> None:
    even, odd = covering((3, 5), 0), covering((3, 5), 1)
    assert even.isdisjoint(odd)
    assert even | odd == set(product(range(3), range(5)))


def test_so_many_items_are_drawn(pytester: pytest.Pytester) -> None:
    helpers = Path(cpu_budget.__file__).parent
    pytester.makeini(
        f"[pytest]\npythonpath = {helpers}\naddopts = -p drawn_parameters\n"
        "markers =\n    drawn(count): so many\n    pairs: some"
    )
    pytester.makepyfile("""
import pytest

@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(10))
def test_some(number): pass

@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(2))
def test_few(number): pass

def test_always(): pass
""")
    drawn = set[str]()
    for seed in range(12):
        outcome = pytester.runpytest_inprocess("-v", "--draw", str(seed))
        outcome.assert_outcomes(passed=6, deselected=7)
        drawn.update(line.partition(" ")[0] for line in outcome.outlines if " PASSED" in line)
    assert len(drawn) > 10, "the same items in every run"
    pytester.runpytest_inprocess("--all-combinations").assert_outcomes(passed=13)
