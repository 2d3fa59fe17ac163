"""Integers that stand for themselves: each operation of the kernel wraps as NumPy's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.kernels.cpu.shared.formats import WHOLE
from lowbit.kernels.cpu.tensors import integers
from lowbit.kernels.cpu.tensors.elementwise import (
    elementwise,
    plan_elementwise,
    whole_parameters,
)

RunAll = Callable[..., dict[str, np.ndarray]]
DTYPES = [name for name in WHOLE if name != "bool"]


def _towards_zero(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """In integers of Python, which have no limits."""
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    made = [0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in pairs]
    return np.array([one % 2**64 for one in made], np.uint64).astype(x.dtype)


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By Python's modular power; the inverse of ±1, and 0 of others."""
    made = []
    for base, exponent in zip(x.tolist(), y.tolist(), strict=True):
        if exponent >= 0:
            made.append(pow(base, exponent, 2**64))
        else:
            made.append({1: 1, -1: (-1) ** (exponent % 2)}.get(base, 0) % 2**64)
    return np.array(made, np.uint64).astype(x.dtype)


MEANINGS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _towards_zero,
    "floor_div": np.floor_divide, "rem": np.fmod, "mod": np.mod, "min": np.minimum,
    "max": np.maximum, "less": np.less, "equal": np.equal, "where": np.where, "neg": np.negative,
    "abs": np.abs, "shift_left": np.left_shift, "shift_right": np.right_shift,
    "bits_and": np.bitwise_and, "bits_or": np.bitwise_or, "bits_xor": np.bitwise_xor,
    "bits_not": np.bitwise_not, "power": _power,
}  # fmt: skip


def drawn(random: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """Of the whole range, with its ends, and small numbers of which many are 0 or ±1."""
    limits = np.iinfo(dtype)
    whole = random.integers(limits.min, limits.max, count, dtype, endpoint=True)
    small = random.integers(-3, 9, count).astype(dtype)
    made = np.where(random.random(count) < 0.5, small, whole)
    made[:2] = limits.min, limits.max
    return random.permutation(made)


def test_every_operation_has_a_meaning_here() -> None:
    assert MEANINGS.keys() == {*integers.OPERATIONS, "power"}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("operation", MEANINGS)
def test_an_operation_wraps(run_all: RunAll, operation: str, turn: int) -> None:
    """Each operation of two dtypes, so that every dtype is met."""
    place = list(MEANINGS).index(operation)
    dtype = DTYPES[(3 * place + 5 * turn) % len(DTYPES)]
    random = np.random.default_rng(place)
    count = 3 if operation == "where" else 2
    inputs = [drawn(random, dtype, 150) for _ in range(count)]
    if operation in ("neg", "abs", "bits_not"):
        inputs = inputs[:1]
    if operation == "power":
        inputs[1] = np.where(inputs[1] > 99, 7, inputs[1])
    with np.errstate(all="ignore"):
        expected = MEANINGS[operation](*inputs).astype(dtype)
    steps = (*range(len(inputs)), operation)
    plan = plan_elementwise(
        [dtype] * len(inputs), dtype, steps, (150,), [(1,)] * (len(inputs) + 1), dtype
    )
    arguments = {
        "out": np.full(150, 77, dtype),
        **dict(zip("abc", [*inputs, None, None], strict=False)),
        "parameters": whole_parameters([]),
        "geometry": plan.geometry,
        "items": plan.items,
    }
    got = run_all(elementwise, arguments, interpret=turn == 0, form=plan.form)["out"]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("out", WHOLE)
def test_conversions(run_all: RunAll, out: str) -> None:
    """Other integers lose their high bits; of a number in the parameters the last bits count."""
    source = {"int8": "uint64", "uint8": "int16", "bool": "int64"}.get(out, "int8")
    x = drawn(np.random.default_rng(len(out)), source, 77)
    plan = plan_elementwise([source], out, (0, "number", "add"), (77,), [(1,), (1,)], source)
    number = int(np.iinfo(source).max)
    arguments = {
        "out": np.zeros(77, out), "a": x, "b": None, "c": None,
        "parameters": whole_parameters([number]), "geometry": plan.geometry, "items": plan.items,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        expected = (x + np.array(number, source)).astype(out)
    got = run_all(elementwise, arguments, form=plan.form)["out"]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("out", WHOLE)
def test_floats_lose_their_fraction(run_all: RunAll, out: str) -> None:
    random = np.random.default_rng(3)
    limits = np.iinfo("uint8" if out == "bool" else out)
    low, high = float(limits.min), float(np.nextafter(np.float32(limits.max), np.float32(0)))
    x = random.uniform(low, high, 99).astype(np.float32)
    x[::5] = random.normal(0, 1, 20)
    x[::10] = np.abs(x[::10]) if limits.min == 0 else x[::10]
    x[0] = 0
    plan = plan_elementwise(["f32"], out, (0,), (99,), [(1,), (1,)])
    arguments = {
        "out": np.zeros(99, out), "a": x, "b": None, "c": None,
        "parameters": np.zeros(1, np.float32), "geometry": plan.geometry, "items": plan.items,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        expected = x.astype(out) if out == "bool" else np.trunc(x).astype(out)
    got = run_all(elementwise, arguments, form=plan.form)["out"]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("formats", "step"), [
    (("int8", "f32", "int8"), "add"), (("int8", "int8", "int8"), "sigmoid"),
])  # fmt: skip
def test_what_is_no_integer_is_refused(formats: tuple[str, ...], step: str) -> None:
    *inputs, out = formats
    with pytest.raises(ValueError, match=r"is no format|no operation of integers"):
        plan_elementwise(inputs, out, (0, 1, step), (4,), [(1,)] * 3, "int8")
