"""To which element of a strided array a byte belongs."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.jit.memory import Elements

AROUND = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
VIEWS = {
    "contiguous": AROUND,
    "rows of a slice": AROUND[1:4, 2:6],
    "backwards": AROUND[::-2, ::-1],
    "transposed": AROUND.T[1:5],
    "one element": AROUND[2:3, 3:4],
    "none": AROUND[:0],
    "bytes of records": np.zeros(5, [("value", "i4"), ("tag", "u1")])["value"],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", [1, 2, 4, 6, 8, 16])
def test_an_access_belongs_to_the_element_where_it_begins(view: str, size: int) -> None:
    array = VIEWS[view]
    elements = Elements(array.shape, array.strides, array.itemsize)
    owner: dict[int, int] = {}
    for number, index in enumerate(np.ndindex(array.shape)):
        start = sum(i * step for i, step in zip(index, array.strides, strict=True))
        owner.update({start + byte: number for byte in range(array.itemsize)})
    offsets = np.arange(-200, 200)
    expected = [
        owner[at] if all(at + byte in owner for byte in range(size)) else -1
        for at in offsets.tolist()
    ]
    np.testing.assert_array_equal(elements.locate(offsets, size), expected)
    np.testing.assert_array_equal(
        elements.locate(offsets.reshape(20, 20), size), np.reshape(expected, (20, 20))
    )
