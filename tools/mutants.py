"""Plant faults in lowbit, one at a time, and say which tests find them.

    python tools/mutants.py [NAME ...]      try these mutations, or all
    python tools/mutants.py --list          print them and what they are
    python tools/mutants.py --unmutated     only run the tests that are expected to find them

tools/mutants.toml holds the mutations: a text of src that occurs once, what stands in its place,
and the tests in which the fault should be found. A mutation is applied to a copy of src in a
temporary folder, and the tests of this checkout are run on that copy. A fault is looked for

    in the expected tests that `make test` runs; unless that is enough, with
    --whole    in all tests that `make test` runs,
    --deep     in the expected tests that `make test-deep` runs, with --whole in all of them.

The last lines are a table: what found each fault. The exit status is 1 if `make test` did not find
one. tests/test_golden.py does not count: it compares kernels with what they were.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".toml")
SECONDS = 900.0  # that the expected tests of a mutation may take on a machine that others use too
SHORT = "not deep"
DEEP = "deep"
TOGETHER = ("-n", "3", "--dist", "worksteal")
COLLECTED_NOTHING = 5  # pytest's exit status
GOLDEN = "tests/test_golden.py"
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_CRASHED = re.compile(r'File ".*/(tests/\S+\.py)", line \d+ in (test_\w+)')


@dataclass(frozen=True)
class Mutant:
    """A fault that somebody could have made.

    file: in src. old: a text that occurs once in it; new: what takes its place. fault: what is
    wrong then. tests: files and folders of tests, or tests by their ids, that should find it.
    """

    name: str
    part: str
    file: str
    fault: str
    tests: tuple[str, ...]
    old: str
    new: str

    def mutated(self, text: str) -> str:
        """The file's text with the fault. ValueError: the old text does not occur once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: the old text occurs {count} times in src/{self.file}, not once: "
                f"write the mutation anew in {LIST.name}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    test: what found a fault, "" if nothing did. ran: whether there was a test to run.
    """

    test: str
    seconds: float
    output: str
    ran: bool = True


def mutants(names: Sequence[str] = (), path: Path = LIST) -> list[Mutant]:
    """The mutations of these names, or all. ValueError: a name is unknown, or stands twice."""
    with path.open("rb") as file:
        parts = tomllib.load(file)
    every = [
        Mutant(**{**entry, "part": part, "tests": tuple(entry["tests"])})
        for part, entries in parts.items()
        for entry in entries
    ]
    known = [mutant.name for mutant in every]
    for name in names:
        if name not in known:
            raise ValueError(f"no mutation is called {name!r}; --list prints all")
    if len(set(known)) < len(known):
        twice = next(name for name in known if known.count(name) > 1)
        raise ValueError(f"two mutations are called {twice!r}")
    return [mutant for mutant in every if not names or mutant.name in names]


class Copy:
    """A copy of src, in which one mutation at a time is applied."""

    def __init__(self, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(ROOT / "src", self.src)

    def apply(self, mutant: Mutant) -> None:
        """Plant a fault. Python compiles the file anew, since it is younger than what it knows."""
        path = self.src / mutant.file
        path.write_text(mutant.mutated(path.read_text()))

    def restore(self, mutant: Mutant) -> None:
        """Take the fault away, and what Python has compiled of it."""
        path = self.src / mutant.file
        shutil.copy2(ROOT / "src" / mutant.file, path)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(
        self, selection: str, tests: Sequence[str], limit: float, options: Sequence[str]
    ) -> Outcome:
        """Run tests of a selection on this copy until the first fails, for so many seconds."""
        environment = {**os.environ, "PYTHONPATH": str(self.src)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-m", selection, "--cpu-limit", "0",
            "-p", "no:cacheprovider", "--deselect", GOLDEN, *options, *tests,
        ]  # fmt: skip
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Outcome(f"no end after {limit:.0f} s", time.monotonic() - begin, output)
        seconds = time.monotonic() - begin
        if process.returncode in (0, COLLECTED_NOTHING):
            return Outcome("", seconds, output, ran=process.returncode == 0)
        return Outcome(failed_test(output, process.returncode), seconds, output)


def failed_test(output: str, status: int) -> str:
    """The test that pytest's output says has failed, or how else it ended."""
    if failed := _FAILED.search(output):
        return failed[1]
    if crashed := _CRASHED.search(output):
        return f"{crashed[1]}::{crashed[2]} (crash)"
    return f"exit status {status}: {output.strip().splitlines()[-1:]}"


