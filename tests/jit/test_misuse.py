"""What a kernel text must not do, and that it is told so while the kernel is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.isa import GENERIC, SETS, get
from lowbit.isa.avx2 import AVX2, vpmaddwd
from lowbit.isa.generic import add
from lowbit.isa.types import Int, S32Pointer, f32, s16, s32, u8
from lowbit.jit.builder import MAX_REGIONS, Builder, RegisterPressureError
from lowbit.jit.kernel import Kernel, kernel

RunBoth = Callable[..., dict[str, np.ndarray]]

BLOCKS: dict[str, Callable[[Builder, Any], Any]] = {
    "range": lambda k, n: k.range(0, n),
    "when": lambda k, n: k.when(n > 0),
    "parallel": lambda k, n: k.parallel(n),
}


@kernel
def broken_off(k: Builder, out: S32Pointer, n: Int, *, block: str) -> None:
    """Leave a block by break."""
    for _ in BLOCKS[block](k, n):
        out.store(k.constant(1, s32))
        break
    out.store(k.constant(2, s32))


@kernel
def returned_from(k: Builder, out: S32Pointer, n: Int, *, block: str) -> None:
    """Leave a block, inside of another one, by return."""
    for _ in k.range(0, n):
        for _ in BLOCKS[block](k, n):
            out.store(k.constant(1, s32))
            return


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("text", [broken_off, returned_from], ids=lambda text: text.name)
def test_a_body_cannot_be_left(text: Kernel, block: str) -> None:
    with pytest.raises(RuntimeError, match=r"were left by break or return|inside of another body"):
        text.ir(GENERIC, block=block)


@kernel
def continued(k: Builder, out: S32Pointer, n: Int) -> None:
    """`continue` ends a body early, which both backends can do."""
    for i in k.range(0, n):
        (out + i).store(i.to(s32))
        continue


def test_continue_is_the_end_of_a_body(run_both: RunBoth) -> None:
    result = run_both(continued, {"out": np.full(4, 9, np.int32), "n": 3}, threads=(1,))
    assert result["out"].tolist() == [0, 1, 2, 9]


def _interpreted(text: Kernel, **static: Any) -> None:
    text.interpret(GENERIC, {"out": np.zeros(64, np.int32), "n": 3}, **static)


def _generated(text: Kernel, **static: Any) -> None:
    text.ir(GENERIC, **static)


BACKENDS = pytest.mark.parametrize("read", [_interpreted, _generated])


@kernel
def branch_in_python(k: Builder, out: S32Pointer, n: Int, *, loop: bool) -> None:
    """Ask Python for the truth of a value of the machine."""
    if loop:
        while n > 0:
            pass
    if n > 0:
        out.store(k.constant(1, s32))


@BACKENDS
@pytest.mark.parametrize("loop", [False, True])
def test_python_cannot_branch_on_a_value(read: Callable[..., None], loop: bool) -> None:
    with pytest.raises(TypeError, match=r"k\.when\(condition\) for a branch or select"):
        read(branch_in_python, loop=loop)


@kernel
def another_type(k: Builder, out: S32Pointer, n: Int, *, what: str) -> None:
    """Mix types that do not mix."""
    value = out.load()
    if what == "variable":
        k.register(value).value = n
    elif what == "addition":
        _ = value + n
    elif what == "store":
        out.store(value.to(f32))
    elif what == "float operator":
        _ = value.to(f32) & value.to(f32)
    elif what == "shift":
        _ = value << 32
    elif what == "pointer":
        value.cast(f32)


@BACKENDS
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("variable", "a variable of s32 cannot hold a s64"),
        ("addition", "add: operands of one scalar or vector type expected"),
        ("store", r"store: a f32 cannot be stored through a pointer to s32"),
        ("float operator", "and: integers expected, got f32"),
        ("shift", "shl: a s32 cannot be shifted by 32"),
        ("pointer", "a pointer is expected, got s32"),
    ],
)
def test_types_do_not_mix_by_themselves(read: Callable[..., None], what: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read(another_type, what=what)


def test_an_instruction_needs_an_operand_of_a_machine() -> None:
    with pytest.raises(TypeError, match="add needs at least one operand that lives on a machine"):
        add(1, 2)


@kernel
def from_a_higher_set(k: Builder, out: S32Pointer, n: Int) -> None:
    """Use an instruction of AVX2."""
    out.store(vpmaddwd(k.zeros(s16, 16), k.zeros(s16, 16)))


def test_an_instruction_of_another_set_is_refused() -> None:
    with pytest.raises(TypeError, match="vpmaddwd needs avx2"):
        from_a_higher_set.ir(GENERIC)
    assert "pmadd.wd" in from_a_higher_set.ir(AVX2)


@kernel
def many_variables(k: Builder, out: S32Pointer, n: Int, *, count: int, scopes: int) -> None:
    """`count` vector variables that live at once, in each of some scopes after each other."""
    for _ in range(scopes):
        with k.scope():
            made = [k.register(k.zeros(s32, 4)) for _ in range(count)]
            for variable in made:
                variable.value = variable.value + 1
                out.store(variable.value)


@BACKENDS
def test_registers_are_counted(read: Callable[..., None]) -> None:
    most = GENERIC.vector_registers - 2
    read(many_variables, count=most, scopes=3)
    with pytest.raises(RegisterPressureError, match=f"{most + 1} vector registers hold variables"):
        read(many_variables, count=most + 1, scopes=1)


@kernel
def wide_variables(k: Builder, out: S32Pointer, n: Int, *, lanes: int, count: int) -> None:
    """Variables wider than a register take several; scalars take none."""
    for _ in range(100):
        k.register(k.constant(0, s32))
    for _ in range(count):
        out.store(k.register(k.zeros(s32, lanes)).value)


@pytest.mark.parametrize(("lanes", "fitting"), [(4, 14), (8, 7), (5, 7), (16, 3), (1, 14)])
def test_a_wide_variable_counts_as_several(lanes: int, fitting: int) -> None:
    _generated(wide_variables, lanes=lanes, count=fitting)
    with pytest.raises(RegisterPressureError, match="generic has 16 in all"):
        _generated(wide_variables, lanes=lanes, count=fitting + 1)


@kernel
def tile_of_a_set_without(k: Builder, out: S32Pointer, n: Int) -> None:
    """Ask for a tile."""
    k.tile(0)


@BACKENDS
def test_tiles_are_counted(read: Callable[..., None]) -> None:
    with pytest.raises(RegisterPressureError, match="tile 0 is asked for, and generic has 0"):
        read(tile_of_a_set_without)


@kernel
def regions(k: Builder, out: S32Pointer, n: Int, *, count: int) -> None:
    """Some parallel regions after each other."""
    for number in range(count):
        for item in k.parallel(n):
            place = out + item
            place.store(place.load() + (number + 1))


def test_regions_are_counted(run_both: RunBoth) -> None:
    arguments = {"out": np.zeros(5, np.int32), "n": 5}
    result = run_both(regions, arguments, count=MAX_REGIONS)
    assert set(result["out"]) == {sum(range(MAX_REGIONS + 1))}
    with pytest.raises(RuntimeError, match=f"at most {MAX_REGIONS} parallel regions"):
        regions.ir(GENERIC, count=MAX_REGIONS + 1)


def test_a_failed_generation_leaves_nothing_behind() -> None:
    """The same Kernel serves after an error: nothing half made is kept."""
    with pytest.raises(RegisterPressureError):
        wide_variables.program(get("generic"), lanes=4, count=40)
    memory = np.ones(4, np.int32)
    wide_variables.program(get("generic"), lanes=4, count=1)(1, memory.ctypes.data, 0)
    assert not memory.any()


def test_a_set_that_is_missing_is_named() -> None:
    absent = [one for one in SETS.values() if one.missing()]
    assert absent, "no machine has the sets of two architectures"
    with pytest.raises(RuntimeError, match=f"regions for {absent[0].name} cannot run here: "):
        regions.program(absent[0], count=1)


def test_parallel_regions_stand_at_the_top() -> None:
    """Their counters are set once: inside of another body they would run once."""

    def inside(k: Builder, out: S32Pointer, n: Int) -> None:
        for _ in k.range(0, n):
            for i in k.parallel(n):
                (out + i).store(k.constant(1, s32))

    with pytest.raises(RuntimeError, match="inside of another body"):
        Kernel(inside).ir(SETS["generic"])


def test_equality_must_be_asked_for() -> None:
    def compares(k: Builder, out: S32Pointer, n: Int) -> None:
        if n == 0:
            out.store(k.constant(1, s32))

    with pytest.raises(TypeError, match=r"a\.equals\(b\)"):
        Kernel(compares).ir(SETS["generic"])


@pytest.mark.parametrize("backend", ["ir", "interpret"])
def test_both_backends_refuse_alike(backend: str) -> None:
    def too_large(k: Builder, out: S32Pointer, n: Int) -> None:
        k.constant(300, u8)

    def backwards(k: Builder, out: S32Pointer, n: Int) -> None:
        for _ in k.range(n, 0, -1):
            pass

    def narrow_bound(k: Builder, out: S32Pointer, n: Int) -> None:
        for _ in k.range(0, out.load()):
            pass

    arguments = {"out": np.zeros(1, np.int32), "n": 3}
    for text, error, message in (
        (too_large, ValueError, "300 is no u8"),
        (backwards, ValueError, "step of a k.range must be positive"),
        (narrow_bound, TypeError, "an s64 is expected, got s32"),
    ):
        given = (SETS["generic"],) if backend == "ir" else (SETS["generic"], arguments)
        with pytest.raises(error, match=message):
            getattr(Kernel(text), backend)(*given)


def test_kernels_of_one_factory_are_kept_apart() -> None:
    """What a text closes over is part of its code."""

    def make(n: int) -> Kernel:
        def text(k: Builder, out: S32Pointer) -> None:
            out.store(k.constant(n, s32))

        return Kernel(text)

    for n in (1, 2):
        out = np.zeros(1, np.int32)
        make(n).program(SETS["generic"])(1, out.ctypes.data)
        assert out[0] == n
