"""Comparing variants: PTX is run as a GPU would, faults are named with their lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxtyping")

from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import language_of
from lowbit_lab.backends.source import read
from lowbit_lab.compare import assembly, cuda_c, sass
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.code import mix
from lowbit_lab.compare.faults import occupancy, of_ptx
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.execute import Launch, Trace, costs, repeats
from lowbit_lab.compare.ptx.memory import Memory, OutsideError, packed_parameters
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.compare.run import compare
from lowbit_lab.compare.toolchain import MissingToolError, compile_cuda_c, library

FAULTS = Path(__file__).parent / "compared" / "faults.py"

# Each thread adds what the threads below it in the block hold, so many steps as its number: they
# part, meet again, and read each other's shared memory behind a barrier.
PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry sums(
    .param .u64 sums_param_0, .param .u64 sums_param_1, .param .u32 sums_param_2
)
{
    .reg .pred %p<3>;
    .reg .f32 %f<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    .shared .align 4 .b8 tile[256];
    .file 1 "sums.cu"
    .loc 1 3 1
    ld.param.u64 %rd1, [sums_param_0];
    ld.param.u64 %rd2, [sums_param_1];
    ld.param.u32 %r6, [sums_param_2];
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r7, %r1, %r6;
    mul.wide.u32 %rd3, %r7, 4;
    add.s64 %rd4, %rd1, %rd3;
    .loc 1 4 1
    ld.global.f32 %f1, [%rd4];
    mov.u32 %r2, tile;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    .loc 1 5 1
    st.shared.f32 [%r4], %f1;
    bar.sync 0;
    mov.f32 %f2, 0f00000000;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra $L_end;
$L_loop:
    .loc 1 7 1
    ld.shared.f32 %f3, [%r2];
    add.f32 %f2, %f2, %f3;
    add.s32 %r2, %r2, 4;
    add.s32 %r1, %r1, -1;
    setp.ne.s32 %p2, %r1, 0;
    @%p2 bra $L_loop;
$L_end:
    .loc 1 9 1
    mov.u32 %r5, %tid.x;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd2, %rd5;
    st.global.f32 [%rd6], %f2;
    ret;
}
"""


def launched(text: str, stride: int, size: int) -> tuple[Launch, Any, Any]:
    ptx, memory = parse(text, "sums.cu"), Memory()
    x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    z = np.full(64, np.nan, np.float32)
    values = [memory.place("x", x), memory.place("z", z), stride]
    kinds = {one.name: (one.letter, one.bits) for one in ptx.parameters}
    return Launch(ptx, memory, packed_parameters(kinds, values), (1, 1, 1), (64, 1, 1)), x, z


def test_threads_part_meet_and_wait_at_a_barrier() -> None:
    launch, x, z = launched(PTX, 1, 64)
    assert launch.run()
    before = np.concatenate([[0], np.cumsum(x.astype(np.float64))[:-1]])
    np.testing.assert_allclose(z, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32)])
def test_sectors_follow_from_addresses(stride: int, sectors: int) -> None:
    launch, _, _ = launched(PTX, stride, 64 * stride)
    trace = Trace()
    launch.run(trace=trace)
    found = {(one.line, one.space): one for one in costs(launch.ptx.code, trace)}
    assert found[4, "global"].sectors == sectors
    assert found[4, "global"].least == 4
    assert found[4, "global"].stride == 4 * stride
    assert found[7, "shared"].conflict == 1


@pytest.mark.parametrize(("shift", "conflict"), [(2, 1), (3, 2), (5, 8), (7, 32)])
def test_banks_follow_from_addresses(shift: int, conflict: int) -> None:
    text = PTX.replace("shl.b32 %r3, %r1, 2", f"shl.b32 %r3, %r1, {shift}")
    launch, _, _ = launched(text.replace("tile[256]", "tile[8192]"), 1, 64)
    trace = Trace()
    launch.run(trace=trace)
    found = {(one.line, one.space): one for one in costs(launch.ptx.code, trace)}
    assert found[5, "shared"].conflict == conflict


def test_an_access_outside_is_named_with_its_line() -> None:
    launch, _, _ = launched(PTX, 2, 64)
    with pytest.raises(OutsideError, match=r"line 4: 4 bytes at byte 256 of x: that lies outside"):
        launch.run()


def test_what_is_not_interpreted_says_so() -> None:
    launch, _, _ = launched(PTX.replace("add.f32 %f2", "frobnicate.f32 %f2"), 1, 64)
    with pytest.raises(NotInterpretedError, match=r"frobnicate\.f32"):
        launch.run()


