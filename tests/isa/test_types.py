"""Types are found by identity: of the same parameters there is one, however it was come by."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from lowbit.isa import get
from lowbit.isa.types import Pointer, Scalar, Vector, f32, s64, tile, u8
from lowbit.jit.interpret import Interpreter


@pytest.mark.parametrize("type_", [u8, s64, tile, Vector(u8, 4), Pointer(f32)], ids=str)
def test_a_copy_is_the_same_object(type_: Any) -> None:
    assert copy.copy(type_) is copy.deepcopy(type_) is pickle.loads(pickle.dumps(type_)) is type_


def test_types_of_the_same_parameters_are_one() -> None:
    assert Vector(Scalar("u", 8), 4) is Vector(u8, 4)
    assert len({u8, Scalar("s", 8), Vector(u8, 4), Vector(u8, 8), Pointer(u8)}) == 5


def test_constants_that_are_equal_may_differ() -> None:
    machine = Interpreter(get("generic"))
    for type_ in (f32, Vector(f32, 4)):
        signs = [np.signbit(machine.constant(x, type_).payload).any() for x in (0, 0.0, -0.0, 0)]
        assert signs == [False, False, True, False]
    assert machine.constant(1, s64).payload == 1
    assert machine.constant(1, Vector(u8, 2)).payload.tolist() == [1, 1]
    for _ in range(2):  # refused again
        with pytest.raises(ValueError, match="256 is no u8"):
            machine.constant(256, u8)
