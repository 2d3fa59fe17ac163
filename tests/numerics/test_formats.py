"""The table of integer formats."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lowbit.numerics import IntFormat, int_format


@pytest.mark.parametrize(
    ("name", "qmin", "qmax", "midpoint", "storage"),
    [
        ("uint8", 0, 255, 128, np.uint8),
        ("int8", -128, 127, 0, np.int8),
        ("uint4", 0, 15, 8, np.uint8),
        ("int4", -8, 7, 0, np.int8),
    ],
)
def test_facts(name: str, qmin: int, qmax: int, midpoint: int, storage: type) -> None:
    fmt = int_format(name)
    assert (fmt.name, fmt.qmin, fmt.qmax, fmt.midpoint) == (name, qmin, qmax, midpoint)
    assert fmt.storage == storage


@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_eight_bit_formats_are_numpys(name: str) -> None:
    info = np.iinfo(name)
    assert (int_format(name).qmin, int_format(name).qmax) == (info.min, info.max)


def test_a_format_is_returned_as_it_is() -> None:
    assert int_format(int_format("int4")) is int_format("int4")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'int7'.*'uint8', 'int8', 'uint4', 'int4'"):
        int_format("int7")


def test_a_dtype_is_not_a_name() -> None:
    with pytest.raises(TypeError, match="'uint8', 'int8', 'uint4', 'int4'"):
        int_format(np.dtype(np.int8))  # pyright: ignore[reportArgumentType]


def test_formats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        int_format("int8").bits = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert int_format("int8") == IntFormat("int8", 8, True)
