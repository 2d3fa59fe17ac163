"""Operands of calls that tests of the call cache make, and what they ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit import api

RNG = np.random.default_rng(5)
M, K, N = 5, 70, 32
BYTES = {
    "uint8": RNG.integers(0, 256, (M, K), dtype=np.uint8),
    "int8": RNG.integers(-128, 128, (M, K), dtype=np.int8),
}
FLOATS = RNG.standard_normal((M, K)).astype(np.float32)
WEIGHT = RNG.standard_normal((K, N)).astype(np.float32)
Call = Callable[..., Any]


def int8() -> lowbit.PackedMatrix:
    return lowbit.pack(lowbit.quantize(WEIGHT, "int8", axis=1))


def int4() -> lowbit.PackedMatrix:
    return lowbit.pack(lowbit.quantize(WEIGHT, "int4", axis=1, group_axis=0, group_size=32))


def refused(call: Call, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def prepared_twice(**options: Any) -> tuple[lowbit.PackedMatrix, Call]:
    """A packed matrix, and matmul_scaled with it, which recognizes calls with these options."""
    b = int8()

    def call(a: Any = BYTES["uint8"], **more: Any) -> Any:
        return lowbit.matmul_scaled(a, b, **{"a_scale": 0.5, **options, **more})

    for _ in range(2):
        call()
    assert len(api._scaled.ways(b)) == 1
    return b, call


def in_python(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put for each call that comes to Python's function."""
    calls: list[Any] = []
    checked = api.output
    monkeypatch.setattr(api, "output", lambda *args: calls.append(None) or checked(*args))
    return calls
