"""The ceilings that a product is measured against: products alone, and reading alone.

A way to multiply keeps as many independent accumulators going as its latency needs, on operands
that were loaded before the loop: nothing touches memory inside, so the rate is what the execution
units can do at the clock that the machine has just then. `read` is the opposite: it only loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.amx import TILES, tdpbusd, tileloadd, tilestored, tilezero
from lowbit.isa.avx2 import vpdpbusd_256, vpmaddubsw, vpmaddwd
from lowbit.isa.avx512 import vpdpbusd, vpmaddubsw_512, vpmaddwd_512
from lowbit.isa.generic import fma, madd16
from lowbit.isa.neon import sdot, usmmla
from lowbit.isa.tiles import ROW_BYTES, ROWS
from lowbit.isa.types import Int, S32Pointer, U8Pointer, Vector, f32, s8, s16, s32, u8, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.tiles import configure, release

OPERAND_BYTES = 2 * ROWS * ROW_BYTES  # what a way may load before it starts: two tiles
OUT_BYTES = ROWS * ROW_BYTES  # what it may store for each item at the end: one tile
READ_STEP = 512  # `read` takes this many bytes at a time

# (builder, accumulator, left bytes, right bytes) -> accumulator after one step
_VectorStep = Callable[[Builder, Value, Value, Value], Value]


@dataclass(frozen=True)
class _Vectors:
    """A way to multiply in vector registers: `step` adds `products` products of bytes, or
    floats."""

    isa: str
    width: int
    accumulators: int
    products: int
    step: _VectorStep
    dtype: str = "int8"

    def begin(self, k: Builder, values: Value) -> None:
        pass

    def run(self, k: Builder, values: Value, rounds: Value, out: Value) -> None:
        a = values.load(self.width)
        b = (values + self.width).cast(s8).load(self.width)
        number, lanes = s32, self.width // 4
        if self.dtype == "float32":
            # From 2^-63 to 2: nothing that is no number, or too small for the unit's usual speed.
            number, words = f32, Vector(u32, lanes)
            a, b = (
                ((x.bits(words) & 0x3FFFFFFF) | 0x20000000).bits(Vector(f32, lanes)) for x in (a, b)
            )
        sums = [k.register(k.zeros(number, lanes)) for _ in range(self.accumulators)]
        for _ in k.range(0, rounds):
            for one in sums:
                one.value = self.step(k, one.value, a, b)
        total = sums[0].value
        for one in sums[1:]:
            total = total + one.value
        out.store(total.bits(Vector(s32, lanes)))

    def end(self, k: Builder) -> None:
        pass


class _Tiles:
    """A way to multiply in AMX tiles: six of accumulators, whose products take 16 cycles each and
    are done after 52 (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on
    AMX), so four would do."""

    isa, dtype = "amx", "int8"
    accumulators = TILES - 2
    products = ROWS * ROWS * ROW_BYTES

    def begin(self, k: Builder, values: Value) -> None:
        configure(k)
        for number in range(2):
            place = values + number * ROWS * ROW_BYTES
            tileloadd(k.tile(self.accumulators + number), place, k.index(ROW_BYTES))

    def run(self, k: Builder, values: Value, rounds: Value, out: Value) -> None:
        *sums, a, b = (k.tile(number) for number in range(TILES))
        for tile in sums:
            tilezero(tile)
        for _ in k.range(0, rounds):
            for tile in sums:
                tdpbusd(tile, a, b)
        tilestored(sums[0], out, k.index(ROW_BYTES))

    def end(self, k: Builder) -> None:
        release(k)


# Where a product does not add by itself, it is given the accumulator as an operand: with two
# operands that never change, the compiler would multiply once, before the loop.


def _pairs_of_bytes(wide: int) -> _VectorStep:
    multiply, add_pairs = (
        (vpmaddubsw_512, vpmaddwd_512) if wide == ROW_BYTES else (vpmaddubsw, vpmaddwd)
    )

    def step(k: Builder, total: Value, a: Value, b: Value) -> Value:
        pairs = multiply(total.bits(Vector(u8, wide)), b)
        return total + add_pairs(pairs, k.constant(1, Vector(s16, wide // 2)))

    return step


def _pairs_of_words(multiply_add: Callable[[Value, Value], Value], wide: int) -> _VectorStep:
    words = Vector(s16, wide // 2)
    return lambda k, total, a, b: total + multiply_add(total.bits(words), b.bits(words))


WAYS: dict[str, _Vectors | _Tiles] = {
    "tdpbusd": _Tiles(),
    "vpdpbusd zmm": _Vectors("avx512_vnni", 64, 24, 64, lambda k, c, a, b: vpdpbusd(c, a, b)),
    "vpdpbusd ymm": _Vectors("avx2_vnni", 32, 12, 32, lambda k, c, a, b: vpdpbusd_256(c, a, b)),
    "vpmaddubsw zmm": _Vectors("avx512", 64, 24, 64, _pairs_of_bytes(64)),
    "vpmaddwd zmm": _Vectors("avx512", 64, 24, 32, _pairs_of_words(vpmaddwd_512, 64)),
    "vpmaddubsw ymm": _Vectors("avx2", 32, 12, 32, _pairs_of_bytes(32)),
    "vpmaddwd ymm": _Vectors("avx2", 32, 12, 16, _pairs_of_words(vpmaddwd, 32)),
    "usmmla": _Vectors("neon_i8mm", 16, 16, 32, lambda k, c, a, b: usmmla(c, a, b)),
    "sdot": _Vectors(
        "neon_dotprod", 16, 16, 16, lambda k, c, a, b: sdot(c, a.bits(Vector(s8, 16)), b)
    ),
    "madd16": _Vectors("generic", 16, 8, 8, _pairs_of_words(madd16, 16)),
    "vfmadd zmm": _Vectors("avx512", 64, 24, 16, lambda k, c, a, b: fma(a, b, c), "float32"),
    "vfmadd ymm": _Vectors("avx2", 32, 12, 8, lambda k, c, a, b: fma(a, b, c), "float32"),
    "mulps, addps": _Vectors("generic", 16, 12, 4, lambda k, c, a, b: c * a + b, "float32"),
}
"""Ways to multiply bytes or floats, by what does it; several for one instruction set compete."""


def products_of(way: str) -> int:
    """Products of two numbers that one round of a way does."""
    return WAYS[way].accumulators * WAYS[way].products


@kernel
def multiply(
    k: Builder, values: U8Pointer, out: S32Pointer, rounds: Int, items: Int, *, way: str
) -> None:
    """Items of `rounds` rounds of a way, shared out among the threads.

    values: `OPERAND_BYTES` of any content. out: `OUT_BYTES` for each item; what is stored there
    only keeps the compiler from leaving the products out.
    """
    chosen = WAYS[way]
    chosen.begin(k, values)
    for item in k.parallel(items):
        with k.scope():
            chosen.run(k, values, rounds, out + item * (OUT_BYTES // 4))
    chosen.end(k)


@kernel
def read(
    k: Builder, source: U8Pointer, out: U8Pointer, chunk: Int, chunks: Int, repeats: Int
) -> None:
    """Read every byte of `chunks` chunks of `chunk` bytes, each chunk `repeats` times in a row.

    `chunk` is a multiple of `READ_STEP`. out: 64 bytes for each chunk, which get the bitwise or of
    what was read there.
    """
    width = k.isa.vector_bytes
    streams = min(8, READ_STEP // width)
    for item in k.parallel(chunks):
        start = source + item * chunk
        with k.scope():
            seen = [k.register(k.zeros(u8, width)) for _ in range(streams)]
            for _ in k.range(0, repeats):
                for offset in k.range(0, chunk, streams * width):
                    for number, one in enumerate(seen):
                        place = start + (offset + number * width)
                        one.value = one.value | place.load(width)
            total = seen[0].value
            for one in seen[1:]:
                total = total | one.value
            (out + item * ROW_BYTES).store(total)
