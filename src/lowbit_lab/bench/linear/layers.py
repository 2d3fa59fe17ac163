"""Quantized linear layers on a GPU: data of each format, the right answers, lowbit's products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels.triton.fast.eight_by_four import eight_by_four_choice
from lowbit.kernels.triton.fast.launch import Choice, Gpu, gpu_of
from lowbit.kernels.triton.fast.scaled import scaled_choice
from lowbit.kernels.triton.fast.tiles import TiledWeight
from lowbit.kernels.triton.fast.weight_only import weight_only_choice
from lowbit.registry.locks import cached_property
from lowbit.torch.functional import (
    int4_dynamic_matmul,
    pack_int4,
    pack_int8,
    quantize_rows,
    scaled_matmul,
    weight_only_matmul,
)
from lowbit_lab.bench.core.case import OURS, Case, Implementation, Problem
from lowbit_lab.bench.suites.matmul.problem import parse_shape

GROUP = 128
_ROUNDED = 2.0**-8
"""bfloat16's distance of 1 from the next number: twice the error of a rounding."""
_FOUR_BITS = {"w4a16": None, "w4a8": torch.int8, "w4a8 fp8": torch.float8_e4m3fn}
"""What activations become that are multiplied by 4 bits."""
_SUMMED = {"fp8": 2.0**-13}
"""Of each addition, by the start of a format: tensor cores keep 14 bits of sums of float8."""


