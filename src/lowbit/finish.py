"""What a caller wants done with a product before it is stored, checked and brought into form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.kernels.cpu.shared.epilogue import STEPS, Clamp, Step, structure_of
from lowbit.numerics.float32 import float32_number

# Names for users, the epilogue's outputs, and how NumPy holds them.
_STEP_TYPES = {str, Clamp}
_OUT_DTYPES = {
    "float32": ("f32", np.dtype(np.float32)),
    "bfloat16": ("bf16", np.dtype(bfloat16)),
    "uint8": ("u8", np.dtype(np.uint8)),
    "int8": ("s8", np.dtype(np.int8)),
}


@dataclass(frozen=True, eq=False)
class Finish:
    """The steps and the output of an epilogue.

    `storage`: how NumPy holds the output. `parameters`: the numbers that steps and output are
    given, float32, as kernels/cpu/shared/epilogue.py orders them.
    """

    out: str
    storage: np.dtype[Any]
    steps: tuple[str, ...] = ()
    parameters: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(
        cls,
        given: tuple[str, ...],
        steps: tuple[Step, ...] | None,
        out_dtype: str = "float32",
        out_scale: float | None = None,
        out_zero_point: int = 0,
    ) -> Finish:
        """From the arguments of the public functions; raises what they document.

        `given`: which of "bias" and "residual" there are.
        """
        order = given if steps is None else steps
        _check_steps(order, given)
        if out_dtype not in _OUT_DTYPES:
            raise ValueError(f"out_dtype {out_dtype!r} is not one of {', '.join(_OUT_DTYPES)}")
        out, storage = _OUT_DTYPES[out_dtype]
        names, numbers = structure_of(order)
        numbers += _requantize(out, storage, out_scale, out_zero_point)
        return cls(out, storage, names, np.array(numbers, np.float32) if numbers else None)


def steps_tuple(steps: Sequence[Step] | None) -> tuple[Step, ...] | None:
    """The steps as what can be a key. TypeError: a single name."""
    if steps is None or (type(steps) is tuple and _STEP_TYPES.issuperset(map(type, steps))):
        return steps
    if isinstance(steps, str | Clamp) or not isinstance(steps, Iterable):
        raise TypeError(f"steps must be a sequence of steps, ({steps!r},), got {steps!r}")
    for step in steps:
        if not isinstance(step, str | Clamp):
            raise TypeError(f"a step is a name or a Clamp, got {step!r}")
    return tuple(steps)


def _check_steps(steps: tuple[Step, ...], given: tuple[str, ...]) -> None:
    for step in steps:
        if isinstance(step, Clamp):
            continue
        if step not in STEPS:
            raise ValueError(f"no step is called {step!r}; known: {', '.join(STEPS)}, Clamp")
        if step in ("bias", "residual") and step not in given:
            raise ValueError(f"the step {step!r} needs the argument {step}")
    unused = [name for name in given if name not in steps]
    if unused:
        raise ValueError(f"{unused[0]} is given, but {unused[0]!r} is not among the steps {steps}")


def _requantize(
    out: str, storage: np.dtype[Any], scale: float | None, zero_point: int
) -> tuple[float, ...]:
    """(1 / scale, zero point) for a quantized output."""
    if out not in ("u8", "s8"):
        if scale is not None or zero_point:
            raise ValueError("out_scale and out_zero_point belong to a quantized out_dtype")
        return ()
    if scale is None or not 0 < (scale := float32_number(scale, "out_scale")) < math.inf:
        raise ValueError(f"a quantized output needs a positive, finite out_scale, got {scale}")
    limits = np.iinfo(storage)
    if not isinstance(zero_point, int | np.integer):
        raise TypeError(f"out_zero_point must be an integer, got {zero_point!r}")
    if not limits.min <= zero_point <= limits.max:
        raise ValueError(f"out_zero_point {zero_point} is outside of {storage}")
    inverse = np.float32(1) / np.float32(scale)
    if not (np.isfinite(inverse) and inverse > 0):
        raise ValueError(f"out_scale {scale} has no inverse in float32")
    return float(inverse), zero_point


INTEGERS = Finish("s32", np.dtype(np.int32))