def test_the_kinds_of_a_loop_and_what_was_unrolled() -> None:
    code = parse(PTX, "sums.cu").code
    loop = code.main_loop()
    assert loop is not None
    kinds = {kind: count for kind, count in mix(code.body(loop)).items() if count}
    assert kinds == {"memory": 1, "arithmetic": 1, "address": 1, "control": 3}
    twice = PTX.replace(
        "    add.s32 %r2, %r2, 4;\n    add.s32 %r1, %r1, -1;",
        "    ld.shared.f32 %f3, [%r2+4];\n    add.s32 %r2, %r2, 8;\n    add.s32 %r1, %r1, -2;",
    ).replace("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x;\n    shl.b32 %r1, %r1, 1;")
    for text, unrolled in ((PTX, 1), (twice, 2)):
        launch, _, _ = launched(text.replace("tile[256]", "tile[4096]"), 0, 64)
        trace = Trace()
        launch.run(trace=trace)
        loop = launch.ptx.code.main_loop(trace.counts)
        assert loop is not None
        assert repeats(launch.ptx.code, loop, trace) == unrolled


def test_divisions_and_conversions_are_named_where_they_stand() -> None:
    text = PTX.replace(
        "    add.s32 %r1, %r1, -1;",
        "    .loc 1 8 1\n    cvt.s64.s32 %rd7, %r1;\n    div.s64 %rd7, %rd7, %rd3;\n"
        "    cvt.f64.f32 %fd1, %f3;\n    add.s32 %r1, %r1, -1;",
    )
    code = parse(text, "sums.cu").code
    problem = Problem({}, None, lambda sizes: {"x": np.zeros(1, np.float32)}, "x")
    found = {(one.kind, one.line): one for one in of_ptx(code, code.main_loop(), problem)}
    assert found["int64-division", 8].severity == "fault"
    assert found["float64", 8].in_loop
    assert ("float64", 7) not in found


def test_machine_code_and_assembly_are_read() -> None:
    listing = """
	//## File "/x/k.py", line 7 inlined at "/x/k.py", line 3
	//## File "/x/k.py", line 3
.L_x_1:
        /*0100*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0110*/                   FFMA R8, R4, R5, R8 ;
        /*0120*/                   IADD3 R2, P1, R2, 0x10, RZ ;
        /*0130*/                   IADD3.X R3, RZ, R3, RZ, P1, !PT ;
        /*0140*/                   ISETP.NE.AND P0, PT, R2, R9, PT ;
        /*0150*/               @P0 BRA `(.L_x_1) ;
"""
    code = sass.parse(listing, "k.py")
    (loop,) = code.loops
    kinds = {kind: count for kind, count in mix(code.body(loop)).items() if count}
    assert kinds == {"memory": 1, "arithmetic": 1, "address": 2, "control": 2}
    assert {one.line for one in code.instructions} == {7}
    assert code.instructions[0].nbytes == 16
    text = """
f:
.LBB0_1:
	vmovups	(%rdi,%rax,4), %zmm0
	vfmadd231ps	%zmm1, %zmm0, %zmm2
	addq	$16, %rax
	cmpq	%rax, %rsi
	jne	.LBB0_1
	retq
"""
    x86 = assembly.parse(text, "f")
    (loop,) = x86.loops
    kinds = {kind: count for kind, count in mix(x86.body(loop)).items() if count}
    assert kinds == {"memory": 1, "arithmetic": 1, "address": 1, "control": 2}
    text = """
.LBB0_6:
	{vex}	vpdpbusd	%ymm10, %ymm12, %ymm8
	tileloadd	(%rax,%rdi), %tmm4
	tdpbusd	%tmm6, %tmm4, %tmm0
	jl	.LBB0_6
"""
    dots = assembly.parse(text).instructions
    assert [one.kind for one in dots] == ["arithmetic", "memory", "arithmetic", "control"]
    assert dots[0].opcode == "vpdpbusd"
    assert dots[1].nbytes == 1024
    # The loop that loads most is that which widens what it loads.
    text = """
.LBB0_1:
	vmovups	(%rdi,%rax,4), %xmm0
	jne	.LBB0_1
.LBB0_2:
	vpmovsxbd	(%rdi,%rax), %zmm1
	jne	.LBB0_2
"""
    main = assembly.parse(text).main_loop()
    assert main is not None
    assert main.start == 2


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "warps", "limit"),
    [
        (1024, 32, 0, 64, "threads"),
        (1024, 40, 0, 32, "registers"),
        (128, 255, 0, 8, "registers"),
        (256, 32, 100 << 10, 16, "shared memory"),
        (32, 16, 0, 32, "blocks"),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, warps: int, limit: str) -> None:
    held = occupancy(90, threads, registers, shared)
    assert held is not None
    assert (held.warps, held.limit) == (warps, limit)


