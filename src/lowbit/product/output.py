"""What a caller wants done with a product before it is stored, checked and brought into form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.kernels.cpu.shared.formats import LIMITS
from lowbit.kernels.cpu.shared.post_op import PostOp, WithNumbers, post_ops
from lowbit.kernels.cpu.shared.post_ops import CoarseGelu, CoarseGeluTanh
from lowbit.numerics.float32 import float32_number, moderate
from lowbit.registry.locks import cached_property

# A post-operation as users write it: a name, or one with numbers.
AnyPostOp = str | WithNumbers

# Names for users, the epilogue's outputs, and how NumPy holds them.
_OUT_DTYPES = {
    "float32": ("f32", np.dtype(np.float32)),
    "bfloat16": ("bf16", np.dtype(bfloat16)),
    "uint8": ("u8", np.dtype(np.uint8)),
    "int8": ("s8", np.dtype(np.int8)),
}

# The shorter functions before 8 bits, and for which inverse of their scale they serve.
_COARSE = {"gelu": CoarseGelu, "gelu_tanh": CoarseGeluTanh}
_FINEST, _COARSEST = 2.0**8, 2.0**-8


@dataclass(frozen=True, eq=False)
class OutputSpec:
    """Post-operations by name, and the output.

    `storage`: how NumPy holds the output. `parameters`: the numbers that post-operations and output
    are given, float32, in order.
    """

    out: str
    storage: np.dtype[Any]
    post_ops: tuple[str, ...] = ()
    parameters: npt.NDArray[np.float32] | None = None

    @property
    def moderate(self) -> bool:
        """Whether the scales of a quantized output and of residuals are; see numerics.float32."""
        given = [] if self.parameters is None else self.parameters.tolist()
        scales = [1 / given[-2]] if self.out in LIMITS else []
        for one in map(post_ops.get, self.post_ops):
            scales += given[:1] if one.parameters and one.operand else []
            given = given[one.parameters :]
        return all(map(moderate, scales))

    @cached_property
    def residual(self) -> np.dtype[Any]:
        """What a residual is of."""
        short = {"residual_u8": np.uint8, "residual_s8": np.int8}
        return np.dtype(next((short[one] for one in self.post_ops if one in short), np.float32))

    @classmethod
    def of(
        cls, biased: bool, residual: bool, steps: tuple[AnyPostOp, ...] | None,
        out_dtype: str = "float32", out_scale: float | None = None, out_zero_point: int = 0,
    ) -> OutputSpec:  # fmt: skip
        """From the arguments of the public functions; raises what they document."""
        given = ("bias",) * biased + ("residual",) * residual
        order = given if steps is None else steps
        _check(order, given)
        if out_dtype not in _OUT_DTYPES:
            raise ValueError(f"out_dtype {out_dtype!r} is not one of {', '.join(_OUT_DTYPES)}")
        out, storage = _OUT_DTYPES[out_dtype]
        format_numbers = _requantize(out, storage, out_scale, out_zero_point)
        if format_numbers:
            order = _unbounded(order, out, *format_numbers)
            order = _coarse(order, format_numbers[0])
        numbers = [number for step in order for number in _numbers(step)]
        numbers += format_numbers
        parameters = np.array(numbers, np.float32) if numbers else None
        return cls(out, storage, tuple(map(_name, order)), parameters)


def post_ops_tuple(given: Sequence[AnyPostOp] | None) -> tuple[AnyPostOp, ...] | None:
    """Post-operations as what can be a key. TypeError: a single one, or something else."""
    if given is None:
        return None
    plain = type(given) in _SEQUENCES  # which takes less time to ask for than what follows
    if not plain and (isinstance(given, _KINDS) or not isinstance(given, Iterable)):
        raise TypeError(f"post_ops must be a sequence, ({given!r},), got {given!r}")
    steps = tuple(given)
    for one in steps:
        if type(one) is not str and not isinstance(one, _KINDS):
            raise TypeError(f"a post-operation is a name or a Clamp, got {one!r}")
    return steps


_SEQUENCES = {tuple, list}
_KINDS = (str, WithNumbers)


def _name(step: AnyPostOp) -> str:
    return step if isinstance(step, str) else step.name


def _numbers(step: AnyPostOp) -> tuple[float, ...]:
    return () if isinstance(step, str) else step.numbers


def _unbounded(
    steps: tuple[AnyPostOp, ...], out: str, inverse: float, zero_point: float
) -> tuple[AnyPostOp, ...]:
    """Without the last steps that only bound, by no less than what `out` can hold: an activation
    that the range of a quantized output is the range of costs nothing."""
    least, greatest = (limit - zero_point for limit in LIMITS[out])
    while steps:
        bounds = post_ops.get(_name(steps[-1])).bounds(_numbers(steps[-1]))
        if bounds is None:
            break
        with np.errstate(over="ignore"):
            low, high = np.rint(np.array(bounds, np.float32) * np.float32(inverse))
        if low > least or high < greatest:
            break
        steps = steps[:-1]
    return steps


def _coarse(steps: tuple[AnyPostOp, ...], inverse: float) -> tuple[AnyPostOp, ...]:
    """With a shorter function as the last step, where it is off by 1/28 of a quantum at most, since
    quanta are no finer than 2^-8, and float32 holds its coefficients in quanta."""
    if not steps or not _COARSEST <= inverse <= _FINEST:
        return steps
    shorter = _COARSE.get(_name(steps[-1]))
    return (*steps[:-1], shorter(inverse)) if shorter else steps


def _check(steps: tuple[AnyPostOp, ...], given: tuple[str, ...]) -> None:
    needed = set()
    for step in steps:
        one: PostOp = post_ops.get(_name(step))
        if isinstance(step, str) and one.parameters:
            raise ValueError(
                f"the post-operation {step!r} needs numbers: give its class, Clamp(low, high)"
            )
        if one.operand and one.operand not in given:
            raise ValueError(f"the post-operation {step!r} needs the argument {one.operand}")
        needed.add(one.operand)
    for name in given:
        if name not in needed:
            raise ValueError(f"{name} is given, but {name!r} is not among the post_ops {steps}")


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
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.float32(1) / np.float32(scale)
    if not (np.isfinite(inverse) and inverse > 0):
        raise ValueError(f"out_scale {scale} has no inverse in float32")
    return float(inverse), zero_point
