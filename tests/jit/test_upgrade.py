"""Two versions of lowbit over one cache: an upgrade that changes no IR compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lowbit

# Products, a kernel over rows, and what enters machine code; each prints what it asked LLVM for.
WORK = """
import numpy as np
from lowbit.jit import compile as compiler

compiled = []
original = compiler.object_code

def counting(ir_text, isa):
    compiled.append(ir_text)
    return original(ir_text, isa)

compiler.object_code = counting
import lowbit

a = np.arange(3 * 70, dtype=np.uint8).reshape(3, 70)
b = np.arange(70 * 5, dtype=np.uint8).view(np.int8).reshape(70, 5)
assert (lowbit.matmul(a, b) == a.astype(int) @ b.astype(int)).all()
assert (lowbit.gemm(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)) == 3).all()
print(lowbit.__file__, len(compiled))
"""

pytestmark = pytest.mark.deep  # each version is a process that imports and compiles


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], Path]:
    """Puts a copy of the package into a folder of that name."""

    def copy(version: str) -> Path:
        assert lowbit.__file__
        source = Path(lowbit.__file__).parent
        shutil.copytree(source, tmp_path / version / "lowbit")
        return tmp_path / version

    return copy


def compiled_by(version: Path, cache: Path) -> int:
    """How many texts this version gave to LLVM."""
    done = subprocess.run(
        [sys.executable, "-c", WORK],
        env={**os.environ, "PYTHONPATH": str(version), "LOWBIT_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, count = done.stdout.split()
    assert file.startswith(str(version)), "another version ran"
    return int(count)


def append(version: Path, file: str, text: str) -> None:
    with (version / "lowbit" / file).open("a") as source:
        source.write(text)


def test_an_upgrade_compiles_what_is_new(install: Callable[[str], Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, same, changed = install("old"), install("same"), install("changed")
    append(same, "kernels/cpu/integer/product.py", "\n# A comment.\n")
    append(same, "isa/generic.py", "\n\ndef unused() -> None:\n    pass\n")
    append(same, "jit/compile.py", "\n# Another one.\n")
    append(changed, "jit/entry.py", "\n_MOST_ON_STACK = 1 << 15\n")
    count = compiled_by(old, cache)
    assert count > 3
    assert compiled_by(old, cache) == 0
    assert compiled_by(same, cache) == 0
    assert compiled_by(changed, cache) == 1
    assert compiled_by(old, cache) == 0, "another version took the place of this one's entries"
