"""Running fast kernels without a GPU, with every access checked.

Within `interpreter()`, the functions of `lowbit.torch.functional` run their kernels on CPU tensors
in Triton's interpreter. An access out of bounds, or a race between programs, raises AssertionError
with what and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lowbit.kernels.triton.fast import launch
from lowbit.lab.backends.kinds.triton import TritonKernel
from lowbit.lab.run.bind import TensorArgument
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.program import grid_of, programs_of
from lowbit.lab.run.tensor import NOBODY, CheckedTensor, array_of, dtype_of
from lowbit.spec import TensorType


@contextmanager
def interpreter() -> Iterator[None]:
    """Within it, kernels on CPU tensors run in the interpreter.

    ModuleNotFoundError or RuntimeError if Triton is missing or of an unknown version.
    """
    with launch.running(run_checked):
        yield


def run_checked(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Run a kernel on torch tensors on the CPU. AssertionError if something is wrong with it."""
    import torch

    taken = TritonKernel.of(kernel)
    tensors = {
        name: one
        for name, value in arguments.items()
        for one in (value if isinstance(value, tuple) else (value,))
        if isinstance(one, torch.Tensor)
    }
    checked = [_checked(name, one) for name, one in tensors.items()]
    memory = Memory(checked, machinery=taken.machinery)

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(argument(name, one) for one in value)
        return TensorArgument(name) if isinstance(value, torch.Tensor) else value

    values = {name: argument(name, one) for name, one in arguments.items()}
    dims = grid_of(grid)
    taken.run(memory, values, programs_of(dims), dims)
    wrong = [str(one) for one in memory.findings if one.severity == "error"]
    if wrong:
        raise AssertionError(f"{taken.name}: " + "; ".join(wrong))
    for name, tensor in tensors.items():
        held = memory.tensors[name]
        if (held.writer != NOBODY).any():
            tensor.copy_(torch.from_numpy(held.values).view(tensor.dtype))


def _checked(name: str, tensor: Any) -> CheckedTensor:
    """A copy of a tensor, in memory that sees each access."""
    type_ = TensorType(name, dtype_of(tensor), tuple(map(str, tensor.shape)))
    return CheckedTensor(type_, array_of(tensor), tensor.stride(), "both")
