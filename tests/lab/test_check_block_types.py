"""What is made once is what Triton makes, and what it refuses stays refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from lowbit_lab.run import block_types
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.triton import interpreted

BINARY = (
    operator.add, operator.sub, operator.mul, operator.lt, operator.le, operator.gt, operator.ge,
    operator.eq, operator.ne, operator.and_, operator.truediv, operator.floordiv, operator.mod,
)  # fmt: skip
ALL = slice(None)
DATA = {
    tl.float32: np.array([1.5, -0.0, np.nan, 3e38], np.float32),
    tl.int32: np.array([1, -7, 2**31 - 1, 5], np.int32),
    tl.int64: np.array([1, -7, 2**40, 5], np.int64),
    tl.int1: np.array([True, False, True, True]),
    tl.uint32: np.array([1, 7, 2**32 - 1, 5], np.uint32),
    tl.float16: np.array([1.5, -0.0, np.nan, 6e4], np.float16),
    tl.bfloat16: np.array([0x3F80, 0x8000, 0x7FFF, 5], np.uint16),
}
INDICES = (
    (None, ALL), (ALL, None), (ALL, None, ALL), (None,), (slice(1, 2), None), (0,), None, ALL,
)  # fmt: skip
NUMBERS = (2, -3, 2.5, -0.0, float("nan"), 1e300, True, 2**31, -(2**31), 2**40, tl.constexpr(2))


def tensors() -> list[Any]:
    """A scalar, a row and a column of the dtypes whose types are kept, a row of the others, and
    pointers."""
    made = list[Any]()
    for number, (dtype, values) in enumerate(DATA.items()):
        for shape in ((), (4,), (4, 1), (1, 4)) if number < 4 else ((4,),):
            data = values[:1] if not shape else values.reshape(shape)
            type_ = tl.block_type(dtype, list(shape)) if shape else dtype
            made.append(tl.tensor(interpreter.TensorHandle(data, dtype), type_))
    pointer = tl.pointer_type(tl.float32)
    for shape in ((), (4,)):
        data = np.full(shape or 1, 1 << 39, np.uint64)
        type_ = tl.block_type(pointer, list(shape)) if shape else pointer
        made.append(tl.tensor(interpreter.TensorHandle(data, pointer), type_))
    return made


def outcome(made: Callable[[], Any]) -> tuple[Any, ...]:
    """The type and the bits of what is made, or how it is refused."""
    try:
        found = made()
    except Exception as error:
        return type(error.__cause__ or error), str(error)
    data = found.handle.data
    lanes = data.reshape([int(n) for n in found.shape]) if found.shape else data.reshape(())
    shape = [int(n.value) for n in found.shape]
    return str(found.type), str(found.dtype), shape, str(data.dtype), lanes.tobytes()


def outcomes() -> dict[str, tuple[Any, ...]]:
    """Of all operators on all pairs, and of all ways to index, each twice."""
    found: dict[str, tuple[Any, ...]] = {}
    with interpreted(Memory([])):
        operands = tensors()
        for combine in BINARY:
            for left in operands:
                for right in (*operands, *NUMBERS):
                    first = outcome(lambda: combine(left, right))  # noqa: B023
                    name = f"{combine.__name__} {left.type} {getattr(right, 'type', right)}"
                    assert first == outcome(lambda: combine(left, right)), name  # noqa: B023
                    found[name] = first
                    if not isinstance(right, tl.tensor | tl.constexpr):
                        found[f"r{name}"] = outcome(lambda: combine(right, left))  # noqa: B023
        for one in operands:
            for index in INDICES:
                first = outcome(lambda: one[index])  # noqa: B023
                assert first == outcome(lambda: one[index]), index  # noqa: B023
                found[f"{one.type}{index}"] = first
    return found


@pytest.mark.deep
def test_operators_make_what_triton_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    short = outcomes()
    monkeypatch.setattr(block_types, "replacements", lambda *_: ())
    plain = outcomes()
    assert len(plain) > 5_000
    assert [name for name in plain if plain[name] != short[name]] == []


def test_triton_is_asked_once_for_each_pair_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, operands = list[Any](), list[Any]()
    semantic = type(interpreter.interpreter_semantic)
    checking = semantic.binary_op_type_checking_impl

    def counted(self: Any, left: Any, right: Any, *args: Any, **more: Any) -> Any:
        asked.append((left, right))
        return checking(self, left, right, *args, **more)

    block_types._learned.cache_clear()
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", counted)
    for _ in range(2):
        with interpreted(Memory([])):
            operands = [one for one in tensors() if one.dtype == tl.int32]
            for left in operands:
                for right in (*operands, 1, 2):
                    _ = left + right
    assert len(asked) == len(operands) * (len(operands) + 1)
