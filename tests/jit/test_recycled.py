"""Results of 32 to 128 MiB: their memory is used again once nothing refers to it, never before."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import lowbit
from lowbit.jit import workspace
from lowbit.jit.workspace import ALIGNMENT, recycled_empty

Array = np.ndarray[Any, Any]
_RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
_MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Each test begins and ends without memory of other results."""
    workspace._free.clear()
    yield
    workspace._free.clear()


def _made(mib: int, dtype: Any = np.uint8) -> Array:
    return recycled_empty((mib, _MIB // np.dtype(dtype).itemsize), dtype)


def _address(array: Array) -> int:
    return array.ctypes.data


def test_memory_is_used_again_once_the_array_is_gone() -> None:
    first = _made(40)
    address = _address(first)
    del first
    again = _made(33, bfloat16)
    assert _address(again) == address
    assert (again.shape, again.dtype) == ((33, _MIB // 2), bfloat16)
    assert again.flags.c_contiguous
    assert again.flags.writeable
    assert address % ALIGNMENT == 0


def _dlpack(array: Array) -> Any:
    return np.from_dlpack(array)


def _torch(array: Array) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array).view(-1)[5:]


@pytest.mark.parametrize(
    "held",
    [
        lambda array: array,
        lambda array: array[3:5, ::7],
        lambda array: array.view(np.int32).T.reshape(-1, order="F")[:1],
        lambda array: array.base,
        lambda array: array.view(np.matrix)[2:],
        lambda array: memoryview(array)[7:],
        lambda array: memoryview(array).cast("B")[:1],
        lambda array: np.frombuffer(array.data, np.uint16),
        lambda array: array.flat,
        _dlpack,
        _torch,
    ],
    ids=["array", "view", "reshaped", "base", "subclass", "memoryview", "cast", "buffer",
         "iterator", "dlpack", "torch"],
)  # fmt: skip
def test_memory_is_not_used_again_while_something_refers_to_it(
    held: Callable[[Array], Any],
) -> None:
    first = _made(40)
    address = _address(first)
    one = held(first)
    del first
    assert _address(_made(40)) != address
    workspace._free.clear()
    del one
    assert _address(_made(40)) == address


def test_a_loop_alternates_between_two_blocks() -> None:
    seen = list[int]()
    result = None
    for _ in range(6):
        result = _made(40)
        seen.append(_address(result))
    assert len(set(seen)) == 2
    assert all(a != b for a, b in pairwise(seen))


def test_no_more_than_two_blocks_are_kept() -> None:
    results = [_made(32) for _ in range(5)]
    assert len({_address(one) for one in results}) == 5
    results.clear()
    assert len(workspace._free) == 2


def test_a_block_serves_sizes_down_to_half_of_its_own() -> None:
    first = _made(80)
    address = _address(first)
    del first
    others = _made(81), _made(39)
    assert address not in map(_address, others)
    assert _address(_made(40)) == address


@pytest.mark.parametrize("size", [0, 1000, 32 * _MIB - 1, 128 * _MIB + 1])
def test_other_sizes_are_not_kept(size: int) -> None:
    array = recycled_empty((size,), np.uint8)
    assert array.nbytes == size
    del array
    assert not workspace._free


def test_what_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        recycled_empty((1 << 40, 1 << 20), np.float32)


@pytest.mark.deep
def test_results_are_right_in_memory_that_is_used_again() -> None:
    """With other data each time; the last calls are recognized. What is held stays as it is."""
    rng = np.random.default_rng(5)
    values = rng.integers(-128, 128, (6, 2048), dtype=np.int8)
    right = lowbit.pack(values)
    held, addresses = list[tuple[Array, Array]](), list[int]()
    for turn in range(8):
        left = rng.integers(0, 256, (5120, 6), dtype=np.uint8)
        result = lowbit.matmul(left, right)
        addresses.append(_address(result))
        expected = left.astype(np.int32) @ values.astype(np.int32)
        assert np.array_equal(result, expected)
        if turn == 3:
            held.append((result, expected))
    assert np.array_equal(*held[0])
    assert len(set(addresses)) == 3
    assert "matmul" in right._calls


def test_threads_never_get_the_same_memory() -> None:
    def work(number: int) -> bool:
        """Make results, each while the one before is held, and look whether that is whole."""
        last, expected, whole = None, 0, True
        for turn in range(60):
            result = _made(32 + number, np.int32)
            mark = result[:, 0] = np.int32(1000 * number + turn)
            whole = whole and (last is None or bool((last[:, 0] == expected).all()))
            last, expected = (result, mark) if turn % 3 else (None, 0)
        return whole

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_python_ends_in_silence_while_results_live(run_python: _RunPython) -> None:
    done = run_python(
        "import sys; from lowbit.jit.workspace import recycled_empty\n"
        "one = sys.one = recycled_empty((40 << 20,), 'u1'); one = recycled_empty((40 << 20,), 'u1')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