def options_for(mutant: Mutant) -> tuple[str, ...]:
    """What pytest is told besides: faults of the code cache keep away from the one that tests
    keep."""
    return ("--empty-cache",) if mutant.file.startswith("lowbit/jit/") else ()


class Stage(NamedTuple):
    """A run of tests in which a fault is looked for, and what the table calls it."""

    name: str
    selection: str
    tests: tuple[str, ...]
    seconds: float
    options: tuple[str, ...]


def stages(mutant: Mutant, arguments: argparse.Namespace) -> Iterator[Stage]:
    """Where a fault is looked for, in this order."""
    limit = arguments.limit
    options = options_for(mutant)
    if arguments.draw is not None:
        options = ("--draw", str(arguments.draw), *options)
    single = ("-p", "no:xdist", *options)
    several = (*TOGETHER, *options)
    yield Stage("make test", SHORT, mutant.tests, limit, single)
    if arguments.whole:
        yield Stage("make test, elsewhere", SHORT, (), 8 * limit, several)
    if arguments.deep:
        yield Stage("only deep tests", DEEP, mutant.tests, 2 * limit, single)
    if arguments.deep and arguments.whole:
        yield Stage("only deep tests", DEEP, (), 8 * limit, several)


def tried(mutant: Mutant, copy: Copy, arguments: argparse.Namespace) -> tuple[str, str, float]:
    """What finds a mutation: the stage, "nobody" if none does; the test; the seconds it took."""
    total, note = 0.0, ""
    copy.apply(mutant)
    try:
        for stage in stages(mutant, arguments):
            outcome = copy.run(stage.selection, stage.tests, stage.seconds, stage.options)
            total += outcome.seconds
            if arguments.verbose:
                print(outcome.output, flush=True)
            if outcome.test:
                return stage.name, outcome.test, total
            if not outcome.ran:
                note = f"no test that is expected is {stage.selection}"
    finally:
        copy.restore(mutant)
    return "nobody", note, total


def check_unmutated(every: Sequence[Mutant], copy: Copy, limit: float) -> str:
    """Run all expected tests on the copy as it is; the test that fails, "" if none does."""
    tests = sorted({test for mutant in every for test in mutant.tests})
    outcome = copy.run(SHORT, tests, limit * len(every), TOGETHER)
    if outcome.test:
        print(outcome.output)
    return outcome.test


def listed(every: Sequence[Mutant]) -> None:
    """Print the mutations by their parts."""
    part = ""
    for mutant in every:
        if mutant.part != part:
            part = mutant.part
            print(f"\n{part}")
        print(f"  {mutant.name:38} src/{mutant.file}\n      {mutant.fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see which tests find them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutations, and end")
    parser.add_argument("--unmutated", action="store_true",
                        help="run the expected tests without a fault, and end")  # fmt: skip
    parser.add_argument("--whole", action="store_true",
                        help="run all tests where the expected ones find nothing")  # fmt: skip
    parser.add_argument("--deep", action="store_true",
                        help="run deep tests where the others find nothing")  # fmt: skip
    parser.add_argument("--limit", type=float, default=SECONDS, metavar="SECONDS",
                        help="for the expected tests of a mutation (%(default)s)")  # fmt: skip
    parser.add_argument("--draw", type=int, metavar="SEED",
                        help="what tests draw; else by the commit")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print what pytest says")
    arguments = parser.parse_args()
    try:
        every = mutants(arguments.names)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        listed(every)
        return 0
    with tempfile.TemporaryDirectory(prefix="lowbit-mutants-") as folder:
        copy = Copy(Path(folder))
        if arguments.unmutated:
            wrong = check_unmutated(every, copy, arguments.limit)
            print(f"without a fault {wrong} fails" if wrong else "without a fault all pass")
            return int(bool(wrong))
        rows: list[tuple[str, str, str]] = []
        for mutant in every:
            stage, test, seconds = tried(mutant, copy, arguments)
            print(f"{mutant.name}: {stage}, {seconds:.0f} s {test}", flush=True)
            rows.append((mutant.name, stage, test))
    print(f"\n{'mutation':38} {'found by':22} test")
    for row in rows:
        print("{:38} {:22} {}".format(*row))
    missed = sum(not stage.startswith("make test") for _, stage, _ in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} are found by make test")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
