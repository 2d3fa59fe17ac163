"""A suite is one file: options, cases, data, who can do them, and the page come from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

SUITE = '''
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lowbit_lab.bench.core.case import OURS, Case, Implementation, Problem, Ready, implementation
from lowbit_lab.bench.core.suite import Suite, option, suite
from lowbit.spec.operations.rows import row_sum


@suite
@dataclass(frozen=True)
class Sums(Suite):
    """Time sums of rows."""

    rows: int = option(3, "How many rows.")

    name: ClassVar[str] = "sums"

    def cases(self, seed=0):
        return [Case("row_sum", f"{self.rows}x40", sizes={"N": self.rows, "T": 40})]

    def make(self, case, seed):
        return Rows(case, seed)


class Rows(Problem):
    def __init__(self, case, seed):
        self.stated = row_sum.case(case.sizes)
        self.inputs = self.stated.inputs(seed)
        self.ideal = self.stated.expect(self.inputs).reference


@implementation("sums")
class Own(Implementation):
    name = "lowbit"
    kind = OURS

    def prepare(self, problem, threads):
        return Ready(partial(np.sum, problem.inputs["x"], axis=1))


@implementation("sums", 1, 0)
class Peer(Own):
    kind = "peer"
    package = "NumPy", "numpy"

    def __init__(self, axis):
        self.axis, self.name = axis, f"sum over axis {axis}"

    def prepare(self, problem, threads):
        return Ready(partial(problem.inputs["x"].sum, axis=self.axis))
'''
CODE = """import sys
sys.argv[0] = "lowbit"
import lowbit_lab.bench.suites
lowbit_lab.bench.suites.__path__.append({folder!r})
from lowbit.cli import main
main()
"""


@pytest.mark.deep
def test_one_file_is_a_command_a_page_and_a_record(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUITE)
    target = tmp_path / "record.json"
    arguments = ["--rows", "5", "--threads", "1", "--time-limit", "0.1", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(folder=str(tmp_path)), "bench", "sums", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "row_sum 5x40, 1 thread" in done.stdout
    refused = "sum over axis 0: the result has the shape (40,); expected (5,)"
    assert refused in done.stdout
    ours, peer = json.loads(target.read_text())["benchmarks"]
    assert (ours["implementation"], peer["implementation"]) == ("lowbit", "sum over axis 1")
    assert (ours["operations"], ours["bytes"]) == (5 * 40, 4 * (5 * 40 + 5))
    assert (ours["library"], peer["library"]) == ("lowbit", "NumPy")
    assert 0 <= peer["error"] < 1e-5
    assert peer["best_peer"]
