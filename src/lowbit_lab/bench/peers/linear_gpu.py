"""Who multiplies quantized linear layers on a GPU."""

from __future__ import annotations

import ctypes
import os
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lowbit_lab.bench.core.case import OTHER, OURS, Implementation, Ready, implementation

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit_lab.bench.linear.layers import GpuLinearProblem

SUITE = "linear on a GPU"
_U4B8 = 1125899907892224
"""What the library of `FromFile` calls 4 bits less 8."""
_MOST_ROWS = 256


class OnGpu(Implementation):
    """A class below it says what it makes of a weight, and how that is multiplied. formats: how
    those begin that it takes, if not all."""

    formats: tuple[str, ...] = ("",)
    needs = ("torch",)
    package = ("torch", "torch")

    def available(self, case: Any) -> str | None:
        return super().available(case) if case.dtypes.startswith(self.formats) else None

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        """Tensors, which are copied for cold weights, and whatever goes with them."""
        raise NotImplementedError

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        raise NotImplementedError

    def read(self, task: GpuLinearProblem, result: Tensor) -> Tensor:
        """The product, of what it stopped at."""
        return result

    def nbytes(self, task: GpuLinearProblem, weights: tuple[Any, ...]) -> int:
        return sum(getattr(one, "nbytes", 0) for one in weights)

    def prepare(self, problem: GpuLinearProblem, threads: int) -> Ready:
        from lowbit_lab.bench.linear.layers import copied

        first = self.weights(problem)
        return Ready(
            partial(self.multiply, problem, *first),
            partial(self.read, problem),
            self.nbytes(problem, first),
            lambda: partial(self.multiply, problem, *copied(first)),
        )


@implementation(SUITE)
class LowbitGpuLinear(OnGpu):
    """The product; of 8-bit activations that are quantized already."""

    name = "lowbit"
    kind = OURS
    package = None

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        from lowbit_lab.bench.linear.layers import packed

        return packed(task)

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        from lowbit_lab.bench.linear.layers import multiplied

        return multiplied(task, *weights)

    def nbytes(self, task: GpuLinearProblem, weights: tuple[Any, ...]) -> int:
        return task.weight_bytes

    def runs_on(self, case: Any) -> str | None:
        import torch

        from lowbit.kernels.triton.fast.launch import gpu_of
        from lowbit_lab.bench.linear.layers import FORMATS

        gpu = gpu_of(torch.device("cuda"))
        choice = FORMATS[case.dtypes].choice(gpu, *(case.sizes[name] for name in "MNK"))
        return choice.kernel if choice.config is None else f"{choice.kernel}, {choice.config}"


@implementation(SUITE)
class LowbitFromFloats(LowbitGpuLinear):
    """The rows of x are quantized in each call."""

    name = "lowbit, x quantized in each call"
    kind = OTHER
    formats = ("int8", "fp8")

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        from lowbit.torch.functional import quantize_rows, scaled_matmul

        assert task.q is not None
        assert task.q_scale is not None
        q, scale, _ = quantize_rows(task.x, task.q.dtype, blocks=task.q_scale.dim() == 2)
        return scaled_matmul(q, weights[0], scale, weights[1])


@implementation(SUITE)
class CuBlas(OnGpu):
    """The product of what activations and weight stand for in bfloat16."""

    name = "cuBLAS bf16"

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        return (task.weight.bfloat16(),)

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        return task.x16 @ weights[0].T


@implementation(SUITE)
class TinyGemm(OnGpu):
    """PyTorch's own product with 4-bit weights."""

    name = "torch tinygemm"
    formats = ("w4a16",)

    def available(self, case: Any) -> str | None:
        if case.dtypes in self.formats and case.sizes["M"] > _MOST_ROWS:
            return (
                f"takes many times as long as cuBLAS, so it is not timed beyond {_MOST_ROWS} rows"
            )
        return super().available(case)

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        import torch

        pairs = task.values[:, ::2] << 4 | task.values[:, 1::2]
        tiles = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
        scale = task.scale.T  # 8 is subtracted of itself, and a zero point added
        return tiles, torch.stack([scale, torch.zeros_like(scale)], 2).contiguous()

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        import torch

        return torch.ops.aten._weight_int4pack_mm(task.x, weights[0], task.group_size, weights[1])


@implementation(SUITE)
class IntMm(OnGpu):
    """cuBLAS's product of int8."""

    name = "torch _int_mm"
    formats = ("int8",)
    remark = "32-bit sums, not scaled"

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        return (task.values,)

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        import torch

        return torch.ops.aten._int_mm(task.q, weights[0].T)

    def read(self, task: GpuLinearProblem, result: Tensor) -> Tensor:
        assert task.q_scale is not None
        return result * task.q_scale[:, None] * task.scale


