"""What the first use of a kernel says where Triton is missing, or another one than it is made for;
CPU tensors need none."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """import sys, torch
{before}
from lowbit.torch.functional import softmax
assert softmax(torch.zeros(2, 4)).eq(0.25).all()
from lowbit.kernels.triton import require_triton
require_triton()
"""


def _run(before: str) -> subprocess.CompletedProcess[str]:
    code = CODE.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.deep
def test_the_right_one_is_silent() -> None:
    done = _run("")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.1.0+git"])
def test_another_version_is_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what is asked once for a process is asked again."""
    import triton

    from lowbit.kernels.triton import require_triton

    monkeypatch.setattr(triton, "__version__", version)
    require_triton.cache_clear()
    said = f"made for Triton 3.6 to 3.9 and this is {version}; in a clone of lowbit: pip install"
    with pytest.warns(UserWarning, match=re.escape(said)):
        require_triton()
    monkeypatch.undo()
    require_triton.cache_clear()
    require_triton()


@pytest.mark.deep
def test_one_without_what_is_needed_is_refused_in_a_line() -> None:
    done = _run("sys.modules['triton.tools.tensor_descriptor'] = None")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: lowbit's kernels are made for Triton 3.6 to 3.9 and this")
    assert "tensor_descriptor" in last


@pytest.mark.deep
def test_none_is_missed_in_a_line_and_not_before() -> None:
    done = _run("sys.modules['triton'] = None")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: a kernel for GPUs needs triton; in a clone of")
    assert "pip install '.[gpu]'" in last
