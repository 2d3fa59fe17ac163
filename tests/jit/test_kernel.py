"""Kernel objects: their parameters, their code, and the programs that they keep."""

from __future__ import annotations

import pytest

from lowbit.isa import SETS, active, available
from lowbit.isa.types import F32Pointer, Int
from lowbit.jit import compile as compiler
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import Kernel, kernel


@kernel
def scale(k: Builder, x: F32Pointer, n: Int, *, factor: float) -> None:
    """x[i] *= factor."""
    for i in k.range(0, n):
        (x + i).store((x + i).load() * factor)


def test_the_same_text_gives_the_same_code() -> None:
    first = scale.ir(SETS["generic"], factor=2.0)
    assert scale.ir(SETS["generic"], factor=2.0) == first
    assert scale.ir(SETS["generic"], factor=3.0) != first
    assert "define" in first
    assert "scale:" in scale.assembly(active(), factor=2.0)


def test_code_is_not_loaded_for_a_set_that_cannot_run_here() -> None:
    missing = [one for one in SETS.values() if one.missing()]
    assert missing, "no machine has x86's and AArch64's sets"
    for isa in missing:
        with pytest.raises(RuntimeError, match=f"scale for {isa.name} cannot run here"):
            scale.program(isa, factor=2.0)
    foreign = next(isa for isa in missing if isa.architecture != active().architecture)
    with pytest.raises(RuntimeError, match=f"f cannot be loaded here: {foreign.name} is"):
        compiler.Loaded(b"", "f", foreign)


def test_an_object_without_the_function_is_refused() -> None:
    code = compiler.object_code(scale.ir(SETS["generic"], factor=2.0), SETS["generic"])
    assert compiler.Loaded(code, "scale", SETS["generic"]).address
    with pytest.raises(ValueError, match="holds no function 'other'"):
        compiler.Loaded(code, "other", SETS["generic"])


def test_a_program_is_kept_for_each_set_and_static_argument() -> None:
    own = Kernel(scale.text)
    programs = [own.program(SETS[name], factor=f) for name in available() for f in (1.0, 2.0)]
    again = [own.program(SETS[name], factor=f) for name in available() for f in (1.0, 2.0)]
    assert programs == again
    assert len(set(programs)) == 2 * len(available())


def test_a_kernel_knows_its_parameters() -> None:
    assert {name: str(kind) for name, kind in scale.types.items()} == {"x": "f32*", "n": "s64"}
    assert (scale.name, scale.__doc__) == ("scale", "x[i] *= factor.")
