"""Threads and start-up, each in a fresh process, since both are decided once for a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lowbit.isa import SETS, available

PRODUCT = """
import zlib, numpy as np, lowbit
rng = np.random.default_rng(0)
a = rng.integers(-128, 128, (300, 200)).astype(np.int8)
b = rng.integers(-128, 128, (200, 250)).astype(np.int8)
c = lowbit.matmul(a, b, threads={threads})
assert (c == a.astype(np.int64) @ b).all()
print(int(c.sum()), zlib.crc32(c.tobytes()))
"""


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _out(code: str, **environment: str) -> str:
    done = fresh(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_lowbit_imports_no_framework() -> None:
    code = "import sys, lowbit; print([m for m in ('torch', 'numba', 'rich') if m in sys.modules])"
    assert _out(code) == "[]"


def test_threads_of_each_call_serve_where_there_is_no_pytorch() -> None:
    code = PRODUCT.format(threads=3) + "from lowbit.jit import threads; print(threads.runtime())"
    assert _out(code).endswith("threads of each call")


def test_the_variable_is_obeyed_without_torch() -> None:
    code = "from lowbit.jit import threads; print(threads.max_threads())"
    assert _out(code, OMP_NUM_THREADS="1") == "1"
    assert _out(code, OMP_NUM_THREADS="3") == "3"


def test_torch_brings_the_runtime_and_its_setting() -> None:
    pytest.importorskip("torch")
    code = (
        "from lowbit.jit import threads; before = threads.runtime()\n"
        "import torch; torch.set_num_threads(3); print(threads.max_threads(), threads.runtime())\n"
        "torch.set_num_threads(1); print(threads.max_threads())\n" + PRODUCT.format(threads=3)
    )
    lines = _out(code).splitlines()
    assert lines[0].startswith("3 lib")
    assert lines[1] == "1"


def test_every_forced_set_gives_the_same_integers() -> None:
    code = PRODUCT.format(threads=2)
    assert len({_out(code, LOWBIT_ISA=name) for name in available()}) == 1


@pytest.mark.parametrize("name", ["sse9", *[n for n, one in SETS.items() if one.missing()][:1]])
def test_a_set_that_cannot_be_forced(name: str) -> None:
    done = fresh(PRODUCT.format(threads=1), LOWBIT_ISA=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"LOWBIT_ISA={name}" in last
    assert "generic" in last  # what there is


def test_many_calls_do_not_grow() -> None:
    """Addresses, plans, slots: nothing is kept for a call."""
    code = """
import resource, numpy as np, lowbit
b = lowbit.pack(np.ones((64, 32), np.int8)); a = np.ones((2, 64), np.uint8)
def many(n):
    for _ in range(n): lowbit.matmul(a, b)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
many(20000); before = many(20000); print(many(200000) - before)
"""
    assert int(_out(code)) < 1024  # KiB
