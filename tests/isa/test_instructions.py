"""Every instruction: its emission and its meaning, run on the same random data, must agree."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import lowbit.isa
from lowbit.isa import GENERIC, SETS, generic
from lowbit.isa.instruction import Instruction, Signature
from lowbit.isa.types import (
    Pointer,
    Tile,
    Type,
    Vector,
    bf16,
    bit,
    element_of,
    f32,
    f64,
    s8,
    s16,
    s32,
    s64,
    u8,
    u16,
    u32,
    u64,
    with_element,
)
from lowbit.isa.value import Value
from lowbit.jit import compile as compiler
from lowbit.jit.emit import emit
from lowbit.jit.interpret import Interpreter
from lowbit.jit.kernel import Program
from lowbit.jit.workspace import aligned_empty

ROUNDS = 50


@dataclass(frozen=True)
class Example:
    """One use: types of the operands, immediates behind them, and a range for numbers whose meaning
    is only defined there (indices do not wrap)."""

    operands: tuple[Type, ...]
    immediates: tuple[Any, ...] = ()
    span: tuple[int, int] | None = None


def _all_instructions() -> dict[str, Instruction]:
    found = {}
    for module in pkgutil.iter_modules(lowbit.isa.__path__):
        for name, value in vars(importlib.import_module(f"lowbit.isa.{module.name}")).items():
            if isinstance(value, Instruction):
                found[value.name] = value
                assert name.rstrip("_") == value.name
    return found


INSTRUCTIONS = _all_instructions()
V, W = Vector(s32, 8), Vector(f32, 16)
BYTES = Vector(u8, 64)
_integers = [
    Example((V, V)),
    Example((BYTES, BYTES)),
    Example((u32, u32)),
    Example((s64, s64), span=(0, 2**30)),
]
D = Vector(f64, 8)
_floats = [Example((W, W)), Example((f32, f32)), Example((D, D)), Example((f64, f64))]
_counts = [
    Example((V,), (7,)),
    Example((Vector(u16, 16),), (8,)),
    Example((Vector(s16, 16),), (8,)),
    Example((u32,), (31,)),
]
_own_counts = [
    Example((V, V), span=(0, 32)),
    Example((BYTES, BYTES), span=(0, 8)),
    Example((Vector(s64, 4), Vector(s64, 4)), span=(0, 64)),
]
EXAMPLES: dict[str, list[Example]] = {
    "add": _integers + _floats,
    "sub": _integers + _floats,
    "mul": _integers + _floats,
    "fdiv": _floats,
    "fma": [Example((W, W, W)), Example((f32, f32, f32))],
    "sqrt": [Example((W,)), Example((f32,))],
    "div": [
        Example((s64, s64), span=(1, 2**40)),
        Example((V, V)),
        Example((Vector(u64, 4), Vector(u64, 4))),
    ],
    "rem": [Example((s64, s64), span=(1, 2**40))],
    "and": _integers,
    "or": _integers,
    "xor": _integers,
    "shl": _counts,
    "shr": _counts,
    "shl_each": _own_counts,
    "shr_each": _own_counts,
    "lt": [*_integers, *_floats, Example((Vector(s8, 16), Vector(s8, 16)))],
    "eq": [
        *_floats,
        Example((Vector(u8, 16), Vector(u8, 16)), span=(0, 3)),
        Example((s64, s64), span=(0, 3)),
    ],
    "select": [
        Example((Vector(bit, 16), W, W)),
        Example((bit, f32, f32)),
        Example((bit, V, V)),
    ],
    "convert": [
        Example((Vector(u8, 16),), (s32,)),
        Example((Vector(s8, 16),), (s32,)),
        Example((Vector(s32, 16),), (u8,)),
        Example((Vector(s32, 16),), (f32,)),
        Example((Vector(u32, 16),), (f32,)),
        Example((Vector(bf16, 32),), (f32,)),
        Example((bf16,), (f32,)),
        Example((W,), (f64,)),
        Example((D,), (f32,)),
        Example((D,), (s32,), span=(-(2**30), 2**30)),
        Example((Vector(f32, 16),), (bf16,)),
        Example((f32,), (bf16,)),
        Example((Vector(f32, 8),), (s32,), span=(-(2**30), 2**30)),
        Example((s64,), (s32,)),
        Example((s32,), (s64,)),
        Example((s32,), (f32,)),
        Example((u8,), (s32,)),
    ],
    "bitcast": [
        Example((W,), (Vector(s32, 16),)),
        Example((V,), (Vector(u8, 32),)),
        Example((f32,), (s32,)),
        Example((u32,), (Vector(u8, 4),)),
    ],
    "splat": [Example((f32,), (16,)), Example((u32,), (8,)), Example((s32,), (16,))],
    "shuffle": [
        Example((V, V), ((0, 8, 1, 9, 15, 7, 3, 3),)),
        Example((W, W), ((31, 0),)),
    ],
    "add_saturated": [
        Example((Vector(s16, 32), Vector(s16, 32))),
        Example((BYTES, BYTES)),
    ],
    "extract": [Example((V,), (0,)), Example((W,), (13,))],
    "load": [
        Example((Pointer(u8),), (64,)),
        Example((Pointer(f32),), (0,)),
        Example((Pointer(s16),), (16,)),
    ],
    "store": [
        Example((V, Pointer(s32))),
        Example((f32, Pointer(f32))),
        Example((BYTES, Pointer(u8))),
    ],
    "prefetch": [Example((Pointer(u8),)), Example((Pointer(f32),))],
    "prefetch_far": [Example((Pointer(u8),)), Example((Pointer(f32),))],
    "prefetch_write": [Example((Pointer(u8),)), Example((Pointer(f32),))],
    "stream": [Example((V, Pointer(s32))), Example((BYTES, Pointer(u8)))],
    "load_head": [
        Example((Pointer(f32), s64), (16,), span=(-2, 20)),
        Example((Pointer(s32), s64), (8,), span=(-2, 20)),
    ],
    "store_head": [
        Example((W, Pointer(f32), s64), span=(-2, 20)),
        Example((V, Pointer(s32), s64), span=(-2, 20)),
    ],
    "madd16": [Example((Vector(s16, 16), Vector(s16, 16)))],
    "reduce_add": [Example((V,)), Example((Vector(s32, 64),))],
    "any": [Example((Vector(bit, 2),)), Example((Vector(bit, 16),))],
}
# These work on state, so one program exercises them together: see tests/isa/test_tiles.py.
TILES = {
    "ldtilecfg",
    "tilerelease",
    "tilezero",
    "tileloadd",
    "tileloaddt1",
    "tilestored",
    "tdpbusd",
    "tdpbssd",
    "tdpbsud",
}


def _uses(instruction: Instruction) -> list[Example]:
    if isinstance(instruction.typing, Signature):
        return [Example(instruction.typing.operands)]
    return EXAMPLES[instruction.name]


def test_every_instruction_is_tested() -> None:
    untested = [
        name
        for name, instruction in INSTRUCTIONS.items()
        if not isinstance(instruction.typing, Signature) and name not in EXAMPLES.keys() | TILES
    ]
    assert not untested, f"add examples for {untested}"


def _draw(rng: np.random.Generator, type_: Type, span: tuple[int, int] | None) -> np.ndarray:
    """Data of one operand over the full range of its type, special floats among it."""
    element = element_of(type_)
    count = 64 if isinstance(type_, Pointer) else getattr(type_, "lanes", 1)
    if element == bit:
        return rng.integers(0, 2, count).astype(np.uint8)
    if element == s64:
        return rng.integers(*(span or (-(2**40), 2**40)), count)
    if element == bf16:
        return rng.integers(0, 2**16, count).astype(np.uint16).view(element.numpy)
    if not element.is_float:
        limits = np.iinfo(element.numpy)
        low, high = span or (int(limits.min), int(limits.max) + 1)
        return rng.integers(low, high, count, np.uint64 if element == u64 else np.int64).astype(
            element.numpy
        )
    if span:
        return rng.uniform(*span, count).astype(element.numpy)
    values = np.frombuffer(rng.bytes(count * element.bytes), element.numpy)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, 1.0], element.numpy)
    return np.where(rng.random(count) < 0.3, rng.choice(special, count), values)


def _text(instruction: Instruction, example: Example) -> Any:
    """A kernel text: load the operands, execute, store the result."""

    def text(k: Any, *pointers: Value) -> None:
        operands = [
            pointer if isinstance(type_, Pointer) else _loaded(pointer, type_)
            for pointer, type_ in zip(pointers, example.operands, strict=False)
        ]
        value = instruction(*operands, *example.immediates)
        if value is not None:
            stored = _as_bytes(k, value)
            pointers[-1].cast(element_of(stored.type)).store(stored)

    return text


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    """As some instructions want their memory."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _memory(type_: Type) -> Pointer:
    """A pointer to where an operand lies; bits lie as bytes."""
    return Pointer(u8 if element_of(type_) == bit else element_of(type_))


