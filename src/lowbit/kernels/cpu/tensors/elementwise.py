"""Element by element over strided tensors: arithmetic, functions, conversions and copies.

One kernel serves what differs only in its expression, its formats and its strides: Add to Where,
activations, Quantize, Dequantize, Requantize, Cast, and, as copies, Transpose, Concat, Split,
Slice, Expand and Pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa import InstructionSet, chain
from lowbit.isa.avx512 import AVX512_VBMI, vpermi2b
from lowbit.isa.generic import load_head, maximum, minimum, select, sqrt, store_head
from lowbit.isa.types import F32Pointer, Int, S64Pointer, Scalar, U8Pointer, Vector, f32, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    RAW,
    WHOLE,
    Affine,
    Convert,
    check_formats,
    dequantizing,
    load_vector,
    parameters_of,
    same,
    store_vector,
    storing,
    storing_whole,
    to_store,
)
from lowbit.kernels.cpu.shared.post_op import function_of, keeping_nan, post_ops
from lowbit.kernels.cpu.tensors import integers
from lowbit.kernels.cpu.tensors.functions import FUNCTIONS
from lowbit.kernels.cpu.tensors.loops import (
    BROADCAST,
    GATHERED,
    STRIDED,
    TOGETHER,
    TRANSPOSED,
    Loops,
    Nest,
    by_vectors,
    move_tiles,
    plan_loops,
)

NUMBER = "number"
KINDS = {**FORMATS, **WHOLE, **RAW}

_POWER = "power"

Step = int | str


def _truth(condition: Value) -> Value:
    bits = Vector(s32, condition.lanes)
    one = condition.machine.constant(1, bits)
    return select(condition, one, one - one).to(f32)


# What an expression of float32 can hold besides inputs, numbers and the post-operations that need
# no tensor.
OPERATIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "div": (2, lambda a, b: a / b),
    "min": (2, lambda a, b: keeping_nan(a, minimum(a, b))),
    "max": (2, lambda a, b: keeping_nan(a, maximum(a, b))),
    "less": (2, lambda a, b: _truth(a < b)),
    "equal": (2, lambda a, b: _truth(a.equals(b))),
    "where": (3, lambda condition, a, b: select(condition.equals(0.0), b, a)),
    "neg": (1, lambda a: a * -1.0),
    "abs": (1, lambda a: maximum(a, 0.0 - a)),
    "sqrt": (1, sqrt),
    **FUNCTIONS,
}


class Form(NamedTuple):
    """What is computed. It keys the code.

    inputs, out: formats, of `FORMATS` or `WHOLE`, or of a copy one of `RAW`.
    expression: in postfix order: the number of an input, "number" for one of the parameters, or the
    name of an operation.
    columns: as in `Loops`.
    computed: what the expression is computed in. "f32": each element is converted to float32, and
    operations are those of `OPERATIONS`, and post-operations that need no tensor; float32 holds
    integers exactly up to 2^24, and what becomes one of `WHOLE` loses its fraction. Or one of
    `WHOLE`, of which all formats are then, too: integers that are converted to it and wrap, with
    the operations of `integers`.
    """

    inputs: tuple[str, ...]
    out: str
    expression: tuple[Step, ...]
    columns: tuple[str, ...]
    computed: str = "f32"


class Elementwise(NamedTuple):
    """A form, and the table and number of items that go with it."""

    form: Form
    geometry: npt.NDArray[np.int64]
    items: int


def plan_elementwise(
    inputs: Sequence[str],
    out: str,
    expression: Sequence[Step],
    shape: Sequence[int],
    strides: Sequence[Sequence[int]],
    computed: str = "f32",
) -> Elementwise:
    """What `elementwise` needs for an output of this shape. inputs to computed: as in `Form`.

    strides: of the output, then of each input, in elements. ValueError: a format or a step of the
    expression is unknown, there are too few operands, or the strides do not fit.
    """
    form = Form(tuple(inputs), out, tuple(expression), (), computed)
    _check(form)
    tile_bytes = RAW[out].bytes if out in RAW and form.expression == (0,) else 0
    loops: Loops = plan_loops(shape, strides, tile_bytes)
    return Elementwise(form._replace(columns=loops.columns), loops.geometry, loops.items)


def parameters_array(
    inputs: Sequence[Affine], numbers: Sequence[float] = (), out: Affine | None = None
) -> npt.NDArray[np.float32]:
    """The parameters of `elementwise`, from scales and zero points of what consists of integers."""
    given = [number for pair in inputs for number in pair]
    return np.array([*given, *numbers, *to_store(out)], np.float32)


def whole_parameters(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """The parameters of `elementwise` where it computes in integers: of each its last bits."""
    return np.array([number % 2**64 for number in numbers], np.uint64).view(np.int64)


def plan_copy(itemsize: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Elementwise:
    """What `elementwise` needs to copy elements of 1, 2, 4 or 8 bytes: strides of output, input."""
    raw = f"raw{itemsize}"
    return plan_elementwise([raw], raw, (0,), shape, strides)


def _check(form: Form) -> None:
    check_formats((*form.inputs, form.out), KINDS)
    if len(form.inputs) > 3:
        raise ValueError(f"at most three inputs, got {len(form.inputs)}")
    if RAW.keys() & {*form.inputs, form.out} and (form.inputs, form.expression) != (
        (form.out,),
        (0,),
    ):
        raise ValueError(f"{form.out} can only be copied: got {form}")
    if form.computed != "f32":
        check_formats((form.computed, *form.inputs, form.out), WHOLE)
    depth = 0
    for step in form.expression:
        if isinstance(step, int) and step not in range(len(form.inputs)):
            raise ValueError(f"there is no input {step}: {form.expression}")
        taken = 0 if isinstance(step, int) or step == NUMBER else _arity(step, form.computed)
        if depth < taken:
            raise ValueError(f"{step!r} lacks operands: {form.expression}")
        depth += 1 - taken
    if depth != 1:
        raise ValueError(f"an expression has one result, not {depth}: {form.expression}")


def _arity(step: str, computed: str) -> int:
    if computed != "f32":
        if step != _POWER and step not in integers.OPERATIONS:
            raise ValueError(f"{step!r} is no operation of integers")
        return 2 if step == _POWER else integers.OPERATIONS[step][0]
    if step in OPERATIONS:
        return OPERATIONS[step][0]
    if post_ops.get(step).operand:
        raise ValueError(f"{step!r} needs a tensor: write it as an operation on inputs")
    return 1


@kernel
def elementwise(
    k: Builder,
    out: U8Pointer,
    a: U8Pointer,
    b: U8Pointer,
    c: U8Pointer,
    parameters: F32Pointer,
    geometry: S64Pointer,
    items: Int,
    *,
    form: Form,
) -> None:
    """out = the expression of a, b and c, of which only as many are used as the form has inputs.

    parameters: float32, in this order: scale and zero point of each input of `FORMATS` that has
    them; the numbers of the expression; 1 / scale and zero point of an output of 8 bits. Where
    integers are computed, int64: the numbers of the expression. geometry, items: of
    `plan_elementwise`. The output may be an input of the same format and strides, and may otherwise
    not overlap one.
    """
    kinds = [KINDS[name] for name in (form.out, *form.inputs)]
    pointers = [p.cast(kind) for p, kind in zip((out, a, b, c), kinds, strict=False)]
    nest = Nest(k, geometry, len(kinds))
    if TRANSPOSED in form.columns:
        for item in k.parallel(items):
            move_tiles(k, nest.block(item, pointers))
        return
    row = _Row(k, form, kinds, parameters)
    for item in k.parallel(items):
        block = nest.block(item, pointers)
        steps = [stride[-1] for stride in block.strides]
        block.rows(k, lambda at, block=block, steps=steps: row.emit(at, steps, block.extents[-1]))


class _Row:
    """What is done with one row."""

    def __init__(self, k: Builder, form: Form, kinds: list[Scalar], parameters: Value) -> None:
        self._k, self._form, self._kinds = k, form, kinds
        self._lanes = k.isa.vector_bytes // _lane_bytes(form)
        self._scratch = [
            k.local(kind, GATHERED) if how == STRIDED else None
            for kind, how in zip(kinds, form.columns, strict=True)
        ]
        self._loaded: list[Convert] = [same] * len(form.inputs)
        self._stored: Convert = same
        if form.out in RAW:
            self._evaluate = lambda inputs: inputs[0]
        elif form.computed == "f32":
            self._of_floats(parameters)
        else:
            self._of_integers(parameters)

    def _of_floats(self, parameters: Value) -> None:
        form, numbers = self._form, _numbers(parameters, self._lanes)
        self._loaded = [
            dequantizing(name, [next(numbers) for _ in range(parameters_of(name))])
            for name in form.inputs
        ]
        self._evaluate = _compiled(self._k, form, numbers, self._lanes)
        left = [next(numbers) for _ in range(parameters_of(form.out))]
        self._stored = storing(form.out, left)

    def _of_integers(self, parameters: Value) -> None:
        form, kind = self._form, WHOLE[self._form.computed]
        self._loaded = [lambda value: value.to(kind)] * len(form.inputs)
        numbers = (number.to(kind) for number in _numbers(parameters.cast(s64), self._lanes))
        self._evaluate = _compiled(self._k, form, numbers, self._lanes)
        self._stored = storing_whole(form.out)

    def emit(self, pointers: list[Value], steps: list[Value], count: Value) -> None:
        k = self._k
        target, *sources = pointers
        fetch = [
            self._source(number, source, steps[number], count)
            for number, source in enumerate(sources, start=1)
        ]
        place = target if self._scratch[0] is None else self._scratch[0]

        def some(at: Value, lanes: int, together: int, left: Value | None) -> None:
            for part in range(0, together * lanes, lanes):
                value = self._evaluate([one(at + part, lanes, left) for one in fetch])
                store_vector(self._stored(value), place + at + part, left)

        by_vectors(k, count, self._lanes, TOGETHER, some, self._form.out in RAW)
        if place is not target:
            for i in k.range(0, count):
                (target + i * steps[0]).store((place + i).load())

    def _source(
        self, number: int, source: Value, step: Value, count: Value
    ) -> Callable[[Value, int, Value | None], Value]:
        """What loads a vector of an input: from where on, how many lanes, how many are left."""
        k, convert = self._k, self._loaded[number - 1]
        if self._form.columns[number] == BROADCAST:
            every = source.load()
            whole = convert(every.splat(self._lanes))
            return lambda at, lanes, left: whole if lanes == self._lanes else every.splat(lanes)
        scratch = self._scratch[number]
        if scratch is not None:
            for i in k.range(0, count):
                (scratch + i).store((source + i * step).load())
            source = scratch
        return lambda at, lanes, left: convert(load_vector(source + at, lanes, left))


def _lane_bytes(form: Form) -> int:
    """Of a register, for each element. Narrow integers are computed in parts of registers, as many
    at a time as there are float32s, since not every set can mask their loads and stores."""
    if form.out in RAW:
        return RAW[form.out].bytes
    return 4 if form.computed == "f32" else max(4, WHOLE[form.computed].bytes)


def _numbers(parameters: Value, lanes: int) -> Iterator[Value]:
    """The parameters one after another, each in every lane."""
    at = 0
    while True:
        yield (parameters + at).load().splat(lanes)
        at += 1


def _compiled(
    k: Builder, form: Form, numbers: Iterator[Value], lanes: int
) -> Callable[[list[Value]], Value]:
    """The expression as a function of the inputs' vectors; its numbers are loaded here."""
    operations = OPERATIONS
    if form.computed != "f32":
        operations = {**integers.OPERATIONS, _POWER: (2, partial(integers.power, k))}
    steps: list[tuple[int, Callable[..., Value]] | int] = []
    for step in form.expression:
        if isinstance(step, int):
            steps.append(step)
        elif step == NUMBER:
            number = next(numbers)
            steps.append((0, lambda number=number: number))
        elif step in operations:
            steps.append(operations[step])
        else:
            given = [next(numbers) for _ in range(post_ops.get(step).parameters)]
            steps.append((1, function_of(step, k, lanes, given)))

    def evaluate(inputs: list[Value]) -> Value:
        stack: list[Value] = []
        for step in steps:
            if isinstance(step, int):
                stack.append(inputs[step])
                continue
            arity, function = step
            operands = [stack.pop() for _ in range(arity)][::-1]
            stack.append(function(*operands))
        return stack[0]

    return evaluate


# Any function of one byte, through a table of its 256 results.

_LANES = 64
_UNROLLED = 8
_BLOCK = 32768  # bytes of an item


def lookup_set(isa: InstructionSet) -> InstructionSet:
    """Whose program of `lookup` serves at this level: an extension's where the machine has it."""
    return AVX512_VBMI if AVX512_VBMI in chain(isa, extensions=True) else isa


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
