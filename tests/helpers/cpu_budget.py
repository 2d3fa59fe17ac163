"""A pytest plugin: an item that takes long is marked `deep`, or fails.

Half of the suite's time was once in 3 % of its items. So an item of `make test` may take a second
of CPU time (its own and its children's) with an empty code cache, on the machine that SECOND is
about, and in proportion on slower ones. What takes longer is marked

    @pytest.mark.deep                     all items of a test, or of a file by `pytestmark`
    @pytest.mark.deep("resnet*", "*-u4")  those of a test whose ids match one of these patterns

and is run by `make test-deep`. Not counted are imports, which whoever comes first pays for, and
fixtures that tests share, which have the same limit to themselves. An item that is over the limit
is measured again in a process of its own, with empty caches, before it fails: a neighbour of this
machine may have slowed it down.
"""

from __future__ import annotations

import _frozen_importlib
import fnmatch
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIMIT = 1.0
SECOND = 0.045  # CPU seconds of `_reference_work` on a Zen 4 whose other hyperthread is busy
_MEASURED = "LOWBIT_TEST_CPU_MEASURED"  # names the file for what a second measurement gives


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        default=LIMIT,
        help="CPU seconds of an item that is not marked deep; 0: no limit, as under valgrind",
    )
    parser.addoption("--cpu-times", metavar="FILE", help="append each item's CPU seconds, as JSON")


def is_deep(item: pytest.Item) -> bool:
    """Whether an item has the mark, by its test or by the ids of its parameters."""
    ids = item.name.partition("[")[2].removesuffix("]")
    for mark in item.iter_markers("deep"):
        if not mark.args or any(fnmatch.fnmatchcase(ids, pattern) for pattern in mark.args):
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(config), "cpu-budget")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace marks of some parameters by one of the item, so that `-m deep` means just those."""
    for item in items:
        deep = is_deep(item)
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "deep"]
        if deep:
            item.add_marker("deep")


class Budget:
    """Measures items, one after the other."""

    def __init__(self, config: pytest.Config) -> None:
        self.limit = float(config.getoption("--cpu-limit") or 0)
        self.times: str | None = config.getoption("--cpu-times")
        self.measured = os.environ.get(_MEASURED)
        self.imports = ImportClock()
        self.started = 0.0
        self.shared: dict[str, float] = {}  # CPU seconds of the fixtures that this item set up

    def seconds(self) -> float:
        return cpu_seconds() - self.imports.seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.shared = {}
        self.started = self.seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        before = self.seconds() - sum(self.shared.values())
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                taken = self.seconds() - sum(self.shared.values()) - before
                self.shared[fixturedef.argname] = taken

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            own = self.seconds() - self.started - sum(self.shared.values())
            parts = {"the test itself": own, **self.shared}
            self.record(item, parts)
            over = self.too_long(item, parts)
            if over and report.passed:
                report.outcome = "failed"
                report.longrepr = over
        return report

    def record(self, item: pytest.Item, parts: dict[str, float]) -> None:
        """Write down what an item took, for whoever asked."""
        line = json.dumps([item.nodeid, is_deep(item), parts])
        for path in filter(None, (self.times, self.measured)):
            with open(path, "a") as file:
                file.write(line + "\n")

    def too_long(self, item: pytest.Item, parts: dict[str, float]) -> str:
        """What is over the limit twice, as a message; "" for nothing."""
        if not self.limit or self.measured or is_deep(item):
            return ""
        limit = self.limit * slowness()
        if max(parts.values()) <= limit:
            return ""
        again = measured_alone(item)
        over = {name: taken for name, taken in parts.items() if min(taken, again) > limit}
        if not over:
            return ""
        causes = ", ".join(f"{name} {taken:.2f} s" for name, taken in over.items())
        return (
            f"{item.nodeid} takes more than {limit:.2f} s of CPU time: {causes}; alone {again:.2f} "
            f"s. Make it smaller, or mark it `deep` (tests/helpers/cpu_budget.py)."
        )


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class ImportClock:
    """The CPU seconds that imports took in the main thread since it was made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        importlib: Any = _frozen_importlib
        self._find_and_load: Callable[..., Any] = importlib._find_and_load
        importlib._find_and_load = self._timed  # what `import` calls for a new module

    def _timed(self, *arguments: Any) -> Any:
        __tracebackhide__ = True
        if self._depth or threading.current_thread() is not threading.main_thread():
            return self._find_and_load(*arguments)
        self._depth = 1
        before = cpu_seconds()
        try:
            return self._find_and_load(*arguments)
        finally:
            self.seconds += cpu_seconds() - before
            self._depth = 0


@cache
def slowness() -> float:
    """How many times as long as on the reference this machine takes; never less than 1."""
    times = []
    for _ in range(3):
        before = cpu_seconds()
        _reference_work()
        times.append(cpu_seconds() - before)
    return max(1.0, min(times) / SECOND)


def _reference_work() -> None:
    """What tests do most outside of LLVM: Python with attributes, calls and dictionaries."""
    table: dict[int, str] = {}
    for number in range(500_000):
        table[number & 1023] = str(number)


def measured_alone(item: pytest.Item) -> float:
    """The most that a part of the item takes in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory(prefix="lowbit-alone-") as folder:
        measured = Path(folder) / "measured"
        environment = {**os.environ, _MEASURED: str(measured), "PYTEST_ADDOPTS": ""}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--empty-cache"]
        subprocess.run(
            [*command, f"{item.path}{item.nodeid.removeprefix(item.nodeid.split('::')[0])}"],
            cwd=item.config.rootpath,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if not measured.exists():
            return float("inf")  # it does not run alone: what was measured first counts
        _, _, parts = json.loads(measured.read_text().splitlines()[-1])
        return max(parts.values())