def test_bad_files_and_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one __global__ kernel"):
        cuda_c("int x;")
    file = tmp_path / "empty.py"
    file.write_text("sizes = {'N': 1}\n")
    with pytest.raises(ValueError, match="defines no kernel"):
        read(file)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.py")
    file.write_text("def f(x): pass\nvariants = [f]\n")
    with pytest.raises(TypeError, match="cannot compare"):
        read(file)


CPU = """
import numpy as np
from numba import njit

def inputs(sizes):
    x = np.arange(1, sizes["N"] + 1, dtype=np.float32)
    return {"x": x, "z": np.zeros_like(x)}

sizes, output = {"N": 1000}, "z"

@njit
def wide(x, z):
    factor = 2.1
    for i in range(x.size):
        z[i] = x[i] * factor

@njit
def narrow(x, z):
    factor = np.float32(2.1)
    for i in range(x.size):
        z[i] = x[i] * factor

@njit
def wrong(x, z):
    for i in range(1, x.size):
        z[i] = x[i] + x[i]
"""


def test_kernels_for_a_cpu_against_the_first(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    file.write_text(CPU)
    found = compare(file, time=False)
    wide, narrow, wrong = found.variants
    assert [one.checked.message[:8] for one in (narrow, wrong)] == ["differs "] * 2
    assert [(f.kind, f.line) for f in wide.faults] == [("float64-variable", 13)]
    assert wide.loop is not None
    assert narrow.loop is not None
    assert wide.loop.mix["conversion"] > narrow.loop.mix["conversion"] == 0
    assert found.changes[0].types == ("factor: float64 → float32",)
    plain = json.loads(found.to_json())
    assert [one["name"] for one in plain["variants"]] == ["wide", "narrow", "wrong"]
    types = plain["variants"][0]["built"]["types"]
    assert {"name": "factor", "type": "float64", "line": 13}.items() <= types[2].items()


def test_a_compiler_may_fail_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Numba does with a NumPy that is too new for it."""
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    file.write_text(CPU)

    def fails(variant: Variant, *more: Any) -> Built:
        if variant.name == "wide":
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")
        return real(variant, *more)

    language = language_of(read(file).variants[0].kernel, "compile")
    real = language.compile
    monkeypatch.setattr(language, "compile", fails)
    wide, narrow, _ = compare(file, time=False).variants
    assert wide.notes == ["module 'numpy' has no attribute 'row_stack'"]
    assert wide.checked.ok is None
    assert narrow.loop is not None


ON_GPU = """
import numpy as np
from numba import cuda
from lowbit_lab.compare import cuda_c

def inputs(sizes):
    return {"x": np.ones(sizes["N"], np.float32), "z": np.zeros(sizes["N"], np.float32)}

sizes, output, grid, block = {"N": 32}, "z", 1, 32

@cuda.jit("void(float32[::1], float32[::1])")
def doubled(x, z):
    i = cuda.grid(1)
    z[i] = x[i] + x[i]

added = cuda_c("__global__ void added(float* x, float* z) { z[threadIdx.x] = x[threadIdx.x]; }")
"""


def test_without_compilers_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    from lowbit_lab.compare import toolchain

    monkeypatch.setattr(toolchain, "_folders", lambda *below: iter(()))
    monkeypatch.setattr(toolchain, "_newest", lambda *names: None)
    file = tmp_path / "variants.py"
    file.write_text(ON_GPU)
    found = compare(file, time=False)
    said = [" ".join(one.notes) for one in found.variants]
    assert "libnvvm is not installed; pip install nvidia-cuda-nvcc" in said[0]
    assert "libnvrtc is not installed; pip install nvidia-cuda-nvrtc" in said[1]
    assert [one.checked.ok for one in found.variants] == [None, None]
    with pytest.raises(MissingToolError, match="ptxas is not installed; pip install"):
        toolchain.assemble(PTX, 90, None)


def gpu_compilers() -> bool:
    pytest.importorskip("numba")
    try:
        library("libnvvm")
        compile_cuda_c("__global__ void f() {}", "f.cu", 90)
    except MissingToolError:
        return False
    return True


@pytest.mark.deep
def test_every_planted_fault_is_named_with_its_line() -> None:
    if not gpu_compilers():
        pytest.skip("NVVM or NVRTC is not installed")
    lines = FAULTS.read_text().splitlines()
    found = compare(FAULTS, time=False)
    assert found.ok, [one.checked for one in found.variants]
    for one in found.variants:
        planted = {
            (kind, one.built.first_line + at)
            for at, text in enumerate(one.built.lines)
            if (mark := re.search(r"(?:#|//) ([\w -]+)$", text))
            for kind in mark[1].split()
        }
        seen = {(f.kind, f.line) for f in one.faults if f.severity == "fault"}
        assert planted <= seen, (one.name, seen)
        assert {kind for kind, _ in planted} == {kind for kind, _ in seen}, (one.name, seen)
        assert all(kind in lines[line - 1] for kind, line in planted)
