"""Functions of numbers over the whole range of float32, against float64, within their budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lowbit import isa
from lowbit.graph import expression
from lowbit.kernels.cpu.tensors.elementwise import (
    elementwise,
    parameters_array,
    plan_elementwise,
)
from lowbit.kernels.cpu.tensors.functions import FUNCTIONS
from lowbit.spec.functions import BUDGETS, POWER, Budget

Floats = npt.NDArray[np.float32]

SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 2**-126, -(2**-126), 3.4028235e38,
     -3.4028235e38, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 1 - 2**-24, 1 + 2**-23, 88.7, 88.8, -87.5, -103,
     -104, 127, 128, -126, -149, 2**23, 2**24 + 2, 2**31, -(2**31)],
    np.float32,
)  # fmt: skip


def _drawn(seed: int, count: int = 2000) -> Floats:
    """Bits at random, numbers of usual sizes, multiples of π/2, and special ones."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, count, np.uint32).view(np.float32)
    usual = random.normal(size=count) * np.exp2(random.integers(-12, 13, count))
    quarters = random.integers(-(2**20), 2**20, count) * (math.pi / 2)
    return np.concatenate([bits, usual.astype(np.float32), quarters.astype(np.float32), SPECIAL])


def _computed(name: str, *inputs: Floats, numbers: tuple[float, ...] = ()) -> Floats:
    steps = (*range(len(inputs)), *("number" for _ in numbers), name)
    out = np.empty_like(inputs[0])
    strides = [(1,)] * (1 + len(inputs))
    plan = plan_elementwise(["f32"] * len(inputs), "f32", steps, out.shape, strides)
    arguments: dict[str, Any] = dict.fromkeys("abc") | dict(zip("abc", inputs, strict=False))
    program = elementwise.program(isa.active(), form=plan.form)
    program.bind(1, (), out=out, **arguments, parameters=parameters_array([], numbers),
                 geometry=plan.geometry, items=plan.items)()  # fmt: skip
    return out


def _check(got: Floats, exact: npt.NDArray[np.float64], allowed: Any, *inputs: Floats) -> None:
    """Within what is allowed; NaN and infinities are where they belong."""
    with np.errstate(all="ignore"):
        expected = exact.astype(np.float32)
        near = np.abs(got.astype(np.float64) - exact) <= allowed
        beyond = np.isinf(got) & (np.abs(exact) * (1 + 1e-6) >= np.finfo(np.float32).max)
    same = (got == expected) | (np.isnan(got) & np.isnan(exact)) | (beyond & (got * exact > 0))
    wrong = np.flatnonzero(~(near | same))
    shown = [(*(one[i] for one in inputs), got[i], exact[i]) for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)}, of them (inputs, result, exact): {shown}"


def _allowed(budget: Budget, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    finite = np.where(np.isfinite(exact), exact, 0)
    return budget.relative * np.abs(finite) + budget.absolute


def _exact(name: str) -> Callable[..., npt.NDArray[np.float64]]:
    meaning = getattr(expression, name).meaning
    return lambda *inputs: np.asarray(meaning(*(one.astype(np.float64) for one in inputs)))


ONE = sorted(name for name, (count, _) in FUNCTIONS.items() if count == 1)


def test_every_function_has_a_budget() -> None:
    assert BUDGETS.keys() | {"power"} == FUNCTIONS.keys()


@pytest.mark.parametrize("name", [*ONE, "elu"])
def test_functions_of_one_number(name: str) -> None:
    x = _drawn(1)
    x = x[x > -np.inf] if name == "mish" else x  # where the formula has no limit
    alpha = (1.0,) if name == "elu" else ()
    with np.errstate(all="ignore"):
        exact = _exact(name)(x, *(np.float32(one) for one in alpha))
    got = _computed(name, x, numbers=alpha)
    _check(got, exact, _allowed(BUDGETS[name], exact), x)
    if name in ("floor", "ceil", "nearest", "trunc", "atan", "asinh", "erf"):
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(exact[numbers]))


def _pairs(seed: int) -> tuple[Floats, Floats]:
    """Two numbers: any, special ones with each other, and those whose quotients are near integers,
    small and beyond 2^24."""
    random = np.random.default_rng(seed)
    x, y = _drawn(seed), random.permutation(_drawn(seed + 1))
    special = [one.ravel() for one in np.meshgrid(SPECIAL, SPECIAL)]
    divisor = random.normal(size=600).astype(np.float32)
    whole = np.exp2(random.integers(0, 40, 600)) * random.integers(1, 99, 600)
    near = (divisor * whole * random.choice([1, 1 - 2**-24, 1 + 2**-23], 600)).astype(np.float32)
    first, second = zip((x, y), special, (near, divisor), strict=True)
    return np.concatenate(first), np.concatenate(second)


@pytest.mark.parametrize("name", ["fmod", "remainder", "hypot", "atan2"])
def test_functions_of_two_numbers(name: str) -> None:
    x, y = _pairs(2)
    with np.errstate(all="ignore"):
        exact = _exact(name)(x, y)
    _check(_computed(name, x, y), exact, _allowed(BUDGETS[name], exact), x, y)


def test_what_is_left_of_large_quotients() -> None:
    """In exact fractions: of quotients up to 2^277."""
    x, y = np.abs(_pairs(3))
    some = np.isfinite(x) & np.isfinite(y) & (y > 0)
    x, y = x[some], y[some]
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    exact = [float(Fraction(a) % Fraction(b)) for a, b in pairs]
    np.testing.assert_array_equal(_computed("fmod", x, y), np.array(exact, np.float32))


def test_floors_of_quotients() -> None:
    """As PyTorch defines them: by what is left."""
    x, y = _pairs(4)
    with np.errstate(all="ignore"):
        exact = np.floor_divide(x.astype(np.float64), y.astype(np.float64))
    _check(_computed("floor_quotient", x, y), exact, 2e-7 * np.abs(exact), x, y)


def test_powers() -> None:
    x, y = _pairs(5)
    x[::3] = np.abs(x[::3])
    y[::4] = np.rint(np.clip(np.nan_to_num(y[::4]), -9, 9))
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
        size = np.abs(y * np.log(np.abs(x.astype(np.float64))))
        allowed = POWER * (1 + np.nan_to_num(size)) * np.abs(exact) + 2.0**-126
    _check(_computed("power", x, y), exact, allowed, x, y)


def test_angles_that_are_nearly_quarters_of_a_turn() -> None:
    """The float32 nearest to a multiple of π/2 of all below 2^128, and some others."""
    x = np.array([16367173 * 2.0**72, 11.0, 22.0, 355.0, 710.0, 5.39e5, 2.5e7, 1e22, 3e38], "f4")
    wide = x.astype(np.float64)
    for name, exact in (("sin", np.sin(wide)), ("cos", np.cos(wide)), ("tan", np.tan(wide))):
        np.testing.assert_allclose(_computed(name, x), exact, rtol=BUDGETS[name].relative)
