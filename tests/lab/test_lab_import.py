"""The lab and its commands can be imported without what only some of them need."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = ("torch", "triton", "numba", "jaxtyping", "onnx")


@pytest.mark.parametrize("module", ["lowbit_lab", "lowbit.cli"])
def test_no_extra_is_needed_to_import(module: str) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"import {module}\n"
        "import lowbit_lab, lowbit_lab.checks.cases, lowbit_lab.views.run\n"
        "assert callable(lowbit_lab.check) and callable(lowbit_lab.view)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_do_without_what_only_some_need() -> None:
    """`lowbit generate` should begin soon."""
    code = "import sys, lowbit.cli; print({'rich', 'numpy', 'lowbit.spec'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr
