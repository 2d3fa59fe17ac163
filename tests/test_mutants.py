"""The list of planted faults fits today's sources and tests (tools/mutants.py plants them)."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository_tools import tool

ROOT = Path(__file__).parent.parent
PARTS = {"kernels": 12, "jit": 4, "product": 6, "graph": 7, "numbers": 3, "checker": 6}
"""What is mutated, and how often at least."""


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return tool("mutants")


def test_every_mutation_can_be_planted(mutants: ModuleType) -> None:
    for mutant in mutants.mutants():
        text = (ROOT / "src" / mutant.file).read_text()
        mutated = mutant.mutated(text)
        assert mutated != text, mutant.name
        ast.parse(mutated, mutant.file)


def test_every_mutation_says_what_it_is_and_who_finds_it(mutants: ModuleType) -> None:
    for mutant in mutants.mutants():
        assert mutant.fault, mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).exists(), f"{mutant.name}: {test}"
            if function:
                text = (ROOT / path).read_text()
                assert f"\ndef {function}(" in text, f"{mutant.name}: {test}"


def test_all_parts_are_mutated(mutants: ModuleType) -> None:
    counts = dict.fromkeys(PARTS, 0)
    for mutant in mutants.mutants():
        counts[mutant.part] += 1
    assert all(counts[part] >= least for part, least in PARTS.items()), counts


def mutation(old: str) -> dict[str, Any]:
    return {
        "name": "planted",
        "part": "kernels",
        "file": "lowbit/api.py",
        "fault": "",
        "tests": (),
        "old": old,
        "new": "",
    }


@pytest.mark.parametrize(("text", "count"), [("", 0), ("x = 1\nx = 1\n", 2)])
def test_a_text_that_does_not_occur_once_is_refused(
    mutants: ModuleType, text: str, count: int
) -> None:
    mutant = mutants.Mutant(**mutation("x = 1"))
    with pytest.raises(ValueError, match=f"planted: the old text occurs {count} times"):
        mutant.mutated(text)


def test_names_are_known_and_unique(mutants: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no mutation is called 'nothing'"):
        mutants.mutants(["nothing"])
    entry = '[[jit]]\nname = "twice"\nfile = ""\nfault = ""\ntests = []\nold = ""\nnew = ""\n'
    path = tmp_path / "mutants.toml"
    path.write_text(entry + entry)
    with pytest.raises(ValueError, match="two mutations are called 'twice'"):
        mutants.mutants(path=path)


@pytest.mark.parametrize(
    ("output", "test"),
    [
        ("F\nFAILED tests/a.py::test_b[x - 1] - assert 1 == 2\n", "tests/a.py::test_b[x - 1]"),
        ("ERROR tests/a.py - ImportError: x\n", "tests/a.py"),
        ('Fatal Python error: Segmentation fault\n  File "/x/tests/a.py", line 3 in test_b\n',
         "tests/a.py::test_b (crash)"),
        ("Killed\n", "exit status 3: ['Killed']"),
    ],
)  # fmt: skip
def test_what_failed_is_read_from_pytests_output(
    mutants: ModuleType, output: str, test: str
) -> None:
    assert mutants.failed_test(output, 3) == test
