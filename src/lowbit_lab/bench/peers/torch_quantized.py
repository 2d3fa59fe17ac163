"""PyTorch's quantized linear layers: on oneDNN and on FBGEMM, static and dynamic."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.bench.core.case import Ready, implementation
from lowbit_lab.bench.peers.torch_products import BYTES, FBGEMM, ONEDNN, Torch
from lowbit_lab.bench.suites.matmul.problem import Array, MatmulCase, MatmulProblem

if TYPE_CHECKING:
    import torch


@implementation("matmul")
class OnednnLinear(Torch):
    """oneDNN through torch's qlinear: 8-bit integers to float32 or to 8 bits, weights packed."""

    name = "oneDNN qlinear"
    component = ONEDNN
    engine = "onednn"
    takes = BYTES

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import torch

        m, n, k = (problem.case.sizes[dim] for dim in "MNK")
        weight = torch.from_numpy(np.ascontiguousarray(problem.b.T))
        scale, zero_point = problem.out_quantization if problem.quantizes else (1.0, 0)
        call = partial(
            torch.ops.onednn.qlinear_pointwise.default,
            torch.from_numpy(problem.a),
            problem.a_scale or 1.0,
            problem.a_zero_point or 0,
            torch.ops.onednn.qlinear_prepack(weight, [m, k]),
            torch.from_numpy(_scales(problem)),
            torch.zeros(n, dtype=torch.int32),
            None,
            scale,
            zero_point,
            torch.uint8 if problem.quantizes else torch.float32,
            "none",
            [],
            "",
        )
        return Ready(call)


@implementation("matmul")
class FbgemmLinear(Torch):
    """FBGEMM through torch's quantized linear, which makes 8 bits of the result again.

    torch has no FBGEMM layer from 8 bits to float32. Where that is asked for, this does the same
    work but for the last store, of a quarter of the bytes, which is in its favour.
    """

    name = "FBGEMM qlinear"
    component = FBGEMM
    engine = "fbgemm"
    takes = ("u8:s8",)

    def note(self, case: MatmulCase) -> str:
        return "" if case.dtypes.endswith(":u8") else "u8 result"

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import torch

        scale, zero_point = problem.out_quantization
        with _quantized_tensors("fbgemm"):
            x = torch.quantize_per_tensor(
                torch.from_numpy(problem.a_float),
                problem.a_scale or 1.0,
                problem.a_zero_point or 0,
                torch.quint8,
            )
        linear = torch.ops.quantized.linear.default
        call = partial(linear, x, _packed_linear(problem, "fbgemm"), scale, zero_point)

        def read(result: torch.Tensor) -> Array:
            return (result.int_repr() if problem.quantizes else result.dequantize()).numpy()

        return Ready(call, read)


@implementation("matmul", ONEDNN, FBGEMM)
class TorchDynamic(Torch):
    """torch's dynamic linear: one scale for the whole activation, found in each call."""

    takes = ("f32:s8",)
    remark = "one scale for all rows"

    def __init__(self, component: tuple[str, str]) -> None:
        self.component = component
        self.name = f"{component[0]} dynamic"
        self.engine = component[0].lower()

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import torch

        weight = _packed_linear(problem, self.engine)
        x = torch.from_numpy(problem.a)
        return Ready(partial(torch.ops.quantized.linear_dynamic.default, x, weight, False))


def _scales(problem: MatmulProblem) -> NDArray[np.float32]:
    """The weight's scale per output channel: 1 where the operation has none."""
    if problem.b_scale is None:
        return np.ones(problem.b.shape[1], np.float32)
    return problem.b_scale


@contextmanager
def _quantized_tensors(engine: str) -> Iterator[None]:
    """torch's quantized operators on `engine`, without the notice that their tensors will go."""
    import torch

    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            yield
    finally:
        torch.backends.quantized.engine = before


def _packed_linear(problem: MatmulProblem, engine: str) -> torch.ScriptObject:
    """The weight as torch's quantized operators take it, packed for `engine`.

    Rounding b_float / scale gives b again, exactly: float32 keeps far more than its 8 bits.
    """
    import torch

    with _quantized_tensors(engine):
        weight = torch.quantize_per_channel(
            torch.from_numpy(np.ascontiguousarray(problem.b_float.T)),
            torch.from_numpy(_scales(problem)),
            torch.zeros(problem.b.shape[1], dtype=torch.int64),
            0,
            torch.qint8,
        )
        return torch.ops.quantized.linear_prepack(weight, None)
