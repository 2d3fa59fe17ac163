"""Any function of one byte, through a table of its 256 results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowbit.isa import InstructionSet, chain
from lowbit.isa.avx512_vbmi import AVX512_VBMI, vpermi2b
from lowbit.isa.generic import load_head, minimum, select, store_head
from lowbit.isa.types import Int, U8Pointer, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.tensors.elementwise import (
    Step,
    elementwise,
    parameters_array,
    plan_elementwise,
)

_SIMPLE = {"number", "add", "sub", "mul", "min", "max", "neg", "abs", "relu", "clamp"}
_LANES = 64
_UNROLLED = 8
_BLOCK = 32768  # bytes of an item


def lookup_set(isa: InstructionSet) -> InstructionSet:
    """Whose program of `lookup` serves at this level: an extension's where the machine has it."""
    return AVX512_VBMI if AVX512_VBMI in chain(isa, extensions=True) else isa


def lookup_pays(isa: InstructionSet, expression: Sequence[Step]) -> bool:
    """Whether `lookup` is faster than `elementwise`, for contiguous tensors of 8 bits.

    Where bytes are looked up one by one, at some five a nanosecond, arithmetic is as fast.
    """
    functions = {step for step in expression if isinstance(step, str)}
    return lookup_set(isa) is AVX512_VBMI or bool(functions - _SIMPLE)


def byte_table(
    isa: InstructionSet,
    formats: tuple[str, str],
    affine: tuple[tuple[float, int], tuple[float, int]],
    expression: Sequence[Step],
    numbers: Sequence[float] = (),
) -> npt.NDArray[np.uint8]:
    """What `elementwise` makes of each byte, [256]: for tensors of 8 bits in and out.

    formats, affine: those of input and output, "u8" or "s8", with scale and zero point.
    """
    table, every = np.empty(256, np.uint8), np.arange(256, dtype=np.uint8)
    plan = plan_elementwise([formats[0]], formats[1], expression, (256,), [(1,), (1,)])
    program = elementwise.program(isa, form=plan.form)
    parameters = parameters_array(affine[:1], numbers, affine[1])
    program(1, table, every, None, None, parameters, plan.geometry, plan.items)
    return table


@kernel
def lookup(k: Builder, out: U8Pointer, x: U8Pointer, table: U8Pointer, count: Int) -> None:
    """out[i] = table[x[i]], for `count` bytes; table: 256 bytes. The output may be the input."""
    blocks = (count + (_BLOCK - 1)) // _BLOCK
    parts = []
    if k.isa is AVX512_VBMI:
        parts = [(table + part).load(_LANES) for part in range(0, 256, _LANES)]
    for item in k.parallel(blocks):
        begin = item * _BLOCK
        end = minimum(begin + _BLOCK, count)
        if parts:
            _permuted(k, out, x, parts, begin, end)
        else:
            _one_by_one(k, out, x, table, begin, end)


def _permuted(
    k: Builder, out: Value, x: Value, parts: list[Value], begin: Value, end: Value
) -> None:
    def found(indices: Value) -> Value:
        low = vpermi2b(parts[0], indices, parts[1])
        return select(indices < 128, low, vpermi2b(parts[2], indices, parts[3]))

    whole = begin + (end - begin) // _LANES * _LANES
    for at in k.range(begin, whole, _LANES):
        (out + at).store(found((x + at).load(_LANES)))
    for _ in k.when(whole < end):
        store_head(found(load_head(x + whole, end - whole, _LANES)), out + whole, end - whole)


def _one_by_one(k: Builder, out: Value, x: Value, table: Value, begin: Value, end: Value) -> None:
    def move(at: Value) -> None:
        (out + at).store((table + (x + at).load().to(s64)).load())

    whole = begin + (end - begin) // _UNROLLED * _UNROLLED
    for at in k.range(begin, whole, _UNROLLED):
        for byte in range(_UNROLLED):
            move(at + byte)
    for at in k.range(whole, end):
        move(at)
