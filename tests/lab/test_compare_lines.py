"""Lines of what a compiler emits are those of the statements in the file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("jaxtyping")

from lowbit_lab.compare.ptx.parse import Lines, parse, settled
from lowbit_lab.compare.run import compare

# Each load and store bears its kind at the end of the line on which its call begins.
KERNELS = """
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32


def spec(
    x: Float32[np.ndarray, "N K"], y: Float32[np.ndarray, "N K"]
) -> Float32[np.ndarray, "N K"]:
    return x * y + x


sizes = {"N": 64, "K": 512}
constants = {"B": 512}


def grid(size):
    return size["N"]


@triton.jit
def fetch(p, mask):
    # from memory

    return tl.load(p, mask=mask, other=0.0)  # load


@triton.jit
def apart(x, y, z, K, B: tl.constexpr):
    # where

    at = tl.program_id(0) * K + tl.arange(0, B)
    inside = tl.arange(0, B) < K

    # left
    a = tl.load(x + at, mask=inside, other=0.0)  # load

    # right


    b = tl.load(y + at, mask=inside, other=0.0)  # load
    # and out

    tl.store(z + at, a * b + a, mask=inside)  # store


@triton.jit
def over_lines(x, y, z, K, B: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, B)
    a = tl.load(  # load
        x + at,
        mask=tl.arange(0, B) < K,
        other=0.0,
    )
    b = (
        tl.load(y + at,  # load
                mask=tl.arange(0, B) < K,
                other=0.0)
    )
    tl.store(  # store
        z + at,
        a * b
        + a,
        mask=tl.arange(0, B) < K,
    )


@triton.jit
def called(x, y, z, K, B: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, B)

    a = fetch(x + at, tl.arange(0, B) < K)
    b = fetch(y + at, tl.arange(0, B) < K)
    tl.store(z + at, a * b + a, mask=tl.arange(0, B) < K)  # store


@triton.jit
def in_a_loop(x, y, z, K, B: tl.constexpr):
    row = tl.program_id(0) * K
    for start in range(0, K, 128):
        lanes = start + tl.arange(0, 128)

        a = tl.load(x + row + lanes, mask=lanes < K, other=0.0)  # load
        # between
        b = tl.load(y + row + lanes, mask=lanes < K, other=0.0)  # load

        tl.store(z + row + lanes, a * b + a, mask=lanes < K)  # store


@triton.jit
def least_twice(x, y, z, K, B: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, B)
    inside = tl.arange(0, B) < K
    a = tl.load(x + at, mask=inside, other=0.0)  # load
    b = tl.load(y + at, mask=inside, other=0.0)  # load
    low = tl.min(a, axis=0)  # shared

    # nothing here comes to anything
    high = tl.min(b, axis=0)  # shared
    tl.store(z + at, a * b + a + (low + high) * 0.0, mask=inside)  # store
"""


@pytest.mark.deep
def test_loads_and_stores_of_triton_have_the_lines_of_their_calls(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "variants.py"
    file.write_text(KERNELS)
    marks = {
        number: mark[1]
        for number, line in enumerate(KERNELS.splitlines(), 1)
        if (mark := re.search(r"# (load|store|shared)$", line))
    }
    fetched = next(n for n, line in enumerate(KERNELS.splitlines(), 1) if "return tl.load" in line)
    found = compare(file, time=False, sm=90)
    assert [one.name for one in found.variants] == [
        "apart", "over_lines", "called", "in_a_loop", "least_twice",
    ]  # fmt: skip
    for one in found.variants:
        own = range(one.built.first_line, one.built.first_line + len(one.built.lines))
        expected = {(n, kind) for n, kind in marks.items() if n in own and kind != "shared"}
        if one.name == "called":
            expected.add((fetched, "load"))
        seen = {
            (cost.line, "store" if cost.stores else "load")
            for cost in one.accesses
            if cost.space == "global"
        }
        assert seen == expected, one.name
        shared = {cost.line for cost in one.accesses if cost.space == "shared"}
        assert shared <= {n for n, kind in marks.items() if n in own and kind == "shared"}, one.name
        assert one.machine is not None
        if one.machine.sass is not None:
            machine = {
                (each.line, "store" if each.stores else "load")
                for each in one.machine.sass.instructions
                if each.kind == "memory" and each.space == "global"
            }
            assert machine == expected, one.name


SPILLS = """
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32


