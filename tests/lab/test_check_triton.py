"""The checker of Triton kernels: the teaching kernels, the report, bad input, foreign versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float16, Float32, Int32
from triton import knobs
from triton.runtime import interpreter

from lowbit.kernels.triton.registry import teaching_kernels
from lowbit.spec import Operation, exercises
from lowbit.spec.cases import cases_of, size_sets, tile_sets
from lowbit_lab import check, trace_kernel

EXERCISES = list(exercises.exercises)


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N0"], meta["B0"]),)


@triton.jit
def add(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def read_past_the_end(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0, mask=i < N0)


def test_every_operation_has_a_teaching_kernel() -> None:
    assert len(EXERCISES) == 12
    assert list(teaching_kernels()) == [operation.name for operation in EXERCISES]


@pytest.mark.deep(
    "long_*",
    "*_blocks",
    "*_relu*",
    "flash_attention",
    "batched_matmul",
    "quantized_matmul",
    "conv2d",
)
@pytest.mark.parametrize("operation", EXERCISES, ids=str)
def test_teaching_kernels_are_right(operation: Operation) -> None:
    kernel = teaching_kernels()[operation.name]
    result = check(kernel.kernel, operation, grid=kernel.grid, device="cpu")
    assert not result.findings, str(result)
    assert result.cases >= 19


@pytest.mark.deep
def test_a_finding_says_where_and_what() -> None:
    result = check(read_past_the_end, exercises.add_constant_blocks, grid=blocks, device="cpu")
    (finding,) = result.findings
    assert finding.kind == "out-of-bounds-load"
    assert (finding.tensor, finding.index, finding.program) == ("x", (200,), (6, 0, 0))
    assert finding.masked is False
    assert finding.place is not None
    assert finding.place.file == __file__
    assert finding.sizes == {"N0": 200}
    plain = json.loads(result.to_json())
    assert plain["ok"] is False
    assert plain["findings"][0]["place"]["line"] == finding.place.line
    assert "x has 200 elements" in str(result)
    assert "reads outside of a tensor" in result._repr_html_()


@pytest.mark.deep
def test_wrong_values_name_the_element_and_its_program() -> None:
    @triton.jit
    def wrong_from_100_on(x_ptr, z_ptr, N0, B0: tl.constexpr):
        i = tl.program_id(0) * B0 + tl.arange(0, B0)
        x = tl.load(x_ptr + i, mask=i < N0)
        tl.store(z_ptr + i, tl.where(i < 100, x + 10.0, 1e30), mask=i < N0)

    (finding,) = check(
        wrong_from_100_on, exercises.add_constant_blocks, grid=blocks, device="cpu"
    ).findings
    assert finding.kind == "wrong-values"
    assert (finding.index, finding.program, finding.count) == ((100,), (3, 0, 0), 100)
    assert finding.got == np.float32(1e30)
    assert finding.expected is not None
    assert abs(finding.expected - 10) < 10


@pytest.mark.deep
def test_a_load_that_relies_on_masked_lanes_is_an_error() -> None:
    @triton.jit
    def total(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
        i = tl.program_id(0)
        z = tl.zeros((B1,), tl.float32)
        for start in range(0, T, B1):
            j = start + tl.arange(0, B1)
            z += tl.load(x_ptr + i * T + j, mask=j < T)
        tl.store(z_ptr + i, tl.sum(z, axis=0))

    result = check(total, exercises.long_sum, grid=lambda meta: meta["N0"], device="cpu")
    assert result.kinds == ("undefined-lanes",)
    place = result.findings[0].place
    assert place is not None
    assert "tl.load" in Path(place.file).read_text().splitlines()[place.line - 1]


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [Float16, BFloat16, Int32], ids=lambda d: d.dtypes[0])
def test_other_dtypes(dtype: Any) -> None:
    def twice(x):
        return x + x

    kind = dtype[np.ndarray, "N0"]
    twice.__annotations__ = {"x": kind, "return": kind}

    @triton.jit
    def kernel(x_ptr, z_ptr, N0, B0: tl.constexpr):
        i = tl.program_id(0) * B0 + tl.arange(0, B0)
        x = tl.load(x_ptr + i, mask=i < N0).to(tl.float32)
        tl.store(z_ptr + i, x + x, mask=i < N0)

    @triton.jit
    def integers(x_ptr, z_ptr, N0, B0: tl.constexpr):
        i = tl.program_id(0) * B0 + tl.arange(0, B0)
        x = tl.load(x_ptr + i, mask=i < N0)
        tl.store(z_ptr + i, x // 2 + (x - x // 2), mask=i < N0)

    def same(x):
        return x

    same.__annotations__ = twice.__annotations__
    if dtype is Int32:
        result = check(integers, same, grid=blocks, device="cpu")
    else:
        result = check(kernel, twice, grid=blocks, device="cpu")
    assert result.ok, str(result)


def test_trace_records_every_lane() -> None:
    trace = trace_kernel(add, exercises.add_constant_blocks, grid=blocks, sizes={"N0": 40})
    assert trace.grid == (2, 1, 1)
    assert [(a.kind, a.tensor, a.program[0], a.step) for a in trace.accesses] == [
        ("load", "x", 0, 0),
        ("store", "z", 0, 1),
        ("load", "x", 1, 0),
        ("store", "z", 1, 1),
    ]
    last = trace.accesses[-1]
    assert list(last.elements) == [*range(32, 40), *[-1] * 24]
    assert last.active.sum() == 8
    assert not last.outside.any()
    first = trace.accesses[0].values
    assert np.array_equal(trace.accesses[1].values, first + np.float32(10))
    assert trace.bytes("load") == trace.bytes("store") == 160
    assert trace.least_bytes == 320
    assert np.array_equal(trace.reads("x"), np.ones(40))
    assert last.place is not None
    assert "tl.store" in trace.source.splitlines()[last.place.line - trace.first_line]


def test_trace_counts_products_and_reuse() -> None:
    kernel = teaching_kernels()["batched_matmul"]
    sizes = {"N2": 2, "N0": 20, "MID": 33, "N1": 17}
    trace = trace_kernel(kernel.kernel, kernel.operation, grid=kernel.grid, sizes=sizes)
    assert len(trace.products) == 2 * 2 * 2 * 3
    assert {one.values.shape for p in trace.products for one in p.operands} == {(16, 16)}
    assert (trace.reads("x") == 2).all()


def test_sizes_are_ragged_prime_and_one() -> None:
    sets = size_sets(exercises.long_sum, [32])
    assert sets[0] == {"N0": 4, "T": 200}
    assert {"N0": 1, "T": 1} in sets
    assert any(s["T"] % 32 for s in sets)
    assert any(s["T"] % 32 == 0 for s in sets)
    assert all(s["MID"] % 64 == 0 for s in size_sets(exercises.quantized_matmul, [16]))


def test_of_a_size_with_a_program_for_each_index_few_are_tried_where_others_are_long() -> None:
    def longest(single: tuple[str, ...]) -> int:
        cases = cases_of(exercises.long_sum, [32], strided=False, long=True, single=single)
        return max(case.sizes["N0"] for case in cases if case.sizes["T"] == 1)

    assert longest(()) == 1031
    assert longest(("N0",)) < 20
    assert {s["N0"] for s in tile_sets(exercises.long_sum, [32], ("N0",))} == {6}
    assert min(s["N0"] for s in tile_sets(exercises.long_sum, [32])) > 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": -1}, "must be one to three numbers"),
        ({"grid": lambda meta: (1, 2, 3, 4)}, "must be one to three numbers"),
        ({"output": "y"}, "must be an input: x"),
        ({"BLOCK": 3}, "no parameter 'BLOCK'"),
        ({"device": "tpu"}, "must be cpu or cuda"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    wanted = {"grid": blocks, "device": "cpu", **arguments}
    with pytest.raises(ValueError, match=message):
        check(add, exercises.add_constant_blocks, **wanted)


def test_kernels_that_do_not_fit() -> None:
    @triton.jit
    def strange(x_ptr, z_ptr, how_many):
        pass

    with pytest.raises(ValueError, match="'how_many' is not understood"):
        check(strange, exercises.add_constant)
    with pytest.raises(ValueError, match="no parameter of the kernel is the result"):
        check(add, exercises.add_constant_blocks, grid=blocks, z_ptr=1)
    with pytest.raises(TypeError, match="cannot check"):
        check(print, exercises.add_constant)


def test_specifications_that_do_not_fit() -> None:
    def plain(x: int) -> int:
        return x

    def bare(x):
        return x

    def many(x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "N0"]:
        return x

    def reduced(x: Float32[np.ndarray, "N0"]) -> Float32[np.ndarray, "N0"]:
        return x[1:]

    for spec, error, message in (
        (plain, TypeError, "write it in jaxtyping's form"),
        (bare, TypeError, "has no annotation"),
        (many, (TypeError, ValueError), "not understood|jaxtyping"),
        (reduced, ValueError, "returned the shape"),
    ):
        with pytest.raises(error, match=message):
            check(add, spec, grid=blocks, device="cpu")


def _language() -> list[Any]:
    index = getattr(tl.tensor, "__index__", None)
    return [tl.load, tl.sum, tl.core.load, tl.math.exp2, tl.tensor.sum, index]


@pytest.mark.deep
def test_the_process_is_left_as_it_was() -> None:
    before = _language()
    check(add, exercises.add_constant_blocks, grid=blocks, device="cpu")
    assert _language() == before
    assert not knobs.runtime.interpret
    with pytest.raises(RuntimeError, match="Cannot call"):
        tl.zeros_like(1)
    assert "interpreter_semantic" not in globals()


@triton.jit
def read_either(x_ptr, y_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    pointers = tl.where(i % 2 == 0, x_ptr + i, y_ptr + i)
    tl.store(z_ptr + i, tl.load(pointers, mask=i < N0), mask=i < N0)


@pytest.mark.deep
def test_lanes_of_one_load_may_be_of_two_tensors() -> None:
    def either(
        x: Float32[np.ndarray, "N0"], y: Float32[np.ndarray, "N0"]
    ) -> Float32[np.ndarray, "N0"]:
        return np.where(np.arange(len(x)) % 2 == 0, x, y)

    assert check(read_either, either, grid=blocks, device="cpu").ok


STEP = tl.constexpr(10)


@triton.jit
def add_step(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + STEP, mask=i < N0)


@pytest.mark.deep
def test_a_text_is_read_once_and_sees_globals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    read, rewrite = list[str](), interpreter.FunctionRewriter.rewrite_ast

    def counted(self: Any) -> Any:
        read.append(self.fn.__name__)
        return rewrite(self)

    monkeypatch.setattr(interpreter.FunctionRewriter, "rewrite_ast", counted)
    assert check(add_step, exercises.add_constant_blocks, grid=blocks, device="cpu").ok
    assert read == ["add_step"]
    monkeypatch.setitem(globals(), "STEP", tl.constexpr(11))
    assert not check(add_step, exercises.add_constant_blocks, grid=blocks, device="cpu").ok
    assert read == ["add_step"]


@pytest.mark.parametrize("version", ["2.1", "3.5.1", "3.10.0", "4.0", "main"])
def test_a_foreign_version_gives_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    known = rf"lowbit's checker knows Triton 3\.6 to 3\.9; this is {version}: pip install 'triton>"
    with pytest.raises(RuntimeError, match=known) as raised:
        check(add, exercises.add_constant_blocks, grid=blocks, device="cpu")
    assert "\n" not in str(raised.value)


def test_a_version_that_is_another_one_inside_gives_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(interpreter, "FunctionRewriter")
    known = "knows Triton 3.6 to 3.9; this is .* inside .*FunctionRewriter.*: pip install"
    with pytest.raises(RuntimeError, match=known) as raised:
        check(add, exercises.add_constant_blocks, grid=blocks, device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.deep
def test_under_triton_interpret() -> None:
    code = (
        "from lowbit_lab import check; from lowbit.kernels.triton.registry import teaching_kernels;"
        "t = teaching_kernels()['long_sum']; print(check(t.kernel, t.operation, grid=t.grid).ok)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