def _rows(values: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    q, scale, _ = quantize_rows(values, kind)
    return q, scale


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """float8 with a scale for each 128 x 128."""
    N, K = values.shape
    parts = values.view(N // GROUP, GROUP, K // GROUP, GROUP)
    scale = parts.abs().amax((1, 3)) / 448
    return (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(N, K), scale


@dataclass(frozen=True, eq=False)
class GpuLinearProblem(Problem):
    """A layer with its data: x bfloat16 [M, K]; the weight [N, K] as `values` (uint8 from 0 to 15,
    int8 or float8) and `scale`, [N, groups] or [N], or of blocks; of 8-bit activations, `q` and
    `q_scale`, the rows of x. Format: the case's dtypes."""

    case: Case
    x: Tensor
    values: Tensor
    scale: Tensor
    q: Tensor | None = None
    q_scale: Tensor | None = None

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device) -> GpuLinearProblem:
        """Draw x from N(0, 1), and a weight from N(0, 1 / K), which is then quantized."""
        made = torch.Generator(device).manual_seed(seed)
        M, N, K = (case.sizes[name] for name in "MNK")
        x = torch.randn(M, K, device=device, generator=made).bfloat16()
        w = torch.randn(N, K, device=device, generator=made) / K**0.5
        if case.dtypes in _FOUR_BITS:
            groups = w.view(N, K // GROUP, GROUP)
            scale = (groups.abs().amax(2) / 7.5).bfloat16()
            values = (groups / scale.float()[:, :, None]).round().clamp(-8, 7) + 8
            weight = values.to(torch.uint8).view(N, K), scale
            kind = _FOUR_BITS[case.dtypes]
            choice = FORMATS[case.dtypes].choice(gpu_of(device), M, N, K)
            if device.type == "cuda" and choice.kernel == "few_rows_kernel":
                kind = None  # few rows stay floats there
            return cls(case, x, *weight, *(_rows(x, kind) if kind else ()))
        if case.dtypes == "w8a16":
            return cls(case, x, *_rows(w, torch.int8))
        kind = torch.int8 if case.dtypes == "int8" else torch.float8_e4m3fn
        blocks = case.dtypes == "fp8 blocks"
        weight = _blocks(w) if blocks else _rows(w, kind)
        q, q_scale, _ = quantize_rows(x, kind, blocks=blocks)
        return cls(case, x, *weight, q, q_scale)

    @cached_property
    def weight(self) -> Tensor:
        """What the weight stands for, float64 [N, K]."""
        values = self.values.double() - 8 * (self.values.dtype is torch.uint8)
        return values * _spread(self.scale, values, rows=len(self.scale) < len(values))

    @cached_property
    def activations(self) -> Tensor:
        """What is multiplied with it, float64 [M, K]."""
        if self.q is None or self.q_scale is None:
            return self.x.double()
        values = self.q.double()
        return values * _spread(self.q_scale, values)

    @cached_property
    def x16(self) -> Tensor:
        """The same in bfloat16."""
        return self.x if self.q is None else self.activations.bfloat16()

    @cached_property
    def columns_of_scales(self) -> Tensor | None:
        """The scales of the rows of x as other libraries take them: [M, 1], or [M, ceil(K / 128)]
        of which a column is contiguous."""
        if self.q_scale is None:
            return None
        return self.q_scale[:, None] if self.q_scale.dim() == 1 else self.q_scale.T.contiguous().T

    @cached_property
    def ideal(self) -> Tensor:
        """The product in float64, [M, N]."""
        return self.activations @ self.weight.T

    @property
    def size(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.case.sizes["M"], self.case.sizes["N"], self.case.sizes["K"]

    @property
    def group_size(self) -> int:
        return GROUP

    @property
    def way(self) -> str:
        """The dtype of which the peak is a limit."""
        return FORMATS[self.case.dtypes].way

    @cached_property
    def operations(self) -> int:
        return operations(self.case)

    @cached_property
    def weight_bytes(self) -> int:
        """Of lowbit's packed weight."""
        return weight_bytes(self.case)

    @cached_property
    def bytes(self) -> int:
        return least_bytes(self.case)

    @cached_property
    def _budget(self) -> Tensor:
        """What a result may be off: sums in float32 (or what tensor cores keep of float8), the
        weight and the result rounded to bfloat16."""
        mass = self.activations.abs() @ self.weight.abs().T
        steps, unit = self.size[2] // 32, _SUMMED.get(self.case.dtypes[:3], 2.0**-23)
        floats = self.q is None or self.case.dtypes in _FOUR_BITS
        rounded = _ROUNDED * floats + unit * 32
        return (_ROUNDED + steps * unit) * self.ideal.abs() + rounded * mass

    def error(self, result: Tensor) -> float:
        off = (result.double() - self.ideal).abs().max()
        return float(off / self.ideal.abs().max().clamp_min(1e-30))

    def wrong(self, implementation: Implementation | None, result: Tensor) -> str | None:
        if result.shape != self.ideal.shape:
            return f"the result has the shape {list(result.shape)}"
        if implementation is not None and implementation.kind != OURS:
            return None if bool(result.isfinite().all()) else "the result is not finite"
        off = (result.double() - self.ideal).abs()
        bad = int((~(off <= self._budget)).sum())
        return (
            f"{bad} elements are beyond the budget, by up to {float(off.max()):.2g}"
            if bad
            else None
        )


def _spread(scale: Tensor, values: Tensor, rows: bool = False) -> Tensor:
    """Scales of rows, of groups of 128 or of blocks, for each of the values."""
    wide = scale.double()
    if scale.dim() == 1:
        return wide[:, None]
    wide = wide.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return wide.repeat_interleave(GROUP, 0)[: len(values)] if rows else wide


# What lowbit does: the operands of a weight once, and a product with them.


def packed(task: GpuLinearProblem) -> tuple[Any, ...]:
    """The weight as lowbit takes it."""
    if task.case.dtypes in _FOUR_BITS:
        return (pack_int4(task.values, task.scale, group_size=GROUP),)
    if task.case.dtypes == "w8a16":
        return (pack_int8(task.values, task.scale),)
    return task.values, task.scale


def multiplied(task: GpuLinearProblem, *weight: Any) -> Tensor:
    """lowbit's product."""
    if kind := _FOUR_BITS.get(task.case.dtypes):
        return int4_dynamic_matmul(task.x, weight[0], dtype=kind)
    if task.q is None or task.q_scale is None:
        return weight_only_matmul(task.x, weight[0])
    return scaled_matmul(task.q, weight[0], task.q_scale, weight[1])


def copied(weight: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same at another place in memory."""

    def copy(one: Any) -> Any:
        if not isinstance(one, TiledWeight):
            return one.clone() if isinstance(one, Tensor) else one
        return TiledWeight(one.tiles.clone(), one.words.clone(), *list(vars(one).values())[2:])

    return tuple(map(copy, weight))


class Format(NamedTuple):
    """A kind of layer: what it is, the bits of its weight, what serves sizes (gpu, M, N, K), and
    the dtype that is multiplied."""

    text: str
    bits: int
    choice: Callable[[Gpu, int, int, int], Choice[Any]]
    way: str = "bfloat16"


def _float8(blocks: bool) -> Callable[[Gpu, int, int, int], Choice[Any]]:
    return lambda gpu, M, N, K: scaled_choice(gpu, M, N, K, "float8_e4m3fn", blocks)


FORMATS = {
    "w4a16": Format(
        f"weights of 4 bits in groups of {GROUP}, activations bfloat16", 4,
        lambda gpu, M, N, K: weight_only_choice(gpu, M, N, K, 4, 2, GROUP),
    ),
    **{name: Format(
        f"weights of 4 bits in groups of {GROUP}, activations quantized to {way} on the way", 4,
        lambda gpu, M, N, K: eight_by_four_choice(gpu, M, N, K, 2, GROUP), way,
    ) for name, way in (("w4a8", "int8"), ("w4a8 fp8", "float8"))},
    "w8a16": Format(
        "weights of 8 bits, a scale a row, activations bfloat16", 8,
        lambda gpu, M, N, K: weight_only_choice(gpu, M, N, K, 8, 2, K + -K % GROUP),
    ),
    "int8": Format("weights and activations int8, scales of rows", 8, scaled_choice, "int8"),
    "fp8": Format(
        "weights and activations float8 (e4m3), scales of rows", 8, _float8(False), "float8"
    ),
    "fp8 blocks": Format(
        f"float8, scales of {GROUP} x {GROUP} of the weight and of {GROUP} k of activations", 8,
        _float8(True), "float8",
    ),
}  # fmt: skip


def operations(case: Case) -> int:
    """Additions and multiplications."""
    return 2 * math.prod(case.sizes[name] for name in "MNK")


def weight_bytes(case: Case) -> int:
    """Of lowbit's packed weight: its values, and four bytes for each scale."""
    N, K, bits = case.sizes["N"], case.sizes["K"], FORMATS[case.dtypes].bits
    scales = N * K // GROUP if bits == 4 else N * K // GROUP**2 if "blocks" in case.dtypes else N
    return bits * N * K // 8 + 4 * scales


def least_bytes(case: Case) -> int:
    """That must be moved: the weight, the activations, the result in 16 bits."""
    M, N, K = (case.sizes[name] for name in "MNK")
    each = 2 if FORMATS[case.dtypes].way == "bfloat16" or case.dtypes in _FOUR_BITS else 1
    return weight_bytes(case) + each * M * K + 2 * M * N


TUNED = ("w4a16", "w8a16", "int8", "fp8")
"""Formats whose kernels have configurations to choose from."""
WEIGHTS = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672))
"""N and K of layers of language models of 8 and 70 billion weights."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
SHAPES = tuple(f"{M}x{K}:{K}x{N}" for N, K in WEIGHTS for M in ROWS)


def parse(formats: Iterable[str], shapes: Iterable[str]) -> list[Case]:
    """Every shape `MxK:KxN` in every format. ValueError for what is not understood or served."""
    found = list[Case]()
    for format in formats:
        if format not in FORMATS:
            raise ValueError(f"no format is called {format!r}; known are {', '.join(FORMATS)}")
        for text in dict.fromkeys(shapes):
            sizes = parse_shape(text)
            if sizes["N"] % GROUP or sizes["K"] % GROUP:
                raise ValueError(f"shape {text!r}: N and K must be multiples of {GROUP} on a GPU")
            found.append(Case("linear", text, format, sizes=sizes))
    return found