@implementation(SUITE)
class ScaledMm(OnGpu):
    """cuBLAS's product of float8."""

    name = "torch _scaled_mm"
    formats = ("fp8",)

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        return task.values, task.scale.T if task.scale.dim() == 2 else task.scale[None]

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        import torch

        values, scale = weights
        return torch.ops.aten._scaled_mm(
            task.q, values.T, task.columns_of_scales, scale, out_dtype=torch.bfloat16,
            use_fast_accum=task.scale.dim() == 1,
        )  # fmt: skip


@implementation(SUITE)
class GemLite(OnGpu):
    """A library of kernels in Triton, which tune themselves."""

    name = "GemLite"
    formats = ("w4a16",)
    needs = ("torch", "gemlite")
    package = ("GemLite", "gemlite")

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        import importlib

        import torch

        gemlite = importlib.import_module("gemlite")
        _, N, K = task.size
        kinds = {"input_dtype": gemlite.DType.BF16, "output_dtype": gemlite.DType.BF16}
        layer = gemlite.GemLiteLinear(
            4, group_size=task.group_size, in_features=K, out_features=N, **kinds
        )
        layer.pack(task.values, task.scale, torch.full_like(task.scale, 8), None)
        return layer.W_q, layer

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        return weights[1](task.x)


# One library of vLLM's wheel has the kernels of three: `_C_stable_libtorch.abi3.so`.


@cache
def _loaded(path: str) -> Any:
    """Its operators. OSError if it cannot be loaded."""
    import torch

    ctypes.CDLL(os.path.abspath(path), os.RTLD_LAZY | os.RTLD_GLOBAL)
    return torch.ops._C


class FromFile(OnGpu):
    """An operator of that file. Each has a packing of its own."""

    package = ("vLLM", "vllm")

    def __init__(self, path: str) -> None:
        self.path = path

    def available(self, case: Any) -> str | None:
        if not case.dtypes.startswith(self.formats):
            return None
        if not self.path:
            return "its library is not given: --library FILE"
        if not os.path.exists(self.path):
            return f"there is no file {self.path}"
        return super().available(case)

    @property
    def operators(self) -> Any:
        return _loaded(self.path)

    def words(self, task: GpuLinearProblem) -> Tensor:
        """int32 [K / 8, N] of 4-bit values, the first in the lowest bits."""
        import torch

        of_k = task.values.T.reshape(task.values.shape[1] // 8, 8, -1).long()
        shifts = 4 * torch.arange(8, device=of_k.device)[None, :, None]
        return (of_k << shifts).sum(1).to(torch.int32)


class Machete(FromFile):
    """CUTLASS with weights of few bits, on Hopper."""

    name = "Machete"
    formats = ("w4a16",)

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        words = self.words(task).T.contiguous().T
        kind = task.x.dtype
        tiles = self.operators.machete_prepack_B(words, kind, _U4B8, kind)
        return tiles, task.scale.T.contiguous()

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        size = task.group_size
        return self.operators.machete_mm(
            task.x, weights[0], _U4B8, task.x.dtype, weights[1], None, size, None, None, None
        )


class Marlin(FromFile):
    """`mma.sync` with weights of few bits."""

    name = "Marlin"
    formats = ("w4a16",)

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        import torch

        _, N, K = task.size
        tiles = self.operators.gptq_marlin_repack(self.words(task), K, N, 4, False)
        order = torch.arange(64, device=task.x.device).view(8, 8).T.flatten()
        scale = task.scale.T.reshape(-1, 64)[:, order].reshape(-1, N).contiguous()
        most = torch.cuda.get_device_properties(task.x.device).multi_processor_count
        return tiles, scale, torch.zeros(4 * most, dtype=torch.int32, device=task.x.device)

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        tiles, scale, locks = weights
        none = None
        return self.operators.marlin_gemm(
            task.x, none, tiles, none, scale, none, none, none, locks, _U4B8, *task.size,
            False, True, False,
        )  # fmt: skip


class Cutlass(FromFile):
    """CUTLASS with int8 and float8."""

    name = "CUTLASS scaled_mm"
    formats = ("int8", "fp8")

    def weights(self, task: GpuLinearProblem) -> tuple[Any, ...]:
        return task.values, task.scale.T if task.scale.dim() == 2 else task.scale[:, None]

    def multiply(self, task: GpuLinearProblem, *weights: Any) -> Tensor:
        M, N, _ = task.size
        out = task.x.new_empty(M, N)
        values, scale = weights
        left = task.columns_of_scales
        self.operators.cutlass_scaled_mm(out, task.q, values.T, left, scale, None)
        return out


def from_file(path: str) -> list[Implementation]:
    """Those of a file."""
    return [Machete(path), Marlin(path), Cutlass(path)]
