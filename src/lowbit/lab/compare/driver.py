"""Launching machine code on a GPU through its driver, in the context that PyTorch made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from lowbit.lab.compare.kind import Built
from lowbit.lab.compare.ptx.execute import Dims
from lowbit.lab.compare.toolchain import assemble

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

    def launch(self, grid: Dims, block: Dims, shared: int, parameters: Sequence[bytes]) -> None:
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
