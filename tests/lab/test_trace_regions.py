"""Regions that hold samples: straight-line code as AMX kernels are, nested loops, hot packing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("iced_x86")

from llvmlite import binding as llvm

from lowbit.isa import host
from lowbit_lab.trace import loops, parts, replay, roles, run
from lowbit_lab.trace.report import LOOP, STRAIGHT, Trace
from lowbit_lab.trace.sampler import Mapping as Mapped

_START = 0x10000
_TRIPLE = "x86_64-unknown-linux-gnu"
_FEATURES = "+amx-tile,+amx-bf16,+amx-int8,+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx512bf16"
_TILES = "tileloadd (%rdi,%rax), %tmm1; tileloadd (%rsi,%rax), %tmm2; {} %tmm2, %tmm1, %tmm0;"
_COPY = "vmovups (%rdi), %zmm1; vpermd %zmm1, %zmm3, %zmm1; vmovups %zmm1, (%rsi); add $$64, %rdi;"
_SUMS = "vpdpbusd (%rsi), %zmm1, %zmm2; add $$64, %rsi;"


def _assembled(text: str) -> bytes:
    """Machine code, from LLVM, whatever this machine can run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    body = text.replace("$$", "$").replace("\n", " ")
    module = llvm.parse_assembly(f'target triple = "{_TRIPLE}"\nmodule asm "{body}"\n')
    target = llvm.Target.from_triple(_TRIPLE).create_target_machine(features=_FEATURES)
    file = llvm.ObjectFileRef.from_data(target.emit_object(module))
    return next(section.data() for section in file.sections() if section.is_text())


