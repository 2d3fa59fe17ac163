"""A pytest plugin: of tests whose items cost much, some, drawn by the commit.

    @pytest.mark.pairs      of two parameters half of the combinations, of more as many as let every
                            two values meet
    @pytest.mark.drawn(9)   nine of the items

Every commit draws others, and a run can be repeated: `--draw SEED`, as the header says.
`--all-combinations` takes all.
"""

from __future__ import annotations

import random
import subprocess
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-combinations", action="store_true", help="all items, none drawn")
    parser.addoption("--draw", type=int, metavar="SEED", help="which items; else by the commit")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.draw is None:  # workers are given the options of their controller
        config.option.draw = _commit(config)


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--all-combinations"):
        return "items that cost much: all"
    return f"items that cost much: drawn by --draw {config.getoption('--draw')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-combinations"):
        return
    seed = int(config.option.draw)
    gone = {item for item in items if item.get_closest_marker("pairs") and not _meets(item, seed)}
    for test, same in _by_test(items, "drawn").items():
        (count,) = same[0].get_closest_marker("drawn").args  # type: ignore[union-attr]
        chosen = random.Random(f"{seed} {test}").sample(same, min(count, len(same)))
        gone.update(item for item in same if item not in chosen)
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


def _by_test(items: list[pytest.Item], mark: str) -> dict[str, list[pytest.Item]]:
    """The items of each test that has a mark."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def _commit(config: pytest.Config) -> int:
    """A number of the checkout's commit; 0 where there is none."""
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"],
            cwd=config.rootpath,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(shown.stdout, 16)


def _meets(item: pytest.Item, seed: int) -> bool:
    """Whether its combination of parameters is one that is run."""
    params: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    marks = list(item.iter_markers("parametrize"))
    places = tuple(_place(mark, params) for mark in marks)
    return places in covering(tuple(len(mark.args[1]) for mark in marks), seed)


@cache
def covering(counts: tuple[int, ...], seed: int) -> set[tuple[int, ...]]:
    """Of so many values for each parameter, the places of the combinations that are run.

    Greedily: each time the combination of which most pairs of values are new.
    """
    every = list(product(*map(range, counts)))
    if sum(count > 1 for count in counts) < 3:
        return {places for places in every if (sum(places) + seed) % 2 == 0}
    random.Random(seed).shuffle(every)
    pairs = {places: set(combinations(enumerate(places), 2)) for places in every}
    missing = set().union(*pairs.values())
    chosen = set[tuple[int, ...]]()
    while missing:
        best = max(every, key=lambda places: len(pairs[places] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _place(mark: pytest.Mark, params: dict[str, Any]) -> int:
    """Of an item's parameters in the list of a mark. (Pytest's indices are of items.)"""
    names, values = mark.args[:2]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    for place, value in enumerate(values):
        if isinstance(value, type(pytest.param())):
            value = value.values
        elif len(names) == 1:
            value = (value,)
        if all(part is params[name] for name, part in zip(names, value, strict=True)):
            return place
    raise LookupError(f"{mark} has nothing that is {params}")
