"""AMX tiles: one program loads, multiplies and stores them; interpreted anywhere, compiled where
the machine has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit.isa.amx import (
    AMX,
    ldtilecfg,
    tdpbusd,
    tileloadd,
    tileloaddt1,
    tilerelease,
    tilestored,
    tilezero,
)
from lowbit.isa.types import S32Pointer, U8Pointer
from lowbit.jit.builder import Builder, RegisterPressureError
from lowbit.jit.kernel import kernel


@kernel
def twice_the_product(
    k: Builder, config: U8Pointer, a: U8Pointer, b: U8Pointer, c: S32Pointer
) -> None:
    """c += 2·a·b for one tile each, with strides of 80, 64 and 64 bytes; then zero, and c again."""
    tiles = [k.tile(i) for i in range(8)]
    ldtilecfg(config, *tiles)
    tileloadd(tiles[0], c, k.index(64))
    tileloadd(tiles[1], a, k.index(80))
    tileloaddt1(tiles[2], b, k.index(64))
    tdpbusd(tiles[0], tiles[1], tiles[2])
    tdpbusd(tiles[0], tiles[1], tiles[2])
    tilestored(tiles[0], c, k.index(64))
    tilezero(tiles[0])
    tilestored(tiles[0], c + 16 * 16, k.index(64))
    tilerelease(*tiles)


def _case(rows: int, columns: int, groups: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:22] = [4 * columns, 0, 4 * groups, 0, 4 * columns, 0]
    config[48:51] = [rows, rows, groups]
    c = np.full((32, 16), 0x77777777, np.int32)
    c[:rows, :columns] = rng.integers(-(2**31), 2**31, (rows, columns))
    return {
        "config": config,
        "a": rng.integers(0, 256, (16, 80)).astype(np.uint8),
        "b": rng.integers(0, 256, (16, 64)).astype(np.uint8),
        "c": c,
    }


def _reference(case: dict[str, Any], rows: int, columns: int, groups: int) -> np.ndarray:
    a = case["a"][:rows, : 4 * groups].astype(np.int64)
    b = case["b"][:groups, : 4 * columns].view(np.int8).reshape(groups, columns, 4)
    product = a @ b.transpose(0, 2, 1).reshape(4 * groups, columns).astype(np.int64)
    expected = case["c"].copy()
    expected[:rows, :columns] = (expected[:rows, :columns] + 2 * product).astype(np.int32)
    expected[16 : 16 + rows, :columns] = 0
    return expected


SHAPES = [(16, 16, 16), (1, 16, 16), (7, 3, 5), (16, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_meaning(shape: tuple[int, int, int]) -> None:
    case = _case(*shape)
    expected = _reference(case, *shape)
    twice_the_product.interpret(AMX, case)
    np.testing.assert_array_equal(case["c"], expected)


@pytest.mark.skipif(bool(AMX.missing()), reason=AMX.missing() or "-")
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled(shape: tuple[int, int, int]) -> None:
    case = _case(*shape)
    expected = _reference(case, *shape)
    twice_the_product.program(AMX)(1, *(array.ctypes.data for array in case.values()))
    np.testing.assert_array_equal(case["c"], expected)


def test_code_is_generated_on_any_x86_machine() -> None:
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith("x86_64"):
        pytest.skip("LLVM here generates no x86 code")
    text = twice_the_product.assembly(AMX)
    for name in (
        "ldtilecfg",
        "tileloadd",
        "tileloaddt1",
        "tdpbusd",
        "tilestored",
        "tilezero",
        "tilerelease",
    ):
        assert name in text


@kernel
def unconfigured(k: Builder, c: U8Pointer) -> None:
    """Uses a tile that has no shape."""
    tileloadd(k.tile(0), c, k.index(64))


@kernel
def ninth_tile(k: Builder, c: U8Pointer) -> None:
    """Asks for a tile that there is not."""
    tilezero(k.tile(8))


def test_misuse_is_an_error() -> None:
    memory = np.zeros(1024, np.uint8)
    with pytest.raises(RuntimeError, match="before ldtilecfg"):
        unconfigured.interpret(AMX, {"c": memory})
    with pytest.raises(RegisterPressureError, match="has 8 tiles"):
        ninth_tile.interpret(AMX, {"c": memory})
    with pytest.raises(RegisterPressureError, match="has 8 tiles"):
        ninth_tile.ir(AMX)
