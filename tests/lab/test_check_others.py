"""The checker of lowbit's CPU kernels, of Numba-CUDA kernels and of files, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float32, Int32, UInt8
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.isa.generic import load_head, reduce_add
from lowbit.isa.types import Int, S32Pointer, U8Pointer, s32
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.spec import from_function
from lowbit_lab import CpuKernel, check, check_file, trace_kernel
from lowbit_lab.checks.result import CheckResult
from lowbit_lab.run.bind import Parameter, TensorArgument, bind


def row_sum(a: UInt8[np.ndarray, "R T"]) -> Int32[np.ndarray, "R"]:
    return a.sum(axis=1)


@kernel
def row_sums(
    k: Builder, a: U8Pointer, stride: Int, z: S32Pointer, R: Int, T: Int, *, lanes: int, fault: str
) -> None:
    """z[r] = the sum of a[r, :T]; rows lie `stride` bytes apart."""
    whole = T // lanes * lanes
    for r in k.parallel(R):
        row = a + r * stride
        with k.scope():
            total = k.register(k.zeros(s32, lanes))
            for c in k.range(0, whole, lanes):
                total.value = total.value + (row + c).load(lanes).to(s32)
            for _ in k.when(whole < T):
                rest = load_head(row + whole, T - whole, lanes)
                total.value = total.value + rest.to(s32)
            at = z if fault == "race" else z + r
            at.store(reduce_add(total.value))


def _rows(fault: str, **given: Any) -> CheckResult:
    subject = CpuKernel(row_sums, "avx512", {"lanes": 16, "fault": fault})
    return check(subject, row_sum, **{"stride": lambda sizes: sizes["T"], **given})


@pytest.mark.deep
def test_a_right_cpu_kernel() -> None:
    result = _rows("none")
    assert result.ok, str(result)
    assert "avx512" in result.backend


@pytest.mark.deep
def test_a_cpu_kernel_that_leaves_its_array() -> None:
    result = _rows("none", stride=lambda sizes: sizes["T"] + 1)
    finding = result.findings[0]
    assert (finding.kind, finding.tensor) == ("out-of-bounds-load", "a")
    assert finding.place is not None
    assert finding.place.file == __file__


def test_a_cpu_kernel_is_not_for_the_gpu() -> None:
    with pytest.raises(ValueError, match="only Triton kernels are run on the GPU"):
        _rows("none", device="cuda")


@pytest.mark.deep
def test_items_of_a_cpu_kernel_that_race() -> None:
    assert {"write-conflict", "unwritten"} <= set(_rows("race").kinds)


def test_the_trace_of_a_cpu_kernel() -> None:
    trace = trace_kernel(
        CpuKernel(row_sums, "generic", {"lanes": 16, "fault": "none"}),
        row_sum,
        sizes={"R": 3, "T": 20},
        stride=20,
    )
    assert (trace.bytes("load"), trace.bytes("store"), trace.least_bytes) == (60, 12, 72)
    assert {access.program for access in trace.accesses} == {(1, 0), (1, 1), (1, 2)}


NUMBA = """
from numba import cuda, float32

from lowbit.spec.exercises import {operation} as spec

@cuda.jit
def kernel({parameters}):
{body}

def grid(meta):
    return {grid}

initial = {initial}
# Few: the simulator makes each one a thread of Python.
constants = {{"threads": {threads}}}
"""
ADD = {
    "operation": "add_constant_blocks",
    "parameters": "x, z, N0",
    "grid": '-(-meta["N0"] // meta["threads"])',
    "initial": None,
    "threads": 32,
}
SUM = {
    "operation": "long_sum",
    "parameters": "x, z, N0, T",
    "grid": 'meta["N0"]',
    "initial": None,
    "threads": 3,
}
THROUGH_SHARED = """
    partial = cuda.shared.array(3, float32)
    t = cuda.threadIdx.x
    partial[t] = 0
    for j in range(t, T, 3):
        partial[t] += x[cuda.blockIdx.x, j]
    cuda.syncthreads()
    if t == 0:
        for other in range(1, 3):
            partial[0] += partial[other]
        z[cuda.blockIdx.x] = partial[0]
"""
THROUGH_GLOBAL = """
    t = cuda.threadIdx.x
    if t == 0:
        z[cuda.blockIdx.x] = 0
    cuda.syncthreads()
    for j in range(t, T, 3):
        {add}
