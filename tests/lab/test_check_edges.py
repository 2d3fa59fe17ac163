"""The checker at the edges: tensors of no dimensions or elements, bools, what an interpreter cannot
run, and how soon an error is said."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import BFloat16, Bool, Float32, Int8, UInt64
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.spec import Operation, operation
from lowbit_lab import check, check_file
from lowbit_lab.languages.triton import TritonKernel

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


def copied(dtype: Any, dims: str) -> Operation:
    def same(x):
        return x

    same.__annotations__ = {"x": dtype[np.ndarray, dims], "return": dtype[np.ndarray, dims]}
    return operation()(same)


def chosen(x: Float32[np.ndarray, "N"], m: Bool[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.where(m, x, 0)


@triton.jit
def copy_one(x_ptr, z_ptr):
    tl.store(z_ptr, tl.load(x_ptr))


@triton.jit
def copy(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def copy_first(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, tl.load(x_ptr), mask=i < N)


@triton.jit
def choose(x_ptr, m_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = tl.load(m_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.where(m, tl.load(x_ptr + i, mask=i < N), 0.0), mask=i < N)


def first(x: Float32[np.ndarray, ""], y: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + 0 * y.shape[0] + np.zeros(y.shape)


def with_nothing(
    x: Float32[np.ndarray, "N"], y: Float32[np.ndarray, "N//64"]
) -> Float32[np.ndarray, "N"]:
    return x


@pytest.mark.parametrize("dtype", [Float32, BFloat16, Int8, UInt64, Bool], ids=str)
def test_tensors_of_no_dimensions(dtype: Any) -> None:
    result = check(copy_one, copied(dtype, ""), device="cpu")
    assert result.ok, str(result)
    assert result.viewer is not None
    assert '"shape":[]' in result.viewer().json()


def test_a_wrong_result_of_no_dimensions() -> None:
    def doubled(x: Float32[np.ndarray, ""]) -> Float32[np.ndarray, ""]:
        return x * 2

    finding = check(copy_one, doubled, device="cpu").findings[0]
    assert (finding.kind, finding.index) == ("wrong-values", ())


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kernel", "spec"),
    [(copy, with_nothing), (copy_first, first), (choose, chosen), (copy, copied(Bool, "N"))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_empty_and_bool_and_scalar_inputs(kernel: Any, spec: Any) -> None:
    result = check(kernel, spec, grid=blocks, device="cpu")
    assert result.ok, str(result)


def test_a_function_of_a_scalar() -> None:
    torch = pytest.importorskip("torch")

    def function(x):
        return x.clone() if isinstance(x, torch.Tensor) else None

    result = check(function, copied(Float32, ""), device="cpu")
    assert result.ok, str(result)


@triton.jit
def stores_at_two_lines(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, x, mask=i < 20)
    tl.store(z_ptr + i, x * 3, mask=(i >= 20) & (i < N))  # the wrong one


@triton.jit
def adds_too_much(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(z_ptr + i, tl.load(x_ptr + i, mask=i < N) * 3, mask=i < N)  # the wrong one


@pytest.mark.deep
@pytest.mark.parametrize("kernel", [stores_at_two_lines, adds_too_much])
def test_wrong_values_name_the_line_that_stored_them(kernel: Any) -> None:
    given = {"initial": 0} if kernel is adds_too_much else {}
    finding = check(kernel, copied(Float32, "N"), grid=blocks, device="cpu", **given).findings[0]
    assert finding.kind == "wrong-values"
    lines, start = inspect.getsourcelines(TritonKernel.of(kernel).text)
    assert finding.place is not None
    assert "# the wrong one" in lines[finding.place.line - start]


@pytest.mark.deep
def test_wrong_values_of_a_function_name_the_line_of_the_kernel_or_of_torch() -> None:
    torch = pytest.importorskip("torch")

    def by_kernel(x):
        x = x.contiguous()
        z = torch.empty_like(x)
        stores_at_two_lines[(triton.cdiv(len(x), 32),)](x, z, len(x), B=32)
        return z

    def by_torch(x):
        z = torch.empty_like(x)
        z.copy_(x).mul_(2)  # the wrong one
        return z

    for function in (by_kernel, by_torch):
        finding = check(function, copied(Float32, "N"), device="cpu").findings[0]
        assert finding.kind == "wrong-values"
        assert finding.place is not None
        text = Path(finding.place.file).read_text().splitlines()[finding.place.line - 1]
        assert "# the wrong one" in text


FILE = """
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh


def spec(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.tanh(x)


@triton.jit
def mine(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    z = {expression}
    tl.store(z_ptr + i, z, mask=i < N)


def grid(meta):
    return (triton.cdiv(meta["N"], meta["B"]),)
"""
NUMBA = """
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.libdevice import fast_expf

from lowbit.spec.exercises import add_constant_blocks as spec

@cuda.jit
def kernel(x, z, N0):
    i = cuda.grid(1)
    if i < N0:
        z[i] = {expression}

def grid(meta):
    return -(-meta["N0"] // meta["threads"])
"""
ASSEMBLY = (
    "tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, "
    "is_pure=True, pack=1)"
)


@pytest.mark.deep("text5-libdevice.fast_expf(x[[]i])-numba.cuda.libdevice.fast_expf")
@pytest.mark.parametrize(
    ("text", "expression", "named"),
    [
        (FILE, "libdevice.tanh(x)", "triton.language.extra.libdevice.tanh"),
        (FILE, "tanh(x)", "triton.language.extra.libdevice.tanh"),
        (FILE, "tl.extra.cuda.libdevice.tanh(x)", "triton.language.extra.cuda.libdevice.tanh"),
        (FILE, "x + tl.extra.cuda.smid()", "extra.cuda.utils.smid"),
        (FILE, ASSEMBLY, "inline_asm"),
        pytest.param(NUMBA, "libdevice.fast_expf(x[i])", "numba.cuda.libdevice.fast_expf"),
        pytest.param(NUMBA, "fast_expf(x[i])", "numba.cuda.libdevice.fast_expf"),
        pytest.param(NUMBA, "cuda.shfl_sync(1, x[i], 1)", "has no cuda.shfl_sync"),
        pytest.param(NUMBA, "x[i:][0]", "single elements only"),
        pytest.param(NUMBA, "x.flat[i]", "x.flat: the checker follows single elements only"),
    ],
)
def test_what_the_interpreter_cannot_run_is_no_fault_of_the_kernel(
    text: str, expression: str, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text.format(expression=expression))
    result = CliRunner().invoke(app, ["check", str(file), "--device", "cpu"])
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    lines = file.read_text().splitlines()
    line = next(n for n, one in enumerate(lines, 1) if one.endswith(f" = {expression}"))
    assert f"(at mine.py:{line})" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_a_name_that_there_is_not_is_a_fault_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(expression="libdevice.nothing(x)"))
    assert check_file(file, "cpu").kinds == ("crash",)


def test_the_language_is_left_as_it_was() -> None:
    from triton.language.extra import libdevice

    before = libdevice.tanh, tl.extra.cuda.libdevice.tanh, tl.extra.cuda.smid
    check(copy_one, copied(Float32, ""), device="cpu")
    assert before == (libdevice.tanh, tl.extra.cuda.libdevice.tanh, tl.extra.cuda.smid)


FUNCTION = """
import torch

from lowbit.spec.exercises import add_constant_blocks as spec


def kernel(x):
    return x + {number}
"""


def test_a_file_whose_kernel_is_a_function_needs_no_grid(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "mine.py"
    file.write_text(FUNCTION.format(number=10))
    right = CliRunner().invoke(app, ["check", str(file), "--device", "cpu"])
    assert right.exit_code == 0, right.output
    file.write_text(FUNCTION.format(number=11))
    assert CliRunner().invoke(app, ["check", str(file), "--device", "cpu"]).exit_code == 1
    file.write_text(FUNCTION.format(number=10) + "grid = 3\n")
    refused = CliRunner().invoke(app, ["check", str(file)])
    assert (refused.exit_code, "leave out grid" in refused.stderr) == (2, True)
    file.write_text(FUNCTION.format(number=10).replace("(x)", "(x_ptr, z_ptr)"))
    refused = CliRunner().invoke(app, ["check", str(file)])
    assert (refused.exit_code, "a kernel needs @triton.jit" in refused.stderr) == (2, True)


WRONG = FILE.replace("np.tanh(x)", "x + 1").format(expression="x")


@pytest.mark.deep
def test_the_command_stops_at_the_first_error(tmp_path: Path) -> None:
    file, report = tmp_path / "mine.py", tmp_path / "report.json"
    file.write_text(WRONG)
    command = ["check", str(file), "--device", "cpu", "--json", str(report)]
    stopped = CliRunner().invoke(app, command)
    assert (stopped.exit_code, json.loads(report.read_text())[0]["cases"]) == (1, 1)
    assert "more cases were not tried" in stopped.stdout
    assert "--all goes on" in stopped.stderr
    whole = CliRunner().invoke(app, [*command, "--all"])
    assert whole.exit_code == 1
    assert json.loads(report.read_text())[0]["cases"] > 20
    assert "wrong values at mine.py:19" in whole.stderr, "the first error is said at once"


@pytest.mark.deep
def test_the_progress_is_told_case_by_case() -> None:
    told: list[tuple[str, int, int, str | None]] = []
    result = check(
        stores_at_two_lines,
        copied(Float32, "N"),
        grid=blocks,
        device="cpu",
        on_progress=lambda *step: told.append(step),
    )
    assert [done for _, done, _, _ in told] == list(range(1, result.cases + 1))
    assert {(kernel, of) for kernel, _, of, _ in told} == {("stores_at_two_lines", result.cases)}
    assert {error is not None for *_, error in told} == {True}


@pytest.mark.deep
def test_a_numba_check_is_told_from_its_own_process(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "mine.py"
    file.write_text(NUMBA.format(expression="x[i] + 10") + "print('hello')\n")
    told: list[int] = []
    result = check_file(file, "cpu", on_progress=lambda _, done, of, error: told.append(done))
    assert result.ok, str(result)
    assert told == list(range(1, result.cases + 1))
