"""The oldest versions that pyproject.toml allows, tried: `python tools/lower_bounds.py [FOLDER]`.

A virtual environment gets, of the core and of the extras below, exactly the version behind each
`>=`, and a part of the test suite runs in it. The exit code is that of pytest; what can't be
installed ends it, too.

PyTorch is left out: its oldest version has no build for the CPU where this project is tested, so
that what needs it is skipped, and its bound is not tried.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("onnx", "cli", "lm", "lab")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "threadpoolctl")
"""Of the newest versions: what runs the tests, and no user needs."""
TESTS = (
    "tests/jit/test_function.py",
    "tests/jit/test_builtin.py",
    "tests/numerics/test_qtensor.py",
    "tests/test_arguments.py",
    "tests/test_four_bits.py",
    "tests/graph/test_files.py",
    "tests/graph/test_refused.py",
    "tests/lm/test_chat.py",
    "tests/lm/test_tokenizer.py",
    "tests/lab/test_view.py::test_the_command",
    "tests/test_cli.py::test_info_json_holds_what_the_text_shows",
)
"""A minute's work: kernels of each kind are compiled, networks run, both languages of
the lab are read, and the command line prints."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,]+)\])?(?:>=([\w.]+))?[^;]*(?:;(.*))?")


def oldest(requirements: list[str], optional: dict[str, list[str]]) -> Iterator[str]:
    """The requirements as pins of the oldest version, and those of lowbit's extras that they name.

    ValueError: one has no lower bound."""
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
        assert match is not None, requirement
        name, extras, version, marker = match.groups()
        if name == "lowbit":
            for extra in extras.split(","):
                yield from oldest(optional[extra], optional)
        elif version is None:
            raise ValueError(f"{requirement!r} says no oldest version")
        elif marker is None or _holds(marker):
            yield f"{name}=={version}"


def _holds(marker: str) -> bool:
    """Whether a marker of pyproject.toml holds here: only these two kinds stand in it."""
    known = {"platform_machine": platform.machine(), "sys_platform": sys.platform}
    name, _, value = marker.partition("==")
    return known[name] == value.strip("'\"")


def pins() -> list[str]:
    """The oldest version of all that is tried, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], f"lowbit[{','.join(EXTRAS)}]"]
    return sorted(set(oldest(requirements, optional)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    folder = ROOT / "build" / "lower-bounds"
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="of the environment")
    folder = parser.parse_args().folder
    wanted = pins()
    print("the oldest versions:", ", ".join(wanted), flush=True)
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *wanted, *TOOLS], check=True)
    subprocess.run([*install, "--no-deps", "--editable", ROOT], check=True)
    # Limits of CPU time are those of the newest versions.
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "--cpu-limit=0", "-q"]
    command = [python, "-m", "pytest", *options, *TESTS]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
