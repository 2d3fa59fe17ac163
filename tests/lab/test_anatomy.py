"""The anatomy of a kernel: rows lead back to their lines, and the code is what runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jaxtyping")

from lowbit import isa
from lowbit.jit import compile as compiler
from lowbit_lab.anatomy import page, result
from lowbit_lab.anatomy.named import anatomy_of
from lowbit_lab.anatomy.result import Places, code_pane, lined_ir
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.compare.toolchain import MissingToolError, library
from lowbit_lab.explain.kernels import product_kernels

SIZES = {"m": 33, "n": 40, "k_size": 70}


def _instructions(text: str) -> list[str]:
    rows = (re.sub(r"\s*#.*", "", row) for row in text.splitlines())
    return [row for row in rows if re.match(r"^\s+[a-z]", row)]


@pytest.mark.parametrize("name", ["generic", "avx2", "amx"])
def test_lines_do_not_change_the_code(name: str) -> None:
    if isa.named(name).is_foreign:
        pytest.skip("another architecture's")
    asked = product_kernels()[name].variant.kernel
    static = asked.static(SIZES)
    lined = compiler.assembly(lined_ir(asked.kernel, isa.named(name), **static), isa.named(name))
    assert _instructions(lined) == _instructions(asked.kernel.assembly(isa.named(name), **static))


def test_a_product_and_its_page() -> None:
    found = anatomy_of("product:generic", "33x70:70x40", 90, time=False)
    assert [pane.title for pane in found.panes] == ["source", "LLVM IR, optimized", "assembly"]
    source = {at: text for text, at in found.panes[0].rows if at is not None}
    for pane in found.panes[1:]:
        linked = [at for _, at in pane.rows if at is not None]
        assert len(linked) > len(pane.rows) / 4
        assert set(linked) <= set(source)
    # What is known to multiply leads to a line that multiplies.
    products = {
        source[at] for text, at in found.panes[1].rows if at is not None and " mul " in text
    }
    assert any("*" in line for line in products)
    plain = json.loads(found.to_json())
    assert plain["kernel"] == "product:generic"
    made = page.page(found)
    assert "<script>" in made
    assert not re.search(r"(src|href)=\"(?!data:)", made)


def test_a_triton_kernel() -> None:
    pytest.importorskip("triton")
    found = anatomy_of("add_constant", "", 90)
    titles = [pane.title for pane in found.panes]
    assert titles[:4] == ["source", "TTIR", "TTGIR", "PTX"]
    source = {at: text for text, at in found.panes[0].rows if at is not None}
    loads = [(text, at) for pane in found.panes[1:4] for text, at in pane.rows if "load" in text]
    loads += [(text, at) for text, at in found.panes[3].rows if "ld.global" in text]
    assert loads
    assert all("tl.load" in source[at] for text, at in loads if at is not None)


def test_unknown_names_and_an_absent_llvm_mca(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernel product:none; there are"):
        anatomy_of("product:none", "1x1:1x1", 90)
    with pytest.raises(ValueError, match="is not understood"):
        anatomy_of("product:generic", "1x1", 90)
    monkeypatch.setattr(result, "_tool", lambda: None)
    assert "apt-get install llvm-16" in result.verdict(["nop"], isa.named("generic"))[0]


def test_a_copy_of_a_triton_kernel_is_shown_from_its_own_file(tmp_path: Path) -> None:
    """Triton's cache, which knows a kernel by its text and line, has the first file's."""
    pytest.importorskip("triton")
    from lowbit.kernels.triton.ahead import compile_ahead

    text = "import triton\n@triton.jit\ndef nothing(x):\n    tl.store(x, tl.load(x) + 1)\n"
    for name in ("one", "other"):
        path = tmp_path / f"{name}.py"
        path.write_text("import triton.language as tl\n" + text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert str(path) in compile_ahead(module.nothing, {"x": "*fp32"}, 80).stages["ttir"]


OWN = """
from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from jaxtyping import Int32, UInt8
from numba import cuda, njit

import lowbit_lab as lab
from lowbit.isa.generic import reduce_add
from lowbit.isa.types import Int, S32Pointer, U8Pointer, s32
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel as lowbit_kernel
from lowbit_lab.compare import variant


