"""What a caller wants done with a product before it is stored, checked and brought into form."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arguments import float_matrix, per_column
from lowbit.kernels.cpu.epilogue import STEPS, Clamp, Step

# Names for users, the epilogue's outputs, and how NumPy holds them.
_OUT_DTYPES = {
    "float32": ("f32", np.dtype(np.float32)),
    "bfloat16": ("bf16", np.dtype(np.uint16)),
    "uint8": ("u8", np.dtype(np.uint8)),
    "int8": ("s8", np.dtype(np.int8)),
}


@dataclass(frozen=True, eq=False)
class Finish:
    """The steps and the output of an epilogue, with their operands: padded, contiguous, float32."""

    out: str
    storage: np.dtype[Any]
    steps: tuple[Step, ...] = ()
    bias: npt.NDArray[np.float32] | None = None
    residual: npt.NDArray[np.float32] | None = None
    requantize: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(
        cls,
        columns: int,
        rows: int,
        bias: Any,
        residual: Any,
        steps: Sequence[Step] | None,
        out_dtype: str = "float32",
        out_scale: float | None = None,
        out_zero_point: int = 0,
    ) -> Finish:
        """From the arguments of the public functions; raises what they document."""
        if isinstance(steps, str):
            raise TypeError(f"steps must be a sequence of steps: ({steps!r},)")
        given = {"bias": bias, "residual": residual}
        order = tuple(n for n in given if given[n] is not None) if steps is None else tuple(steps)
        _check_steps(order, given)
        if out_dtype not in _OUT_DTYPES:
            raise ValueError(f"out_dtype {out_dtype!r} is not one of {', '.join(_OUT_DTYPES)}")
        out, storage = _OUT_DTYPES[out_dtype]
        if residual is not None:
            residual = np.ascontiguousarray(float_matrix(residual, "residual"))
            if residual.shape != (rows, columns):
                raise ValueError(
                    f"residual must have shape ({rows}, {columns}), got {residual.shape}"
                )
        return cls(
            out=out,
            storage=storage,
            steps=order,
            bias=per_column(bias, columns, "bias"),
            residual=residual,
            requantize=_requantize(out, storage, out_scale, out_zero_point),
        )

    def reinterpreted(self, result: Any) -> Any:
        """A PyTorch result of bfloat16 as such; NumPy has only its bits."""
        torch = sys.modules.get("torch")
        if self.out == "bf16" and torch is not None and isinstance(result, torch.Tensor):
            return result.view(torch.bfloat16)
        return result


def _check_steps(steps: tuple[Step, ...], given: dict[str, Any]) -> None:
    for step in steps:
        if isinstance(step, Clamp):
            if not step.low <= step.high:
                raise ValueError(f"{step} has its bounds in the wrong order")
        elif step not in STEPS:
            raise ValueError(f"no step is called {step!r}; known: {', '.join(STEPS)}, Clamp")
        elif step in given and given[step] is None:
            raise ValueError(f"the step {step!r} needs the argument {step}")
    unused = [name for name, value in given.items() if value is not None and name not in steps]
    if unused:
        raise ValueError(f"{unused[0]} is given, but {unused[0]!r} is not among the steps {steps}")


def _requantize(
    out: str, storage: np.dtype[Any], scale: float | None, zero_point: int
) -> npt.NDArray[np.float32] | None:
    """(1 / scale, zero point) for a quantized output."""
    if out not in ("u8", "s8"):
        if scale is not None or zero_point:
            raise ValueError("out_scale and out_zero_point belong to a quantized out_dtype")
        return None
    if scale is None or not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a quantized output needs a positive, finite out_scale, got {scale}")
    limits = np.iinfo(storage)
    if not isinstance(zero_point, int | np.integer):
        raise TypeError(f"out_zero_point must be an integer, got {zero_point!r}")
    if not limits.min <= zero_point <= limits.max:
        raise ValueError(f"out_zero_point {zero_point} is outside of {storage}")
    inverse = np.float32(1) / np.float32(scale)
    if not (np.isfinite(inverse) and inverse > 0):
        raise ValueError(f"out_scale {scale} has no inverse in float32")
    return np.array([inverse, zero_point], np.float32)


INTEGERS = Finish("s32", np.dtype(np.int32))
