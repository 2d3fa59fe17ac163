"""What the memory of the checker finds, access by access: outside of elements, races, lanes that a
mask leaves undefined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lowbit.spec import TensorType
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.tensor import CheckedTensor, strays

FLOAT32 = np.dtype(np.float32)


def tensor(shape: tuple[int, ...] = (8,), strides: tuple[int, ...] = (1,)) -> CheckedTensor:
    """One that is there before the kernel runs, and is changed."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    dims = tuple(f"N{axis}" for axis in range(len(shape)))
    return CheckedTensor(TensorType("x", "float32", dims), values, strides, "both")


def lanes(of: CheckedTensor, *offsets: int) -> Lanes:
    """One lane for each byte offset."""
    return Lanes(of, np.array(offsets, np.int64))


def read(memory: Memory, x: CheckedTensor, element: int) -> None:
    memory.load(lanes(x, 4 * element), np.zeros(1, np.float32))


def write(memory: Memory, x: CheckedTensor, element: int, value: float) -> None:
    memory.store(lanes(x, 4 * element), np.array([value], np.float32))


def kinds(memory: Memory) -> list[str]:
    return [finding.kind for finding in memory.findings]


@pytest.mark.parametrize(
    ("offset", "dtype", "good"),
    [
        (0, "f4", True),
        (28, "f4", True),
        (32, "f4", False),  # behind the last element
        (29, "f4", False),
        (-4, "f4", False),
        (2, "f4", False),  # across two elements
        (3, "u1", True),
        (31, "u1", True),
        (32, "u1", False),
        (8, "f8", True),  # two whole elements
        (28, "f8", False),
    ],
)
def test_an_access_lies_in_elements(offset: int, dtype: str, good: bool) -> None:
    x = tensor()
    memory = Memory([x])
    memory.begin((0, 0, 0))
    memory.load(lanes(x, offset), np.zeros(1, dtype))
    assert kinds(memory) == ([] if good else ["out-of-bounds-load"])


@pytest.mark.parametrize(
    ("offset", "dtype", "good"),
    [(8, "f4", True), (12, "f4", False), (20, "f4", True), (11, "u2", False), (8, "f8", False)],
)
def test_what_lies_between_rows_is_nobodys(offset: int, dtype: str, good: bool) -> None:
    x = tensor((2, 3), (5, 1))
    memory = Memory([x])
    memory.begin((0, 0, 0))
    memory.store(lanes(x, offset), np.zeros(1, dtype))
    assert kinds(memory) == ([] if good else ["out-of-bounds-store"])


def both_write(memory: Memory, x: CheckedTensor) -> None:
    memory.begin((0, 0, 0))
    write(memory, x, 3, 1.0)
    memory.begin((1, 0, 0))
    write(memory, x, 3, 2.0)


def both_write_the_same(memory: Memory, x: CheckedTensor) -> None:
    memory.begin((0, 0, 0))
    write(memory, x, 3, 1.0)
    memory.begin((1, 0, 0))
    write(memory, x, 3, 1.0)


def written_and_read(memory: Memory, x: CheckedTensor) -> None:
    memory.begin((0, 0, 0))
    write(memory, x, 3, 1.0)
    memory.begin((1, 0, 0))
    read(memory, x, 3)


def read_and_written(memory: Memory, x: CheckedTensor) -> None:
    memory.begin((0, 0, 0))
    read(memory, x, 3)
    memory.begin((1, 0, 0))
    write(memory, x, 3, 1.0)


def read_by_both_and_written(memory: Memory, x: CheckedTensor) -> None:
    """The last reader is who writes."""
    memory.begin((0, 0, 0))
    read(memory, x, 3)
    memory.begin((1, 0, 0))
    read(memory, x, 3)
    write(memory, x, 3, 1.0)


RACES: dict[Callable[[Memory, CheckedTensor], None], list[str]] = {
    both_write: ["write-conflict"],
    both_write_the_same: ["written-twice"],
    written_and_read: ["read-of-other"],
    read_and_written: ["read-of-other"],
    read_by_both_and_written: ["read-of-other"],
}


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
@pytest.mark.parametrize("launches", [0, 1, 2])
def test_programs_race(race: Callable[[Memory, CheckedTensor], None], launches: int) -> None:
    """Also the first ones, and those behind other launches."""
    x = tensor()
    memory = Memory([x])
    for _ in range(launches):
        memory.begin((0, 0, 0))
        write(memory, x, 3, 0.0)
        memory.barrier()
    race(memory, x)
    assert kinds(memory) == RACES[race]


def test_a_barrier_is_an_order() -> None:
    x = tensor()
    memory = Memory([x])
    memory.begin((0, 0, 0))
    write(memory, x, 3, 1.0)
    memory.barrier()
    memory.begin((1, 0, 0))
    read(memory, x, 3)
    write(memory, x, 3, 2.0)
    assert not kinds(memory)


def test_a_program_is_in_order_with_itself() -> None:
    x = tensor()
    memory = Memory([x])
    memory.begin((0, 0, 0))
    read(memory, x, 3)
    write(memory, x, 3, 1.0)
    read(memory, x, 3)
    write(memory, x, 3, 2.0)
    assert not kinds(memory)


def test_undefined_lanes_are_zeros_or_poison() -> None:
    for poisoned in (False, True):
        memory = Memory([tensor()], poisoned=poisoned)
        memory.begin((4, 0, 0))
        values = memory.undefined_values("float32", (6,))
        assert memory.undefined_in == {(4, 0, 0)}
        assert len(memory.undefined) == 1
        if not poisoned:
            assert not values.any()
            continue
        largest = np.finfo(np.float32).max
        np.testing.assert_array_equal(values, [np.nan, largest, -largest] * 2)


def test_poison_of_integers_has_both_ends() -> None:
    assert {-128, 127} <= set(strays("int8", (6,)).tolist())