def spec(a: UInt8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N"]:
    return a.astype(np.int32).sum(axis=1).astype(np.int32)


constants, block = {"B": 128}, 64


def grid(size):
    return size["N"]


@njit
def on_numba(a, z):
    # rows

    for i in range(a.shape[0]):
        t = np.int32(0)
        for k in range(a.shape[1]):
            t += a[i, k]  # used
        z[i] = t


@cuda.jit
def on_cuda(a, z):
    i = cuda.grid(1)
    if i < a.shape[0]:
        t = np.int32(0)
        for k in range(a.shape[1]):
            t += a[i, k]  # used
        z[i] = t


@triton.jit
def on_triton(a, z, N, K, B: tl.constexpr):
    row = tl.program_id(0)

    t = tl.zeros((B,), tl.int32)
    for start in range(0, K, B):
        k = start + tl.arange(0, B)
        t += tl.load(  # used
            a + row * K + k,
            mask=k < K,
            other=0,
        )
    tl.store(z + row, tl.sum(t, axis=0))


@lowbit_kernel
def on_lowbit(
    k: Builder, a: U8Pointer, z: S32Pointer, rows: Int, columns: Int, *, lanes: int
) -> None:
    for r in k.parallel(rows):
        with k.scope():
            total = k.register(k.zeros(s32, lanes))
            for c in k.range(0, columns, lanes):
                total.value = total.value + (a + r * columns + c).load(lanes).to(s32)  # used
            (z + r).store(reduce_add(total.value))


variants = {
    "on_numba": on_numba,
    "on_cuda": on_cuda,
    "on_triton": on_triton,
    "on_lowbit": variant(
        lab.CpuKernel(on_lowbit, "avx2", {"lanes": 8}),
        rows=lambda sizes: sizes["N"],
        columns=lambda sizes: sizes["K"],
    ),
}
"""


@pytest.mark.deep("on_cuda-titles1", "on_numba-titles0")
@pytest.mark.parametrize(
    ("kernel", "titles"),
    [
        ("on_numba", ["source", "LLVM IR, optimized", "assembly"]),
        ("on_cuda", ["source", "PTX"]),
        ("on_triton", ["source", "TTIR", "TTGIR", "PTX"]),
        ("on_lowbit", ["source", "LLVM IR, optimized", "assembly"]),
    ],
)
def test_a_kernel_of_a_file(tmp_path: Path, kernel: str, titles: list[str]) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    if kernel in ("on_numba", "on_lowbit") and isa.named("avx2").is_foreign:
        pytest.skip("another architecture's")
    if kernel == "on_cuda":
        try:
            library("libnvvm")
        except MissingToolError:
            pytest.skip("NVVM is not installed")
    file = tmp_path / "own.py"
    file.write_text(OWN)
    found = anatomy_of(f"{file}:{kernel}", sizes={"K": 256})
    assert [pane.title for pane in found.panes][: len(titles)] == titles
    assert found.kernel == kernel
    # No size is given but that one.
    assert "N=1024, K=256" in found.about
    assert sum(found.mix.values()) > 0
    source = {at: text for text, at in found.panes[0].rows if at is not None}
    for pane in found.panes[1:]:
        linked = [source[at] for _, at in pane.rows if at is not None]
        assert any(text.endswith("# used") for text in linked), pane.title
    loads = [
        source[at]
        for text, at in found.panes[len(titles) - 1].rows
        if at is not None and re.search(r"\bld\.global|^\s+v?pmov[sz]x", text)
    ]
    assert loads
    assert all(text.endswith("# used") for text in loads)
    if kernel in ("on_cuda", "on_triton"):
        guarded = [text for pane in found.panes for text, _ in pane.rows if "@" in text]
        assert any(text.strip().startswith("@") for text in guarded)
        assert all(text.count("@") == 1 for text in guarded if text.strip().startswith("@"))
        assert found.facts["shared memory"].endswith("bytes")
    assert json.loads(found.to_json())["kernel"] == kernel


@pytest.mark.deep
def test_what_a_file_may_be_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "own.py"
    text = OWN[: OWN.index("@cuda.jit")].replace(
        "from numba import cuda, njit", "from numba import njit"
    )
    text = text.replace("import triton\nimport triton.language as tl\n", "")
    file.write_text(text)
    assert anatomy_of(str(file)).kernel == anatomy_of(f"{file}:on_numba").kernel == "on_numba"
    two = text.replace("def on_numba", "def other") + text[text.index("@njit") :]
    file.write_text(two)
    with pytest.raises(
        ValueError, match=r"several kernels: other, on_numba; write .*own\.py:other"
    ):
        anatomy_of(str(file))
    with pytest.raises(ValueError, match=r"no kernel 'third', but other, on_numba"):
        anatomy_of(f"{file}:third")
    # As `lowbit check` names the kernel of a file.
    file.write_text(two + "\n\nkernel = on_numba\n")
    assert anatomy_of(str(file)).kernel == anatomy_of(f"{file}:kernel").kernel == "on_numba"
    file.write_text(text.replace("t += a[i, k]", "t += missing"))
    with pytest.raises(ValueError, match=r"own\.py, line \d+: t \+= missing"):
        anatomy_of(str(file))
    with pytest.raises(FileNotFoundError):
        anatomy_of(str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match="the shape '8x8:8x8' is a product's"):
        anatomy_of(str(file), "8x8:8x8")


def test_an_unknown_name_says_what_is_taken() -> None:
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError, match=r"no kernel 'nothing'.*long_sum.*product:ISA and FILE\.py"
    ):
        anatomy_of("nothing")
    with pytest.raises(ValueError, match=r"no kernel 'kernel\.cu'"):
        anatomy_of("kernel.cu")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("@%p1 bra $L_end;", "@%p1 bra $L_end"),
        ("@!%p1 bra.uni $L_end;", "@!%p1 bra.uni $L_end"),
        ("@%p1 ld.global.v4.b32 { %r1, %r2 },\n\t[ %rd1 + 0 ];",
         "@%p1 ld.global.v4.b32 { %r1, %r2 }, [ %rd1 + 0 ]"),
        ("{ @%p1\tst.shared.b32 [%r1], %r2; }", "@%p1 st.shared.b32 [%r1], %r2"),
        ("@%p1 ret;", "@%p1 ret"),
        ("@%p1 mbarrier.arrive.shared.b64 _, [%r1];",
         "@%p1 mbarrier.arrive.shared.b64 _, [%r1]"),
        ("add.s32 %r1, %r2, %r3;", "add.s32 %r1, %r2, %r3"),
    ],
)  # fmt: skip
def test_a_predicate_is_shown_once(text: str, shown: str) -> None:
    head = ".version 8.0\n.target sm_90\n.visible .entry f(.param .u64 f_0)\n{\n"
    code = parse(f"{head}{text}\n$L_end:\nret;\n}}\n").code
    assert str(code.instructions[0]) == shown
    rows = [row for row, _ in code_pane("PTX", code, "f", Places()).rows]
    assert rows[0] == f"    {shown}"
