"""NEON's products: their meanings against loops, their encoding, and that no other CPU loads them.

Emission against meaning is tests/kernels/test_qemu.py's matter.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from lowbit.isa import chain, named, neon
from lowbit.isa.instruction import Instruction, Signature
from lowbit.isa.types import Pointer, Vector, element_of, s8, s32
from lowbit.jit import compile as compiler
from lowbit.jit.emit import emit

DOTS = ["sdot", "udot", "usdot"]
MATRICES = ["smmla", "usmmla"]
IS_AARCH64 = llvm.get_process_triple().startswith("aarch64")


def _operands(instruction: Instruction) -> tuple[Any, Any]:
    """Two operand types of bytes."""
    assert isinstance(instruction.typing, Signature)
    left, right = instruction.typing.operands[1:]
    return element_of(left).numpy, element_of(right).numpy


def _pairs(instruction: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """All 65,536 pairs of bytes, 16 at a time."""
    every = np.arange(256).astype(np.uint8)
    a, b = (v.reshape(-1, 16) for v in np.meshgrid(every, every, indexing="ij"))
    left, right = _operands(instruction)
    return a.view(left), b.view(right)


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("name", DOTS)
def test_dot_products_of_every_pair_of_bytes(name: str) -> None:
    instruction: Instruction = getattr(neon, name)
    acc = np.array([2**31 - 1, -(2**31), 0, 5], np.int32)
    for a, b in zip(*_pairs(instruction), strict=True):
        result = instruction.meaning(acc, a, b)
        for i in range(4):
            products = [int(a[4 * i + j]) * int(b[4 * i + j]) for j in range(4)]
            assert result[i] == _wrapped(int(acc[i]) + sum(products))


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_products_of_every_pair_of_bytes(name: str) -> None:
    instruction: Instruction = getattr(neon, name)
    acc = np.array([2**31 - 1, -(2**31), 0, 5], np.int32)
    for a, b in zip(*_pairs(instruction), strict=True):
        result = instruction.meaning(acc, a, b)
        for i, j in np.ndindex(2, 2):
            products = [int(a[8 * i + k]) * int(b[8 * j + k]) for k in range(8)]
            assert result[2 * i + j] == _wrapped(int(acc[2 * i + j]) + sum(products))


def test_the_chain_of_fall_backs() -> None:
    names = [isa.name for isa in chain(named("neon_i8mm"))]
    assert names == ["neon_i8mm", "neon_dotprod", "generic"]


def _assembly(instruction: Instruction, isa: Any) -> str:
    assert isinstance(instruction.typing, Signature)
    vectors = [v for v in instruction.typing.operands if isinstance(v, Vector)]

    def text(k: Any, out: Any, *pointers: Any) -> None:
        loaded = [p.load(v.lanes) for p, v in zip(pointers, vectors, strict=True)]
        out.store(instruction(*loaded))

    types: list[Any] = [Pointer(v.element) for v in (vectors[0], *vectors)]
    return compiler.assembly(str(emit(text, types, isa, "text")), isa)


@pytest.mark.parametrize("name", DOTS + MATRICES)
def test_one_instruction_is_emitted(name: str) -> None:
    code = [line.split() for line in _assembly(getattr(neon, name), neon.NEON_I8MM).splitlines()]
    assert sum(words[:1] == [name] for words in code) == 1


@pytest.mark.parametrize("name", ["usdot", *MATRICES])
def test_i8mm_is_refused_where_there_is_only_the_dot_product(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} needs i8mm"):
        _assembly(getattr(neon, name), neon.NEON_DOTPROD)


@pytest.mark.skipif(IS_AARCH64, reason="this is an AArch64 machine, to which the code is native")
def test_code_for_another_architecture_is_not_loaded() -> None:
    def text(k: Any, p: Any) -> None:
        p.store(neon.sdot(k.zeros(s32, 4), k.zeros(s8, 16), k.zeros(s8, 16)))

    isa = neon.NEON_DOTPROD
    code = compiler.object_code(str(emit(text, [Pointer(s32)], isa, "text")), isa)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == 183  # EM_AARCH64, in the ELF header
    with pytest.raises(RuntimeError, match="neon_dotprod is an instruction set of aarch64"):
        compiler.Loaded(code, "text", isa)
