"""What runs while Python ends: calls by whatever outlives the modules, daemon threads."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# Every public function, each way to call it known, and what finds them as defaults: names of
# modules are gone by then.
CALLS = """
import builtins, logging, os, sys, threading, time
import numpy as np
import lowbit

rng = np.random.default_rng(0)
floats = rng.standard_normal((5, 64)).astype(np.float32)
integers = rng.integers(0, 256, (5, 64), dtype=np.uint8)
weight = rng.standard_normal((64, 32)).astype(np.float32)
int8 = lowbit.pack(lowbit.quantize(weight, "int8", axis=1))
int4 = lowbit.pack(lowbit.quantize(weight, "int4", axis=1))
index = lowbit.VectorIndex(64)
index.add(rng.standard_normal((100, 64)))
large = rng.integers(0, 256, (300, 64), dtype=np.uint8)

def calls(
    matmul=lowbit.matmul, scaled=lowbit.matmul_scaled, dynamic=lowbit.linear_dynamic,
    weight_only=lowbit.linear_weight_only, gemm=lowbit.gemm, search=index.search,
    floats=floats, integers=integers, weight=weight, int8=int8, int4=int4, large=large,
    error=Exception,
):
    for threads in (1, 2, 3):
        for call in (
            lambda: matmul(integers, int8, threads=threads),
            lambda: matmul(large, int8, threads=threads),
            lambda: scaled(integers, int8, a_scale=0.5, threads=threads),
            lambda: dynamic(floats, int8, threads=threads),
            lambda: weight_only(floats, int4, threads=threads),
            lambda: gemm(floats, weight, threads=threads),
            lambda: matmul(integers[:, ::2], weight, threads=threads),
            lambda: search(floats, 3),
        ):
            try:
                call()
            except error:  # Python's, since it has taken its modules apart
                pass

class Late:
    def __init__(self, name):
        self.name = name
    def __del__(self, calls=calls, write=os.write, range=range):
        for _ in range(3):
            calls()
        write(1, self.name.encode() + b"\\n")

for _ in range(3):
    calls()
"""

HOLDERS = {
    "its module": "holder = Late('end')",
    "sys": "sys.late = Late('end')",
    "another module": "threading.late = Late('end')",
    "a module of this library": "lowbit.late = Late('end')",
    "NumPy": "np.late = Late('end')",
    "builtins": "builtins.late = Late('end')",
    "a cycle": "cycle = [Late('end')]; cycle.append(cycle)",
    "a logging handler": """
handler = logging.NullHandler()
handler.late = Late('end')
logging.getLogger().addHandler(handler)
del handler
""",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_functions_may_be_called_while_python_ends(run_python: RunPython, holder: str) -> None:
    done = run_python(CALLS + HOLDERS[holder], PYTHONMALLOC="debug")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split() == ["end"]


def test_daemon_threads_may_call_when_python_ends(run_python: RunPython) -> None:
    code = """
def repeat():
    while True:
        calls()
for _ in range(4):
    threading.Thread(target=repeat, daemon=True).start()
time.sleep(0.2)
print("end")
"""
    done = run_python(CALLS + code)
    assert (done.returncode, done.stdout.split()) == (0, ["end"]), done.stderr