"""
PLAIN_ADD = "z[cuda.blockIdx.x] += x[cuda.blockIdx.x, j]"
UNSYNCHRONISED = THROUGH_SHARED.replace("    cuda.syncthreads()\n", "").replace("t == 0", "t == 2")
PAST_SHARED = THROUGH_SHARED.replace("partial[t] = 0", "partial[t + 1] = 0")
NEVER_ZEROED = THROUGH_SHARED.replace("    partial[t] = 0\n", "")
ATOMIC_ADD = "cuda.atomic.add(z, cuda.blockIdx.x, x[cuda.blockIdx.x, j])"


@pytest.mark.drawn(5)
@pytest.mark.deep
@pytest.mark.parametrize(
    ("body", "form", "finds"),
    [
        ("    i = cuda.grid(1)\n    if i < N0:\n        z[i] = x[i] + 10", ADD, None),
        (
            "    i = cuda.grid(1)\n    if i < N0:\n        z[i] = x[i] + 10",
            {**ADD, "parameters": "N0, z, x"},
            None,
        ),
        (
            "    i = cuda.grid(1)\n    if i <= N0:\n        z[i] = x[i] + 10",
            ADD,
            "out-of-bounds-store",
        ),
        ("    i = cuda.grid(1)\n    if i < N0 - 1:\n        z[i] = x[i] + 10", ADD, "unwritten"),
        ("    i = cuda.grid(1)\n    if i < N0:\n        z[i // 2] = x[i]", ADD, "write-conflict"),
        (THROUGH_SHARED, SUM, None),
        (UNSYNCHRONISED, SUM, "read-of-other"),
        (PAST_SHARED, SUM, "out-of-bounds-store"),
        (NEVER_ZEROED, SUM, "unwritten-read"),
        (THROUGH_GLOBAL.format(add=PLAIN_ADD), SUM, "read-of-other"),
        (THROUGH_GLOBAL.format(add=ATOMIC_ADD), SUM, None),
    ],
)
def test_numba_kernels(body: str, form: dict[str, Any], finds: str | None, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "kernel.py"
    file.write_text(NUMBA.format(body=body, **form))
    result = check_file(file)
    assert "simulator" in result.backend
    if finds is None:
        assert result.ok, str(result)
    else:
        assert finds in result.kinds, str(result)


TRITON = """
import triton
import triton.language as tl

from lowbit.spec.exercises import add_constant_blocks as spec


@triton.jit
def add(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10, mask=i {compare} N0)


def grid(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)
"""


@pytest.mark.deep
def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    file, report = tmp_path / "mine.py", tmp_path / "report.json"
    run = CliRunner().invoke
    file.write_text(TRITON.format(compare="<"))
    right = run(app, ["check", str(file), "--json", str(report), "--device", "cpu"])
    assert right.exit_code == 0, right.output
    assert "right" in right.output
    assert json.loads(report.read_text())[0]["ok"] is True
    file.write_text(TRITON.format(compare="<="))
    wrong = run(app, ["check", str(file), "--device", "cpu"])
    assert wrong.exit_code == 1
    assert "writes outside of a tensor at mine.py:11" in wrong.output
    named = run(app, ["check", "add_constant", "--device", "cpu"])
    assert (named.exit_code, "add_constant_kernel" in named.output) == (0, True)


@pytest.mark.deep("text7-line 15: AttributeError")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("spec = 1 +", "line 1: invalid syntax"),
        ("kernel = 1", "defines no `spec`"),
        ("from lowbit.spec.exercises import long_sum as spec", "it defines none"),
        ("raise KeyError('x')", "mine.py, line 1: KeyError: 'x'"),
        ("raise SystemExit(0)", "leaves Python (sys.exit)"),
        (
            TRITON.format(compare="<")
            .partition("def grid")[0]
            .replace("program_id(0)", "program_id(1)"),
            "there is no size N1; give `grid`",
        ),
        (TRITON.format(compare="<").replace("cdiv", "div"), "line 15: AttributeError"),
        (TRITON.format(compare="<") + "constants = 3", "constants is 3; it must be a dict"),
        (TRITON.format(compare="<") + "constants = {'B1': 3}", "no parameter 'B1'"),
        (TRITON.format(compare="<") + "spec = 3", "spec is 3; give an annotated function"),
        (TRITON.format(compare="<") + "grid = 'abc'", "the grid of add is 'abc'"),
        (TRITON.format(compare="<") + "def spec(x: 'Nothing'):\n    return x", "cannot be read"),
        (TRITON.format(compare="<") + "kernel = 5", "cannot check 5"),
        (TRITON.format(compare="<") + "@triton.jit\ndef b(z_ptr):\n    pass", "defines add, b"),
    ],
)
def test_a_file_that_cannot_be_checked(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_name_that_is_no_kernel() -> None:
    result = CliRunner().invoke(app, ["check", "long_product"])
    assert result.exit_code == 2
    assert "no kernel 'long_product'; there are add_constant, " in result.stderr


SHORT_INTEGERS = """
import numpy as np
from jaxtyping import Int8, Int32
from numba import cuda


def spec(x: Int8[np.ndarray, "N"], y: Int8[np.ndarray, "N"]) -> Int32[np.ndarray, "N"]:
    return x * y


@cuda.jit
def kernel(x, y, z, N):
    i = cuda.grid(1)
    if i < N:
        z[i] = x[i] * y[i]


def grid(meta):
    return -(-meta["N"] // meta["threads"])
"""


@pytest.mark.deep
def test_numba_multiplies_short_integers_in_64_bits(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "kernel.py"
    file.write_text(SHORT_INTEGERS)
    result = check_file(file)
    assert result.ok, str(result)


def test_the_result_may_have_any_name_beside_arrays_that_are_given() -> None:
    def total(x: Float32[np.ndarray, "N"], y: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
        return x + y

    names = ("x_ptr", "own", "y_ptr", "c_ptr", "stride_c0", "N")
    binding = bind([Parameter(n) for n in names], from_function(total), {"own": np.zeros(3)}, None)
    assert binding.sources["c_ptr"] == TensorArgument("z")
    assert binding.sources["stride_c0"] == ("z", 0)
