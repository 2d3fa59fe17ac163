"""A pytest plugin: an item that takes long is marked `deep`, or fails.

Half of the suite's time was once in 3 % of its items. So an item of `make test` may take a second
of CPU time (its own and its children's) with an empty code cache, on the machine that SECOND is
about, and in proportion on slower ones; it fails beyond one and a half. What takes longer is marked

    @pytest.mark.deep                     all items of a test, or of a file by `pytestmark`
    @pytest.mark.deep("resnet*", "*-u4")  those of a test whose ids match one of these patterns
    deep_fixtures = ("record",)           in a file: whatever uses one of these fixtures

and is run by `make test-deep`. What the first of several items pays for has limits of its own:
fixtures that tests share the same second, LLVM three (a program is compiled once, for all that use
it and for later runs), imports none. An item that is over a limit is measured again in a process of
its own, with empty caches, before it fails: a neighbour of this machine may have slowed it down.
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

from lowbit.jit import compile as compiler

LIMIT = 1.0
# An item fails beyond so many times its limit: no two runs take the same. CI, whose machine may be
# shared with anybody, fails only for what nobody can have overlooked here.
TOLERANCE = 3.0 if os.environ.get("CI") else 1.5
ITSELF, LLVM = (
    "the test itself",
    "LLVM",
)  # parts of an item; the others are fixtures, by their names
LLVM_SHARE = 3.0  # how many times the limit LLVM may take
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
    """Whether an item has the mark: by its test, the ids of its parameters or its fixtures."""
    fixtures = getattr(getattr(item, "module", None), "deep_fixtures", ())
    if not set(fixtures).isdisjoint(getattr(item, "fixturenames", ())):
        return True
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
        self.imports = CallClock(_frozen_importlib, "_find_and_load")  # of modules that are new
        self.llvm = CallClock(compiler, "object_code")
        self.started = self.llvm_before = 0.0
        self.shared: dict[str, float] = {}  # CPU seconds of the fixtures that this item set up

    def seconds(self) -> float:
        return cpu_seconds() - self.imports.seconds - self.llvm.seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.shared = {}
        self.started, self.llvm_before = self.seconds(), self.llvm.seconds
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
            parts = {ITSELF: own, LLVM: self.llvm.seconds - self.llvm_before, **self.shared}
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
        """What is over its limit twice, as a message; "" for nothing."""
        if not self.limit or self.measured or is_deep(item):
            return ""
        over = self.over(parts)
        if over:
            again = self.over(measured_alone(item))
            over = {name: seconds for name, seconds in over.items() if name in again}
        if not over:
            return ""
        causes = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in over.items())
        return (
            f"{item.nodeid} takes too much CPU time: {causes}, alone as well; the limit is "
            f"{self.limit * slowness():.2f} s, LLVM's {LLVM_SHARE:.0f} times that. Make it "
            f"smaller, or mark it `deep` (tests/helpers/cpu_budget.py)."
        )

    def over(self, parts: dict[str, float]) -> dict[str, float]:
        """The parts that are over their limits."""
        limit = self.limit * TOLERANCE * slowness()
        limits = {LLVM: limit * LLVM_SHARE}
        return {name: taken for name, taken in parts.items() if taken > limits.get(name, limit)}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CallClock:
    """The CPU seconds that the main thread spent in a function since this was made."""

    def __init__(self, module: Any, function: str) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._function: Callable[..., Any] = getattr(module, function)
        setattr(module, function, self._timed)

    def _timed(self, *arguments: Any) -> Any:
        __tracebackhide__ = True
        if self._depth or threading.current_thread() is not threading.main_thread():
            return self._function(*arguments)
        self._depth = 1
        before = cpu_seconds()
        try:
            return self._function(*arguments)
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


def measured_alone(item: pytest.Item) -> dict[str, float]:
    """The parts of an item in a process of its own, with empty caches."""
    _, _, name = item.nodeid.partition("::")
    with tempfile.TemporaryDirectory(prefix="lowbit-alone-") as folder:
        measured = Path(folder) / "measured"
        environment = {**os.environ, _MEASURED: str(measured), "PYTEST_ADDOPTS": ""}
        environment.pop("PYTEST_XDIST_WORKER", None)
        options = ["-q", "-p", "no:xdist", "--empty-cache", "--all-combinations"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"{item.path}::{name}"],
            cwd=item.config.rootpath,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if not measured.exists():
            raise RuntimeError(f"{item.nodeid} could not be measured alone")
        _, _, parts = json.loads(measured.read_text().splitlines()[-1])
        return parts
