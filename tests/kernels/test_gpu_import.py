"""What `import lowbit.gpu` says where Triton is another one than it is made for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")


def _imported(before: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys, triton\n{before}\nimport lowbit.gpu"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_right_one_is_silent() -> None:
    done = _imported("")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.1.0+git"])
def test_another_version_is_warned_of(version: str) -> None:
    done = _imported(f"triton.__version__ = {version!r}")
    assert done.returncode == 0
    assert (
        f"made for Triton 3.6 to 3.9 and this is {version}; in a clone of lowbit: pip install"
        in done.stderr
    )


def test_one_without_what_is_needed_is_refused_in_a_line() -> None:
    done = _imported("sys.modules['triton.tools.tensor_descriptor'] = None")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: lowbit.gpu is made for Triton 3.6 to 3.9 and this is 3.")
    assert "tensor_descriptor" in last