def _loaded(pointer: Value, type_: Type) -> Value:
    values = pointer.load(getattr(type_, "lanes", 0))
    return values > 0 if element_of(type_) == bit else values


def _as_bytes(k: Any, value: Value) -> Value:
    if element_of(value.type) != bit:
        return value
    type_ = with_element(value.type, u8)
    return generic.select(value, k.constant(1, type_), k.constant(0, type_))


def _runnable() -> list[Any]:
    cases = []
    for name, instruction in sorted(INSTRUCTIONS.items()):
        if name in TILES:
            continue
        for number, example in enumerate(_uses(instruction)):
            for isa in SETS.values():
                if instruction.feature and instruction.feature not in isa.features:
                    continue
                if not instruction.feature and isa.name not in ("generic", "avx2", "avx512_vnni"):
                    continue
                cases.append(
                    pytest.param(instruction, example, isa, id=f"{name}-{number}-{isa.name}")
                )
    return cases


@pytest.mark.parametrize(("instruction", "example", "isa"), _runnable())
def test_emission_and_meaning_agree(instruction: Instruction, example: Example, isa: Any) -> None:
    if isa.missing():
        pytest.skip(isa.missing())
    result = instruction.typing(*example.operands, *example.immediates)
    pointers = [*map(_memory, example.operands), Pointer(u8)]
    names = [f"p{i}" for i in range(len(pointers))]
    text = _text(instruction, example)
    code = compiler.object_code(str(emit(text, list(pointers), isa, "text")), isa)
    program = Program("text", compiler.Loaded(code, "text", isa), isa, names)
    rng = np.random.default_rng(5)
    for _ in range(ROUNDS):
        data = [_draw(rng, type_, example.span) for type_ in example.operands]
        data.append(np.full(512, 0xEE, np.uint8))
        compiled, interpreted = ([_aligned_copy(array) for array in data] for _ in range(2))
        program(1, *(array.ctypes.data for array in compiled))
        machine, given = Interpreter(isa), zip(names, interpreted, pointers, strict=True)
        with np.errstate(all="ignore"):
            text(machine, *(machine.pointer(name, one, to.element) for name, one, to in given))
        # As floats, any NaN equals any other: which one is made is not defined.
        element = None if result is None else element_of(result)
        kind = element.numpy if element is not None and element.is_float else np.uint8
        compiled[-1], interpreted[-1] = compiled[-1].view(kind), interpreted[-1].view(kind)
        np.testing.assert_array_equal(compiled[-1], interpreted[-1])
        for ours, meant in zip(compiled[:-1], interpreted[:-1], strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), meant.view(np.uint8))