class _Kernel:
    """A function by its text, in pieces: the addresses of the instructions of each, by name."""

    def __init__(self, *pieces: tuple[str, str]) -> None:
        self.code, at = _assembled("".join(text for _, text in pieces)), _START
        self.places: dict[str, list[int]] = {}
        code = loops.Code([(_START, self.code)])
        for name, text in pieces:
            addresses = self.places[name] = list[int]()
            for _ in filter(str.strip, text.split(";")):
                addresses.append(at)
                one = code.at(at)
                assert one is not None
                at = one.next_ip

    def samples(self, counts: Mapping[str, int]) -> list[int]:
        """So many in each piece, spread over its instructions."""
        return [
            self.places[name][i * len(self.places[name]) // count]
            for name, count in counts.items()
            for i in range(count)
        ]


def _traced(
    kernel: _Kernel, counts: Mapping[str, int], name: str = "jit_brgemm", arithmetic: str = ""
) -> Trace:
    addresses = kernel.samples(counts)
    end = _START + len(kernel.code)
    answers: dict[str, Any] = {
        "open": {"title": "x", "arithmetic": arithmetic, "multiply_adds": None},
        "time": {"seconds": [1e-3] * 3, "cpu_seconds": 1e-3, "mean_cpu_seconds": 1e-3},
        "operators": {"rows": [], "by": ""},
        "sample": {
            "mappings": [Mapped(_START, end, "r-xp", 0, "")],
            "names": [(_START, len(kernel.code), name)] if name else [],
            "functions": [],
            "code": [(_START, kernel.code)],
            "addresses": addresses,
            "chains": [[one] for one in addresses],
            "cpu_seconds": 1e-3,
            "versions": {},
            "python": [],
        },
    }  # fmt: skip
    return run._Analysis(answers, 1).trace("x")(1.0)


@pytest.fixture(autouse=True)
def _an_amx_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
    tiles = ("amx_tile", "amx_int8", "amx_bf16", "avx512bf16")
    monkeypatch.setattr(host, "features", lambda: frozenset(known + tiles))
    monkeypatch.setattr(host, "tile_permission", lambda: "")
    monkeypatch.setattr(replay, "measured", lambda wanted: dict.fromkeys(wanted, 1e-9))


@pytest.mark.parametrize("name", ["jit_brgemm", ""])
@pytest.mark.parametrize(
    ("mnemonic", "arithmetic"), [("tdpbf16ps", "bfloat16"), ("tdpbusd", "int8")]
)
def test_straight_line_tiles_are_the_hot_region(mnemonic: str, arithmetic: str, name: str) -> None:
    kernel = _Kernel(("tiles", _TILES.format(mnemonic) * 300), ("end", "ret;"))
    found = _traced(kernel, {"tiles": 200}, name, arithmetic)
    hot = found.loops[0]
    assert (hot.form, hot.part, hot.share) == (STRAIGHT, parts.KERNEL, 1)
    assert hot.structure[roles.PRODUCTS] == 300
    assert hot.products == (mnemonic,)
    assert hot.start == _START
    assert found.verdict.fast is True
    assert mnemonic in found.verdict.text


def test_blocks_without_a_branch_back_are_one_region() -> None:
    tiles = _TILES.format("tdpbf16ps") * 20
    kernel = _Kernel(
        ("first", tiles + "cmp $$3, %rdx; je 1f;"), ("second", tiles + "jmp 2f;"),
        ("third", "1: " + tiles), ("last", "2: " + tiles + "ret;"),
    )  # fmt: skip
    hot = _traced(kernel, {"first": 30, "second": 30, "third": 30, "last": 30}).loops[0]
    assert (hot.share, hot.structure[roles.PRODUCTS]) == (1, 80)
    hot = _traced(kernel, {"first": 30, "third": 30, "last": 30}).loops[0]
    assert (hot.share, hot.structure[roles.PRODUCTS]) == (1, 60)  # what did not run is not in it


def test_of_nested_loops_the_inner_that_multiplies_is_hot() -> None:
    kernel = _Kernel(
        ("outer", "1: " + _COPY * 3), ("inner", "2: " + _SUMS * 4 + "dec %rcx; jne 2b;"),
        ("end", "dec %rdx; jne 1b;"), ("return", "ret;"),
    )  # fmt: skip
    found = _traced(kernel, {"outer": 47, "inner": 43, "return": 10})
    hot, outer = found.loops[:2]
    assert (hot.form, hot.part, hot.products) == (LOOP, parts.KERNEL, ("vpdpbusd",))
    assert hot.instructions == len(kernel.places["inner"])
    assert (outer.part, outer.products) == (parts.PACK, ())
    assert {one.name: round(100 * one.share) for one in found.parts}[parts.PACK] == 47
    # A cold loop that multiplies makes no product of the packing around it.
    cold = _traced(kernel, {"outer": 95, "inner": 5}).loops[0]
    assert (cold.part, cold.products) == (parts.PACK, ())


@pytest.mark.parametrize("straight", [False, True])
def test_hot_packing_beside_cold_products_is_packing(straight: bool) -> None:
    pack, tiles = _COPY * 20, _TILES.format("tdpbf16ps") * 20
    kernel = (
        _Kernel(("pack", pack + "test %rax, %rax; je 9f;"), ("product", tiles), ("end", "9: ret;"))
        if straight
        else _Kernel(
            ("pack", "1: " + pack + "dec %rcx; jne 1b;"),
            ("product", "2: " + tiles + "dec %rdx; jne 2b;"), ("end", "ret;"),
        )
    )  # fmt: skip
    hot, cold = _traced(kernel, {"pack": 196, "product": 4}).loops[:2]
    assert (hot.part, hot.products) == (parts.PACK, ())
    assert (cold.part, cold.products) == (parts.KERNEL, ("tdpbf16ps",))


def test_the_products_are_judged_where_packing_takes_longer() -> None:
    kernel = _Kernel(
        ("pack", "1: " + _COPY + "dec %rcx; jne 1b;"),
        ("product", _TILES.format("tdpbf16ps") * 40), ("end", "ret;"),
    )  # fmt: skip
    found = _traced(kernel, {"pack": 55, "product": 45}, arithmetic="bfloat16")
    assert [loop.form for loop in found.loops] == [LOOP, STRAIGHT]
    assert found.loops[0].part == parts.PACK
    assert found.verdict.fast is True
    assert "tdpbf16ps" in found.verdict.text


def test_a_loop_around_a_call_leads_to_the_callee() -> None:
    kernel = _Kernel(
        ("caller", "1: push %rcx; call 2f; pop %rcx; dec %rcx; jne 1b; ret;"),
        ("callee", "2: " + _TILES.format("tdpbusd") * 10 + "ret;"),
    )  # fmt: skip
    hot = _traced(kernel, {"caller": 5, "callee": 95}, "", "int8").loops[0]
    assert (hot.form, hot.share, hot.products) == (STRAIGHT, 0.95, ("tdpbusd",))


@pytest.mark.parametrize(
    ("name", "structure", "expected"),
    [
        ("jit_uni_reorder_kernel_f32.2", {roles.LOAD: 1, roles.WRITE_BACK: 1}, parts.PACK),
        ("direct_copy_kernel_t.0", {roles.LOAD: 1, roles.WRITE_BACK: 1}, parts.PACK),
        ("dnnl::impl::cpu::simple_reorder_t::execute", {}, parts.PACK),
        ("at::native::im2col", {}, parts.PACK),
        ("MlasTranspose", {}, parts.PACK),
        ("fbgemm::QuantizeAvx2", {roles.CONVERT: 1, roles.ARITHMETIC: 1}, parts.PACK),
        ("conv_transpose", {roles.PRODUCTS: 4, roles.ACCUMULATE: 4}, parts.KERNEL),
    ],
)
def test_reorders_are_packing(name: str, structure: dict[str, int], expected: str) -> None:
    assert parts.part_of(name, "l.so", structure, 512) == expected


def test_a_reorder_alone_is_packing() -> None:
    kernel = _Kernel(("copy", "1: " + _COPY + "dec %rcx; jne 1b;"), ("end", "ret;"))
    for name, expected in (("jit_uni_reorder_kernel", parts.PACK), ("f", parts.OTHER)):
        found = _traced(kernel, {"copy": 50}, name)
        assert found.loops[0].part == expected
        assert [one.name for one in found.parts] == [expected]


_STRAIGHT = """
import ctypes

import numpy as np
from llvmlite import binding as llvm

fma = "call <4 x float> @llvm.fma.v4f32"
lines = [
    f"%p{i} = getelementptr float, ptr %a, i64 {i}\\n"
    f"%l{i} = load <4 x float>, ptr %p{i}, align 4\\n"
    f"%v{i} = {fma}(<4 x float> %l{i}, <4 x float> %l{i}, <4 x float> "
    + ("zeroinitializer" if i < 8 else f"%v{i - 8}") + ")\\n"
    for i in range(1500)
]
adds = "".join(f"%s{i} = fadd <4 x float> %v{1492 + i}, %{'s%d' % (i - 1) if i else 'v1499'}\\n"
               for i in range(8))
declared = "declare <4 x float> @llvm.fma.v4f32(<4 x float>, <4 x float>, <4 x float>)\\n"
text = declared + "define void @f(ptr %a) {\\n" + "".join(lines) + adds
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
machine = llvm.Target.from_default_triple().create_target_machine(features="+fma,+avx")
text += "store <4 x float> %s7, ptr %a, align 4\\nret void\\n}\\n"
# Called from machine code, or half of the time is ctypes'.
text += '''
define void @often(ptr %a) {
entry:
  br label %again
again:
  %i = phi i64 [ 0, %entry ], [ %next, %again ]
  call void @f(ptr %a)
  %next = add i64 %i, 1
  %done = icmp eq i64 %next, 50
  br i1 %done, label %end, label %again
end:
  ret void
}
'''
module = llvm.parse_assembly(text)
engine = llvm.create_mcjit_compiler(module, machine)
engine.finalize_object()
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("often"))
a = np.zeros(2000, np.float32)
address = a.ctypes.data


def run():
    for _ in range(20):
        function(address)
"""


@pytest.mark.deep
def test_a_straight_kernel_that_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(run, "SAMPLES", 60)
    if "fma" not in host.features():
        pytest.skip("no FMA")
    (tmp_path / "straight.py").write_text(_STRAIGHT)
    found = run.trace(str(tmp_path / "straight.py"), seconds=0.5)
    hot = found.loops[0]
    assert (hot.form, hot.part, hot.arithmetic) == (STRAIGHT, parts.KERNEL, "float32")
    assert hot.structure[roles.PRODUCTS] == 1500
    assert hot.share > 0.5
    assert found.limit is not None