def spec(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + x


sizes, constants, grid = {"N": 8192}, {"B": 8192, "num_warps": 1}, 1


@triton.jit
def held(x, z, N, B: tl.constexpr):
    # many

    at = tl.arange(0, B)
    a = tl.load(x + at, mask=at < N, other=0.0)

    b = tl.load(x + N - 1 - at, mask=at < N, other=0.0)
    # all at once

    c = tl.sum(a * b, axis=0)

    # and again
    tl.store(z + at, a + a + b * c * 0.0, mask=at < N)
"""


@pytest.mark.deep
def test_a_spill_has_the_line_of_a_statement_or_none(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "variants.py"
    file.write_text(SPILLS)
    (held,) = compare(file, time=False, sm=90).variants
    spills = [one.line for one in held.faults if one.kind == "spill"]
    assert spills
    (kernel,) = (
        one
        for one in ast.parse(SPILLS).body
        if isinstance(one, ast.FunctionDef) and one.name == "held"
    )
    statements = {kernel.lineno, *(one.lineno for one in kernel.body)}
    assert {line for line in spills if line is not None} <= statements


BLOCKS = """
.version 8.0
.target sm_90
.visible .entry f(.param .u64 f_0)
{
    .loc 1 19 5
    add.s64 %rd3, %rd1, 4;
    .loc 1 20 9
    // begin inline asm
    .loc 1 20 9
    mov.u32 %r1, 0;
    .loc 1 21 9
    mov.u32 %r2, 0;
    .loc 1 22 9
    @%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
    // end inline asm
    // begin inline asm
    .loc 1 20 9
    mov.u32 %r3, 0;
    .loc 1 21 9
    @!%p1 ld.global.b32 { %r3 }, [ %rd2 + 0 ];
    // end inline asm
    add.s32 %r4, %r3, %r1;
    .loc 1 30 5
    // begin inline asm
    @%p1 st.global.b32 [ %rd3 + 0 ], { %r4 };
    // end inline asm
    .loc 1 0 0
    st.global.b32 [%rd2], %r4;
    ret;
}
.file 1 "f.py"
"""


def test_a_block_of_inline_assembly_is_its_statement() -> None:
    assert settled(settled(BLOCKS)) == settled(BLOCKS)
    code = parse(BLOCKS, "f.py").code
    lines = {one.text.split("%")[0].split()[0]: one.line for one in code.instructions}
    assert lines["ld.global.v2.b32"] == lines["ld.global.b32"] == lines["mov.u32"] == 20
    assert [one.line for one in code.instructions if one.opcode == "add.s32"] == [20]
    # The last is of line 0, which is nobody's.
    assert [one.line for one in code.instructions if one.stores] == [30, None]


def test_what_is_inlined_has_the_line_of_its_call_or_none() -> None:
    lines = Lines({1})
    seen = list[int | None]()
    for statement in (
        ".loc 1 54 9",
        ".loc 2 490 12, function_name $L1, inlined_at 1 54 9",
        ".loc 2 475 17, function_name $L2, inlined_at 2 490 12",
        ".loc 1 55 9",
        # Of line 54, though nobody says so again.
        ".loc 2 475 17, function_name $L2, inlined_at 2 490 12",
        ".loc 1 56 9",
        ".loc 2 490 12, function_name $L1, inlined_at 1 56 9",
        ".loc 2 475 17, function_name $L2, inlined_at 2 490 12",
        ".loc 1 57 9",
        # Of line 54 or 56.
        ".loc 2 475 17, function_name $L2, inlined_at 2 490 12",
        ".loc 1 0 0",
    ):
        lines.enter(statement)
        seen.append(lines.now)
    assert seen == [54, 54, 54, 55, 54, 56, 56, 56, 57, None, 0]