def test_nothing_computes_with_bfloat16() -> None:
    def added(k: Any, p: Value) -> None:
        generic.add(p.load(8), p.load(8))

    def to_integers(k: Any, p: Value) -> None:
        p.load(8).to(s32)

    for text, match in ((added, r"add: .*convert it with \.to\(f32\)"), (to_integers, "by way of")):
        with pytest.raises(TypeError, match=match):
            emit(text, [Pointer(bf16)], GENERIC, "text")


def test_wrong_operand_types_are_refused() -> None:
    def text(k: Any, p: Value) -> None:
        generic.add(p.load(8), p.cast(f32).load(8))

    with pytest.raises(TypeError, match="add: operands of one scalar or vector type"):
        emit(text, [Pointer(s32)], SETS["generic"], "text")


def test_an_instruction_of_a_higher_set_is_refused() -> None:
    from lowbit.isa.avx512 import vpdpbusd

    def text(k: Any, p: Value) -> None:
        vpdpbusd(k.zeros(s32, 16), k.zeros(u8, 64), k.zeros(s8, 64))

    with pytest.raises(TypeError, match="vpdpbusd needs avx512vnni"):
        emit(text, [Pointer(s32)], SETS["avx2"], "text")


@pytest.mark.parametrize("count", [-1, 32])
def test_shifts_outside_the_type_are_refused(count: int) -> None:
    def text(k: Any, p: Value) -> None:
        generic.shl(p.load(8), count)

    with pytest.raises(TypeError, match="cannot be shifted"):
        emit(text, [Pointer(s32)], SETS["generic"], "text")


def test_tiles_have_no_elements() -> None:
    with pytest.raises(TypeError, match="no elements"):
        element_of(Tile())


def test_every_pair_of_bytes_through_the_exact_products() -> None:
    """All 65,536 pairs, through both byte products, against NumPy."""
    from lowbit.isa.avx2 import vpmaddwd
    from lowbit.isa.avx512 import vpdpbusd

    a, b = (np.array(v) for v in zip(*itertools.product(range(256), range(-128, 128)), strict=True))
    left, right = a.astype(np.uint8).reshape(-1, 64), b.astype(np.int8).reshape(-1, 64)
    for x, y in zip(left, right, strict=True):
        sums = (x.astype(int) * y.astype(int)).reshape(16, 4).sum(axis=1)
        assert (vpdpbusd.meaning(np.zeros(16, np.int32), x, y) == sums).all()
        pairs = vpmaddwd.meaning(x[:16].astype(np.int16), y[:16].astype(np.int16))
        assert (pairs == (x[:16].astype(int) * y[:16]).reshape(8, 2).sum(axis=1)).all()
