"""Functions as builtins: what they are given reaches known calls, or Python's function."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowbit
from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import builtin as module
from lowbit.jit.builder import Builder
from lowbit.jit.builtin import Finder, Table, builtin, table
from lowbit.jit.cached_call import Fresh, Same
from lowbit.jit.kernel import kernel

ANSWER = 77
DEFAULT = object()


@dataclass
class Operand:
    calls: dict[str, Any] = field(default_factory=dict)


def plain(x: Any, b: Any, y: Any = DEFAULT, *, z: Any, w: Any = None) -> Any:
    """What it was given."""
    return x, b, y, z, w


FINDER = Finder("plain", "b", Operand, "calls", arrays=0)
wrapped = builtin(plain, FINDER)
NAMES = ("x", "b", "y", "z", "w")


@kernel
def answer(k: Builder, out: S32Pointer, items: Int) -> None:
    """out[0] = 77."""
    for _ in k.range(0, items):
        out.store(k.constant(ANSWER, s32))


def recognizing(*values: Any) -> Any:
    """A call that takes just these, and answers an array that holds 77."""
    fresh = Fresh(np.empty, ((1,), np.dtype(np.int32)), "out")
    checks = [*map(Same, values)]
    made = answer.program(get("generic")).cached_call({"items": 1}, {}, 0, checks, fresh)
    assert made is not None
    return made


def tried(*calls: Any) -> Table:
    """A table of one bucket, whose calls are tried in order."""
    return (calls,)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TypeError as error:
        return str(error)


@given(
    st.lists(st.integers(), max_size=5),
    st.dictionaries(st.sampled_from([*NAMES, "other"]), st.integers(), max_size=6),
    st.booleans(),
)
def test_arguments_mean_what_they_mean_in_python(
    args: list[int], names: dict[str, int], foreign: bool
) -> None:
    """However they are given, right or wrong; names may be other objects than Python's own."""
    if foreign:
        names = {"".join(list(name)): value for name, value in names.items()}
    operand = Operand()
    operand.calls["plain"] = tried(recognizing(-1, -1, -1, -1))
    options: dict[str, Any] = dict(names)
    if "b" in options:
        options["b"] = operand
    values: list[Any] = [operand if place == 1 else one for place, one in enumerate(args)]
    assert outcome(lambda: wrapped(*values, **options)) == outcome(
        lambda: plain(*values, **options)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda b: wrapped(1, b, z=2),
        lambda b: wrapped(1, b, DEFAULT, z=2, w=None),
        lambda b: wrapped(z=2, b=b, x=1),
        lambda b: wrapped(1, z=2, w=None, y=DEFAULT, b=b),
    ],
)
def test_a_recognized_call_is_made(call: Callable[[Any], Any]) -> None:
    operand = Operand()
    operand.calls["plain"] = tried(
        recognizing(3, DEFAULT, 2, None), recognizing(1, DEFAULT, 2, None)
    )
    assert call(operand)[0] == ANSWER
    assert call(Operand())[0] == 1
    operand.calls["plain"] = tried()
    assert call(operand)[0] == 1


def test_what_differs_goes_to_python() -> None:
    operand = Operand()
    operand.calls["plain"] = tried(recognizing(1, DEFAULT, 2, None))
    assert wrapped(1, operand, z=2)[0] == ANSWER
    assert wrapped(1, operand, None, z=2) == (1, operand, None, 2, None)

    class Other(Operand):
        pass

    other = Other(operand.calls)
    assert wrapped(1, other, z=2) == (1, other, DEFAULT, 2, None)


def test_an_operand_without_calls() -> None:
    operand = Operand()
    del operand.calls
    assert wrapped(1, operand, z=2) == (1, operand, DEFAULT, 2, None)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64])
def test_calls_by_the_shapes_of_two_arrays(count: int) -> None:
    def two(a: Any, b: Any, *, c: Any = None) -> Any:
        return "python"

    pairs = [(np.zeros((rows, 3)), np.zeros((3, rows % 5))) for rows in range(count)]
    calls: dict[str, Table] = {}
    function = builtin(two, Finder("two", calls=calls, arrays=2))
    (a, b), others = pairs[0], np.zeros((count, 3))
    assert function(a, b) == "python"
    calls["two"] = table([((a.shape, b.shape), recognizing(a, b, None)) for a, b in pairs])
    assert sum(map(len, calls["two"])) == count
    for a, b in pairs:
        assert function(a, b)[0] == function(b=b, a=a)[0] == ANSWER
        assert function(others, b) == function(a, b, c=1) == function(a, [1]) == "python"
    assert function(np.zeros(()), b) == function(np.zeros((1,) * 5), b) == "python"


def test_no_reference_is_lost_or_kept() -> None:
    operand, x = Operand(), object()
    operand.calls["plain"] = tried(
        recognizing(3, DEFAULT, 2, None), recognizing(x, DEFAULT, 2, None)
    )
    objects = x, operand, operand.calls, operand.calls["plain"], None, DEFAULT
    before = [*map(sys.getrefcount, objects)]
    for _ in range(1000):
        wrapped(x, operand, z=2)
        wrapped(x, Operand(), z=2)
        wrapped(x, 1, z=2)
    after = [*map(sys.getrefcount, objects)]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) < 100


def test_it_is_what_the_function_is_to_a_reader() -> None:
    for name in ("matmul", "matmul_scaled", "linear_dynamic", "linear_weight_only", "gemm"):
        function = getattr(lowbit, name)
        assert pickle.loads(pickle.dumps(function)) is function
        written = function.__self__.__wrapped__
        assert [*inspect.signature(function).parameters.values()] == [
            one.replace(annotation=inspect.Parameter.empty)
            for one in inspect.signature(written).parameters.values()
        ]
        assert inspect.getdoc(function) == inspect.getdoc(written)
        assert (function.__name__, function.__module__) == (name, "lowbit.api")


def test_without_the_known_layout_it_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "builtins_are_known", lambda: False)
    assert builtin(plain, FINDER) is plain
