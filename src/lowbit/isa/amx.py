"""AMX: eight tiles of up to 16 rows of 64 bytes, and their products.

A tile is named by its number, which the kernel fixes; LLVM is never asked to allocate tiles.
A configuration must be loaded before the first use and released after the last. Source: Intel
Architecture Instruction Set Extensions Programming Reference, chapter "Intel AMX".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa import host
from lowbit.isa.avx512 import AVX512_BF16, AVX512_VNNI, flushed
from lowbit.isa.generic import fma
from lowbit.isa.instruction import Call, Instruction, Signature, instruction, intrinsic
from lowbit.isa.instruction_set import register
from lowbit.isa.tiles import ROW_BYTES, ROWS, TileState
from lowbit.isa.types import Pointer, Type, bf16, ir, s64, tile, u8

TILES = 8

_TILES: dict[str, Any] = {"tiles": TILES, "permission": host.tile_permission}
AMX = register(AVX512_VNNI.plus("amx", "amx-tile", "amx-int8", **_TILES))

AMX_BF16 = register(
    AVX512_BF16.plus("amx_bf16", "amx-tile", "amx-bf16", fallback="amx", extension=True, **_TILES)
)


def _load_config(call: Call, pointer: ir.Value, *tiles: ir.Value) -> None:
    call.intrinsic("llvm.x86.ldtilecfg", pointer)


@instruction(Signature(None, Pointer(u8), *[tile] * TILES), _load_config, feature="amx-tile")
def ldtilecfg(address: Any, *tiles: TileState) -> None:
    """Shape all eight tiles from 64 bytes: palette 1, then bytes a row (u16 at 16), rows (at 48).

    The tiles are operands only so that the interpreter can reach them.
    """
    config = address.load(64)
    if config[0] != 1:
        raise RuntimeError(f"ldtilecfg: palette {config[0]}, only 1 is defined")
    widths = config[16:32].view(np.uint16)
    for number, state in enumerate(tiles):
        rows, width = int(config[48 + number]), int(widths[number])
        if rows > ROWS or width > ROW_BYTES:
            raise RuntimeError(f"ldtilecfg: tile {number} of {rows} rows of {width} bytes")
        state.rows, state.row_bytes = rows, width
        state.data = np.zeros((ROWS, ROW_BYTES), np.uint8)


def _release(call: Call, *tiles: ir.Value) -> None:
    call.intrinsic("llvm.x86.tilerelease")


@instruction(Signature(None, *[tile] * TILES), _release, feature="amx-tile")
def tilerelease(*tiles: TileState) -> None:
    """Give all tiles up; using one afterwards is an error."""
    for state in tiles:
        state.rows = state.row_bytes = 0


@instruction(Signature(None, tile), "llvm.x86.tilezero", feature="amx-tile")
def tilezero(destination: TileState) -> None:
    """Fill with zeros."""
    destination.set(np.zeros_like(destination.view()))


def _tile_memory(number: Type, pointer: Type, stride: Type) -> None:
    if number != tile or not isinstance(pointer, Pointer) or stride != s64:
        raise TypeError(f"(tile, pointer, s64) expected, got ({number}, {pointer}, {stride})")


def _load_tile(destination: TileState, address: Any, stride: int) -> None:
    """Load the configured rows, `stride` bytes apart."""
    rows, width = destination.view().shape
    lines = [address.moved_bytes(row * int(stride)).load_bytes(width) for row in range(rows)]
    destination.set(np.stack(lines))


def _load(name: str) -> Instruction:
    return Instruction(name, _tile_memory, intrinsic(f"llvm.x86.{name}64"), _load_tile, "amx-tile")


tileloadd = _load("tileloadd")
tileloaddt1 = _load("tileloaddt1")
"""As `tileloadd`, of data that passes by: it does not push others out of the nearest cache."""


@instruction(_tile_memory, "llvm.x86.tilestored64", feature="amx-tile")
def tilestored(source: TileState, address: Any, stride: int) -> None:
    """Store the configured rows, `stride` bytes apart."""
    for row, line in enumerate(source.view()):
        address.moved_bytes(row * int(stride)).store_bytes(line)


def _operands(c: TileState, a: Any, b: Any) -> Any:
    """The sums, 32 bits each; RuntimeError unless they are those of a product of a [M, K] and b
    [K/p, p·N], p elements to 32 bits."""
    sums, packed = c.view().view(np.int32), 4 // a.itemsize
    if a.shape != (sums.shape[0], packed * b.shape[0]) or b.shape[1] != packed * sums.shape[1]:
        raise RuntimeError(
            f"a product of tiles {sums.shape}, {a.shape}, {b.shape} differs in M, N or K"
        )
    return sums


def _byte_product(name: str, a_type: type, b_type: type) -> Instruction:
    def meaning(c: TileState, a: TileState, b: TileState) -> None:
        """c[m, n] += Σ_k a[m, k]·b[k/4, 4n + k%4], which wraps and never saturates."""
        left, right = a.view().view(a_type), b.view().view(b_type)
        sums = _operands(c, left, right)
        by_k = right.reshape(right.shape[0], -1, 4).transpose(0, 2, 1).reshape(left.shape[1], -1)
        c.set((sums + left.astype(np.int32) @ by_k.astype(np.int32)).view(np.uint8))

    typing = Signature(None, tile, tile, tile)
    return Instruction(name, typing, intrinsic(f"llvm.x86.{name}"), meaning, "amx-int8")


tdpbusd = _byte_product("tdpbusd", np.uint8, np.int8)
tdpbsud = _byte_product("tdpbsud", np.int8, np.uint8)
tdpbssd = _byte_product("tdpbssd", np.int8, np.int8)


@instruction(Signature(None, tile, tile, tile), "llvm.x86.tdpbf16ps", feature="amx-bf16")
def tdpbf16ps(c: TileState, a: TileState, b: TileState) -> None:
    """c[m, n] += Σ_k a[m, k]·b[k/2, 2n + k%2] of bfloat16 in float32.

    The sums over even k and over odd k are made apart from zero, one fused step after another in
    the order of k, then added to each other and to c. Subnormal numbers count as zero everywhere.
    """
    left, right = (one.view().view(bf16.numpy) for one in (a, b))
    sums = _operands(c, left, right).view(np.float32)
    left, right = flushed(left), flushed(right)
    halves = [np.zeros_like(sums), np.zeros_like(sums)]
    for pair in range(right.shape[0]):
        for odd in range(2):
            column, row = left[:, 2 * pair + odd, None], right[pair, odd::2]
            halves[odd] = flushed(fma.meaning(column, row, halves[odd]))
    total = flushed(flushed(sums) + flushed(halves[0] + halves[1]))
    c.set(total.view(np.uint8))
