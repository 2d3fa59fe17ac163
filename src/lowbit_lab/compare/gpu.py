"""What kernels that become PTX have in common: how they are launched, interpreted and checked."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowbit.spec import Array
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import Language
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.execute import Launch
from lowbit_lab.compare.ptx.memory import Memory, packed_parameters
from lowbit_lab.compare.ptx.parse import Ptx, parse
from lowbit_lab.compare.toolchain import assemble
from lowbit_lab.run.trace import Grid, grid_of

# Launching machine code on a GPU through its driver, in the context that PyTorch made.

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED = 48 * 1024


class Function:
    """A kernel that is loaded. RuntimeError, with the driver's words, if it cannot be."""

    def __init__(self, built: Built, name: str) -> None:
        import torch

        torch.cuda.current_stream()  # there is a context now
        major, minor = torch.cuda.get_device_capability()
        assert built.ptx is not None
        self._driver = ctypes.CDLL("libcuda.so.1")
        cubin = assemble(built.ptx, 10 * major + minor, built.file, built.most_registers).cubin
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def launch(self, grid: Grid, block: Grid, shared: int, parameters: Sequence[bytes]) -> None:
        """Start it on PyTorch's current stream. parameters: the bytes of each."""
        import torch

        if shared > _PLAIN_SHARED:
            self._call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared)
        held = [ctypes.create_string_buffer(one, len(one)) for one in parameters]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchKernel", self._function, *grid, *block, shared, stream, pointers, None)

    def _call(self, name: str, *arguments: Any) -> None:
        failed = getattr(self._driver, name)(*arguments)
        if failed:
            said = ctypes.c_char_p()
            self._driver.cuGetErrorString(failed, ctypes.byref(said))
            raise RuntimeError(f"{name}: {(said.value or b'unknown').decode()} ({failed})")


def launch_of(variant: Variant, problem: Problem) -> tuple[Grid, Grid]:
    """The blocks at these sizes, and the threads of each. ValueError if the grid is none."""
    # A constant that is named as a size is that size in another type.
    known = {**variant.constants, **problem.sizes}
    return variant.grid_at(known), grid_of(variant.block or (1,))


class PtxLanguage(Language):
    """A kernel of which the block is given, and whose PTX has flat parameters."""

    needs_grid = needs_block = for_gpu = True

    @classmethod
    @abstractmethod
    def flat(cls, value: Any, address: Callable[[Any], int]) -> list[Any]:
        """An argument as the parameters of the PTX that it becomes."""

    @classmethod
    def parsed(cls, built: Built) -> Ptx:
        """The PTX with lines of the kernel's own file. ValueError if there is none."""
        if built.ptx is None:
            raise ValueError("; ".join(built.missing) or "there is no PTX")
        return parse(built.ptx, built.file, built.entry)

    @classmethod
    def launch(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Array]
    ) -> Launch:
        """The kernel on these arrays, to be interpreted."""
        memory, ptx = Memory(), cls.parsed(built)
        places = {one.ctypes.data: memory.place(name, one) for name, one in arrays.items()}
        given = cls.arguments(variant, problem, arrays).values()
        values = [v for one in given for v in cls.flat(one, lambda a: places[a.ctypes.data])]
        kinds = {one.name: (one.letter, one.bits) for one in ptx.parameters}
        if len(kinds) != len(values):
            raise NotInterpretedError(
                f"{len(kinds)} parameters in the PTX, {len(values)} arguments"
            )
        parameters = packed_parameters(kinds, values)
        return Launch(ptx, memory, parameters, *launch_of(variant, problem), variant.shared)

    @classmethod
    def call(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        ptx = cls.parsed(built)
        given = cls.arguments(variant, problem, arrays).values()
        values = [v for one in given for v in cls.flat(one, lambda a: a.data_ptr())]
        kinds = {one.name: (one.letter, one.bits) for one in ptx.parameters}
        parameters = [*packed_parameters(kinds, values).values()]
        function = Function(built, ptx.name)
        grid, block = launch_of(variant, problem)
        return lambda: function.launch(grid, block, variant.shared, parameters)
