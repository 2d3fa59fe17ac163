"""The steps of a trace, each by itself: loops in machine code, what instructions do, what names
mean, what the machine has, and that bad text is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

iced = pytest.importorskip("iced_x86")

from iced_x86 import Code, Encoder, Instruction, MemoryOperand, Register  # noqa: E402

from lowbit.isa import host  # noqa: E402
from lowbit_lab.trace import loops, parts, replay, roles, run, verdict  # noqa: E402
from lowbit_lab.trace.cfi import evaluate  # noqa: E402
from lowbit_lab.trace.codemap import CodeMap, Function, short  # noqa: E402
from lowbit_lab.trace.operators import Operator  # noqa: E402
from lowbit_lab.trace.parts import PYTHON, frames  # noqa: E402
from lowbit_lab.trace.report import Loop  # noqa: E402
from lowbit_lab.trace.sampler import Mapping, Sampler, mappings  # noqa: E402
from lowbit_lab.trace.subject import matrix_product, product_sizes, understood  # noqa: E402

_START = 0x1000
_MEMORY = MemoryOperand(Register.RSI, displ=64, displ_size=1)


def _zmm(number: int) -> Any:
    return Register.ZMM0 + number


def _encoded(instructions: Sequence[Instruction]) -> tuple[bytes, list[int]]:
    """Machine code, and the address of each instruction. A branch names its target by number."""
    places = [_START]
    for final in (False, True):
        encoder, at = Encoder(64), _START
        known, places = places, []
        for one in instructions:
            places.append(at)
            made = one.copy()
            if final and made.is_jcc_near:
                made.near_branch64 = known[made.near_branch64]
            elif made.is_jcc_near:
                made.near_branch64 = _START
            at += encoder.encode(made, at)
        data = bytes(encoder.take_buffer())
    return data, places


def _jump(target: int) -> Instruction:
    return Instruction.create_branch(Code.JNE_REL32_64, target)


_DOT = Code.EVEX_VPDPBUSD_ZMM_K1Z_ZMM_ZMMM512B32
_NEST = [
    Instruction.create_reg_reg_reg(Code.EVEX_VPXORD_ZMM_K1Z_ZMM_ZMMM512B32, *[_zmm(0)] * 3),  # 0
    Instruction.create_reg_mem(Code.EVEX_VPBROADCASTD_ZMM_K1Z_XMMM32, _zmm(2), _MEMORY),  # 1
    Instruction.create_reg_reg_mem(_DOT, _zmm(0), _zmm(2), _MEMORY),  # 2
    Instruction.create_reg(Code.DEC_RM64, Register.RCX),  # 3
    _jump(1),  # 4
    Instruction.create_mem_reg(Code.EVEX_VMOVDQU32_ZMMM512_K1Z_ZMM, _MEMORY, _zmm(0)),  # 5
    Instruction.create_reg(Code.DEC_RM64, Register.RDX),  # 6
    _jump(0),  # 7
    Instruction.create(Code.RETNQ),  # 8
]


def test_the_innermost_loop_of_a_sample_is_found() -> None:
    data, at = _encoded(_NEST)
    code = loops.Code([(_START, data)])
    inner, outer = loops.innermost(code, at[2]), loops.innermost(code, at[5])
    assert inner == loops.Cycle(at[1], tuple(at[1:5]))
    assert outer == loops.Cycle(at[0], tuple(at[:8]))
    assert loops.innermost(code, at[8]) is None
    # The most frequent place is in the outer loop; the inner one's samples stay its own.
    found = dict(loops.hottest(code, {at[5]: 30, at[2]: 20, at[3]: 7, at[8]: 3}))
    assert found == {outer: 30, inner: 27}


def test_a_loop_whose_cold_part_lies_behind_is_whole() -> None:
    body = [
        Instruction.create_reg(Code.DEC_RM64, Register.RCX),  # 0
        _jump(4),  # 1: to the part that lies behind
        Instruction.create_reg(Code.INC_RM64, Register.RAX),  # 2
        Instruction.create(Code.RETNQ),  # 3
        Instruction.create_reg(Code.INC_RM64, Register.RDX),  # 4
        _jump(0),  # 5
        Instruction.create(Code.RETNQ),  # 6
    ]
    data, at = _encoded(body)
    found = loops.innermost(loops.Code([(_START, data)]), at[0])
    assert found is not None
    assert found.body == (at[0], at[1], at[4], at[5])


def test_roles_and_multiply_adds_of_a_loop() -> None:
    body = _NEST[1:5]
    assert [roles.roles(one) for one in body] == [
        (roles.BROADCAST,),
        (roles.LOAD, roles.PRODUCTS, roles.ACCUMULATE),
        (roles.ADDRESS,),
        (roles.CONTROL,),
    ]
    assert roles.multiply_adds(body) == (64, "int8", ("vpdpbusd",))
    assert roles.sets_of(body[1:2]) == ("AVX512_VNNI",)
    assert roles.roles(_NEST[5]) == (roles.WRITE_BACK,)
    assert roles.accumulators(body) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("VEX_VFMADD231PS_YMM_YMM_YMMM256",), (8, "float32", ("vfmadd231ps",))),
        (("EVEX_VFMADD231PD_ZMM_K1Z_ZMM_ZMMM512B64_ER",), (8, "float64", ("vfmadd231pd",))),
        (("EVEX_VDPBF16PS_ZMM_K1Z_ZMM_ZMMM512B32",), (32, "bfloat16", ("vdpbf16ps",))),
        (("VEX_TDPBUSD_TMM_TMM_TMM",), (16384, "int8", ("tdpbusd",))),
        (("VEX_VPMADDWD_YMM_YMM_YMMM256",), (16, "int16", ("vpmaddwd",))),
        # Pairs of bytes, whose sums are then added up by a product with ones.
        (
            ("VEX_VPMADDUBSW_YMM_YMM_YMMM256", "VEX_VPMADDWD_YMM_YMM_YMMM256"),
            (32, "int8", ("vpmaddubsw",)),
        ),
        (("VEX_VADDPS_YMM_YMM_YMMM256",), (0, "", ())),
    ],
)
def test_what_instructions_multiply(
    names: tuple[str, ...], expected: tuple[int, str, tuple[str, ...]]
) -> None:
    base = {"Y": Register.YMM0, "Z": Register.ZMM0, "T": Register.TMM0}
    made = [
        Instruction.create_reg_reg_reg(
            getattr(Code, name),
            *(base[re.findall(r"([YZT])MM", name)[0]] + n for n in range(3)),  # type: ignore[arg-type]
        )
        for name in names
    ]
    assert roles.multiply_adds(made) == expected


def test_a_loop_is_run_again_without_its_addresses() -> None:
    found = replay.programs(_NEST[1:5])
    assert {name: len(made) for name, made in found.items()} == {
        replay.PRODUCTS: 1, replay.LOADS: 2, replay.TOGETHER: 3,
    }  # fmt: skip
    (product,) = found[replay.PRODUCTS]
    assert roles.accesses(product) == (False, False)
    for one in (*found[replay.LOADS], *found[replay.TOGETHER]):
        if roles.accesses(one)[0]:
            assert one.memory_base == Register.RDI
            assert 0 <= one.memory_displacement < 8 << 10
    calls = Instruction.create_branch(Code.CALL_REL32_64, 0)
    with pytest.raises(ValueError, match="calls other functions"):
        replay.programs([calls])
    tile = Instruction.create_reg_reg_reg(
        Code.VEX_TDPBUSD_TMM_TMM_TMM, Register.TMM0, Register.TMM1, Register.TMM2
    )
    with pytest.raises(ValueError, match="cannot be run by itself"):
        replay.programs([tile])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgemm_kernel_HASWELL", "sgemm_kernel_HASWELL"),
        ("at::(anonymous namespace)::f(at::Tensor const&) const", "at::f"),
        ("void fbgemm::run<fbgemm::A<int>, 3>(int, std::vector<int>&)", "fbgemm::run"),
        ("std::function<void (int)>::operator()(int) const", "std::function::operator()"),
        ("a::b::{lambda(int)#1}::operator()(int) const", "a::b::{lambda#1}::operator()"),
        ("f(int) [clone .isra.0]", "f"),
    ],
)
def test_names_are_shortened(name: str, expected: str) -> None:
    assert short(name) == expected


def test_addresses_are_looked_up() -> None:
    places = [
        Mapping(0x5000, 0x6000, "r-xp", 0, ""),
        Mapping(0x7000, 0x8000, "r-xp", 0, "/no/such.cpython-311-x86_64-linux-gnu.so"),
    ]
    found = CodeMap(places, [(0x5100, 0x40, "jit_kernel")], [(0x7100, 0x7200), (0x5200, 0x5300)])
    assert found.function(0x5110) == Function("jit_kernel", "", 0x5100, 0x10)
    assert found.function(0x5110).kind == "generated"
    assert found.function(0x5140).text == "generated code"
    assert found.function(0x7150).text == "such+0x100"
    assert found.function(0x9000).text == "generated code"
    address = ctypes.cast(ctypes.pythonapi.PyList_New, ctypes.c_void_p).value
    assert address is not None
    own = CodeMap([one for one in mappings() if "x" in one.access])
    assert own.function(address).text == "PyList_New"


@pytest.mark.parametrize(
    ("function", "structure", "expected"),
    [
        ("sgemm_itcopy_HASWELL", {}, parts.PACK_A),
        ("sgemm_oncopy_HASWELL", {}, parts.PACK_B),
        (
            "fbgemm::PackAWithRowOffset::pack",
            {roles.PRODUCTS: 1, roles.ACCUMULATE: 1},
            parts.PACK_A,
        ),
        ("mkl_blas_avx512_sgemm_copybn", {}, parts.PACK_B),
        ("jit_brgemm_matmul_copy_b_transposed_t.2", {}, parts.PACK_B),
        ("fbgemm::requantizeOutputProcessingAvx2", {roles.PRODUCTS: 1}, parts.OUTPUT),
        ("generated code", {roles.PRODUCTS: 8, roles.ACCUMULATE: 8}, parts.KERNEL),
        ("x", {roles.LOAD: 1, roles.WRITE_BACK: 1}, parts.PACK),
        ("x", {roles.CONVERT: 1, roles.ARITHMETIC: 1, roles.WRITE_BACK: 1}, parts.OUTPUT),
        ("x", {roles.WAIT: 1}, parts.WAITING),
        ("x", {roles.LOAD: 1}, parts.OTHER),
    ],
)
def test_parts_follow_from_names_and_structure(
    function: str, structure: dict[str, int], expected: str
) -> None:
    assert parts.part_of(function, "libany.so", structure, 256) == expected
    assert parts.part_of(function, "libpython3.11.so.1.0", structure) == parts.CALLING


def test_the_chain_is_shortened_to_what_matters() -> None:
    names = [
        ("kernel", "libtorch_cpu.so"), ("at::native::f<int>(int)", "libtorch_cpu.so"),
        ("c10::impl::wrap_kernel_functor_unboxed_<x>::call()", "libtorch_cpu.so"),
        ("at::_ops::f::call(int)", "libtorch_cpu.so"), ("", "libtorch_python.so"),
        ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0"), ("_start", "python3.11"),
    ]  # fmt: skip
    native = [Function(name, library, 0, 0) for name, library in names]
    made = frames(native, [("/x/y.py", 3, "run")])
    assert [one.function for one in made if one.matters] == [
        "run", "at::_ops::f::call", "at::native::f", "kernel",
    ]  # fmt: skip
    assert (made[0].kind, made[0].where) == (PYTHON, "y.py:3")
    assert len(made) == 8
    # On a thread of a library's own there is no Python above.
    assert [one.kind for one in frames(native[:2], [("/x/y.py", 3, "run")])] == ["native"] * 2


def test_dwarf_expressions() -> None:
    def read(at: int, size: int) -> bytes:
        return {0x2000: 0x55}[at].to_bytes(size, "little")

    assert evaluate(b"\x76\x78\x06", {6: 0x2008}, read, None) == 0x55  # the word at rbp - 8
    # What linkers write for a jump table: rsp + 8, and 8 more where rip & 15 is at least 11.
    table = b"\x77\x08\x80\x00\x3f\x1a\x3b\x2a\x33\x24\x22"
    assert evaluate(table, {7: 0x2000, 16: 0x4A}, read, None) == 0x2008
    assert evaluate(table, {7: 0x2000, 16: 0x4B}, read, None) == 0x2010
    with pytest.raises(LookupError, match="not known"):
        evaluate(b"\xf0", {}, read, None)


def _loop(products: tuple[str, ...], arithmetic: str, bits: int, count: int = 8) -> Loop:
    structure = {roles.PRODUCTS: count, roles.ACCUMULATE: count}
    mix = dict.fromkeys(products, count)
    return Loop(
        "f", "l.so", "native", parts.KERNEL, 10, 0.9, 0, 9, structure, mix, (), bits, products,
        arithmetic, 64 if products else 0, 8, 4, 2,
    )  # fmt: skip


_SERVER = frozenset(
    {"avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
    | {"avx512bf16", "avxvnni"}
)


@pytest.mark.parametrize(
    ("products", "arithmetic", "bits", "expected", "fast", "said"),
    [
        ("vpdpbusd", "int8", 512, "int8", True, "yes: vpdpbusd on 512-bit vectors, the best"),
        ("vpdpbusds", "int8", 512, "int8", True, "yes"),
        ("vpmaddubsw", "int8", 256, "int8", False, "no: vpmaddubsw on 256-bit .* vpdpbusd zmm"),
        ("vfmadd231ps", "float32", 256, "float32", False, "zmm, which multiplies 2.0 times"),
        ("vfmadd132ps", "float32", 512, "", True, "yes"),
        ("vfmadd231ps", "float32", 512, "int8", False, "int8 is asked for, .* are float32"),
        ("vfmadd231ps", "float32", 512, "bfloat16", False, "where this machine has vdpbf16ps zmm"),
        ("vmulss", "float32", 128, "float32", False, "no: vmulss"),
    ],
)
def test_verdicts(
    products: str, arithmetic: str, bits: int, expected: str, fast: bool, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(host, "features", lambda: _SERVER)
    monkeypatch.setattr(
        replay, "measured", lambda wanted: dict.fromkeys(wanted, 1e-9)
    )  # the same time for twice as wide a vector
    found = verdict.judged(_loop((products,), arithmetic, bits), expected, "")
    assert found.fast is fast
    assert re.search(said, found.text)


@pytest.mark.parametrize(
    ("by", "count", "expected"),
    [
        ({replay.PRODUCTS: 9.0, replay.LOADS: 5.0}, 12, "products"),
        ({replay.PRODUCTS: 5.0, replay.LOADS: 9.0}, 1, "loads"),
        ({replay.PRODUCTS: 9.0, replay.LOADS: 5.0}, 1, "added to 1 register"),
        ({replay.STORES: 3.0, replay.LOADS: 2.0}, 0, "wait for the results of others"),
    ],
)
def test_what_limits_a_loop(by: dict[str, float], count: int, expected: str) -> None:
    hot = dataclasses.replace(_loop(("vfmadd231ps",), "float32", 512), accumulators=count)
    assert run._limited_by({**by, replay.TOGETHER: 10.0}, hot).endswith(expected)


def test_a_verdict_needs_a_loop() -> None:
    assert verdict.judged(None, "int8", "no hot loop").fast is None
    scalar = verdict.judged(_loop((), "", 0), "", "")
    assert scalar.fast is False
    assert "no vector instructions" in scalar.text


def test_shares_of_operators() -> None:
    rows = Operator.table({"a": [1.0, 2.0], "b": [1.0]})
    assert [(row.name, row.share, row.calls, row.mean_seconds) for row in rows] == [
        ("a", 0.75, 2, 1.5), ("b", 0.25, 1, 1.0),
    ]  # fmt: skip
    loop = _loop(("vpdpbusd",), "int8", 512)
    assert (loop.loads_per_product, loop.stores_per_product) == (0.5, 0.25)


def test_subjects_are_understood(tmp_path: Path) -> None:
    asked = understood("torch:linear 4x8:8x16 dtype=bfloat16 bias=false rows=3 x=0.5", 2)
    assert (asked.engine, asked.name, asked.shapes) == ("torch", "linear", ((4, 8), (8, 16)))
    assert asked.options == {"dtype": "bfloat16", "bias": False, "rows": 3, "x": 0.5}
    assert product_sizes(asked, 9) == (4, 8, 16)
    assert product_sizes(understood("torch:linear 8x16"), 9) == (9, 8, 16)
    assert matrix_product([(2, 3, 4), (4, 5)]) == 2 * 3 * 4 * 5
    assert matrix_product([(3, 4), (5, 6)]) is None
    file = tmp_path / "subject.py"
    file.touch()
    assert understood(str(file)).engine == "file"
    with pytest.raises(ValueError, match="give rows as int"):
        understood("torch:linear rows=x").take("rows", 1)
    with pytest.raises(ValueError, match=r"knows no rose=\.\.\."):
        understood("torch:linear rose=1").nothing_left()
    with pytest.raises(ValueError, match="KxN, with rows=M"):
        product_sizes(understood("torch:linear 3x4:5x6"), 1)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", ValueError, "is no subject; known are .*torch:"),
        ("linear", ValueError, "is no subject"),
        (
            "trch:linear",
            ValueError,
            "no engine is called 'trch' .*'torch'.*known: .*torch",
        ),
        ("nowhere.py", FileNotFoundError, "no such file"),
        ("torch:linear 3y4", ValueError, "shape '3y4' is not understood"),
        ("torch:linear 0x4", ValueError, "shape '0x4' is not understood"),
    ],
)
def test_bad_subjects_are_refused(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        understood(text)


def test_another_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.platform, "machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match=r"x86-64 on Linux; this is .* on aarch64"):
        run.trace("numpy:matmul 4x4:4x4")


def test_only_what_is_sampled_is_seen_in_python() -> None:
    """What the child calls for itself, and often lets others run in, is none of the subject's."""
    sampler = Sampler()
    run_, sample, begin = ("x.py", 3, "run"), ("child.py", 76, "sample"), ("child.py", 9, "main")
    waits = (("pathlib.py", 1027, "read_text"), ("child.py", 104, "_waited"), sample, begin)
    sampler._stacks.update({waits: 5, (run_, sample, begin): 2, (sample, begin): 9})
    assert sampler.python("child.py", "sample") == (run_,)
    assert sampler.python("child.py", "none") == ()
