"""Numba-CUDA kernels, run by Numba's CUDA simulator on arrays that see every access, and compiled.

A program is a thread. Threads of one block are in order with each other across a barrier, threads
of different blocks never. The simulator has to be on before Numba is imported: by
NUMBA_ENABLE_CUDASIM=1 in the environment, which `lowbit check FILE.py` sets for a process of its
own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import operator
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from lowbit.registry.locks import Lock
from lowbit.spec import TensorType
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.kernel import KernelBackend, KernelSubject
from lowbit_lab.backends.language import languages
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.gpu import PtxLanguage
from lowbit_lab.compare.numba_types import NumbaLanguage, typed
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.toolchain import MissingToolError, find_nvvm
from lowbit_lab.run.bind import Parameter, TensorArgument
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.outcome import UnsupportedError, refusals
from lowbit_lab.run.tensor import CheckedTensor, poison, tensor_of
from lowbit_lab.run.trace import Grid, Program
from lowbit_lab.run.variables import VariableWatch, plain

_RUNNER = "Numba's CUDA simulator"
# The simulator runs one kernel at a time.
_LOCK = Lock()
_TURN = 1e-5  # seconds that a thread keeps the interpreter while others wait
_THREADS = {"threads": 32, "threads_y": 1, "threads_z": 1}
_SIGNATURES = "lowbit_signatures"


@languages.register("Numba-CUDA")
class NumbaCuda(NumbaLanguage, PtxLanguage, KernelBackend):
    """A kernel, compiled by Numba and NVVM; an object is a simulated one.

    Besides its own parameters that has `threads`, `threads_y`, `threads_z`: the size of a block,
    32, 1 and 1 unless given; the grid is in blocks.
    """

    title = "Numba-CUDA"
    written = "a function under numba.cuda.jit"
    simulated = True
    slow = True  # The simulator makes each thread one of Python.

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a function under numba.cuda.jit, compiled or simulated. A device function
        is a part of kernels."""
        if not type(kernel).__module__.startswith(("numba.cuda.", "numba_cuda.")):
            return False
        if type(kernel).__name__ == "FakeCUDAKernel":
            return not kernel._device
        return hasattr(kernel, "py_func") and not kernel.targetoptions.get("device")

    @classmethod
    def of(cls, kernel: Any) -> Self:
        """RuntimeError, with what to do, if the kernel is not simulated."""
        if type(kernel).__name__ != "FakeCUDAKernel":
            raise RuntimeError(
                "a Numba kernel is checked in the CUDA simulator: set NUMBA_ENABLE_CUDASIM=1 "
                "before numba is imported, or run `lowbit check` on its file"
            )
        import numba

        own = map(Parameter, inspect.signature(kernel.fn).parameters)
        return cls(
            text=kernel.fn,
            description=f"Numba {numba.__version__}'s CUDA simulator",
            parameters=(*own, *(Parameter(name, True, size) for name, size in _THREADS.items())),
            machinery=(str(Path(numba.__file__).parent), threading.__file__),
        )

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run these blocks, in this order; UnsupportedError if the simulator is at fault."""
        from numba.cuda.simulator import kernel as simulator
        from numba.cuda.simulator.kernelapi import FakeCUDAModule, swapped_cuda_module

        watch = _Watch(memory)
        block = tuple(int(arguments[name]) for name in _THREADS)
        given = [
            _Watched(memory.tensors[one.name], watch) if isinstance(one, TensorArgument) else one
            for name, one in arguments.items()
            if name not in _THREADS
        ]
        module: Any = FakeCUDAModule(grid, block, 0)
        module._shared = _Shared(watch)
        with (
            _LOCK,
            warnings.catch_warnings(),
            _counted_barriers(simulator.BlockThread),
            _quick_turns(),
            simulator._push_kernel_context(module),
            swapped_cuda_module(self.text, module),
            _without_device_code(self.text),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)
            if memory.recorder is not None:
                memory.recorder.watch = VariableWatch(
                    memory, memory.recorder, self.text.__code__, plain
                )
            for point in programs:
                manager = simulator.BlockManager(self.text, grid, block, False)
                try:
                    manager.run(point, *given)
                except (AttributeError, UnsupportedError) as error:
                    # The simulator puts the thread before the message.
                    text = re.sub(r"^tid=.*? ctaid=.*?]: ", "", str(error))
                    if "FakeCUDA" in text:
                        text = f"{_RUNNER} has no cuda.{text.split()[-1].strip(chr(39))}"
                    elif isinstance(error, AttributeError):
                        raise
                    raise UnsupportedError(text).with_traceback(error.__traceback__) from None

    @classmethod
    def interpret(cls, request: Request) -> KernelSubject:
        block = dict(zip(_THREADS, request.variant.block or (), strict=False))
        return super().interpret(request.launched(constants={**request.variant.constants, **block}))

    # Compiled, for a GPU that need not be there.

    @classmethod
    def flat(cls, value: Any, address: Callable[[Any], int]) -> list[Any]:
        """An array is its owner and parent (none), elements, bytes of one, address, shape and
        strides in bytes."""
        shape = getattr(value, "shape", ())
        if not shape:
            return [value]
        if isinstance(value, np.ndarray):
            size, strides = value.itemsize, list(value.strides)
        else:
            size = value.element_size()
            strides = [size * step for step in value.stride()]
        return [0, 0, prod(shape), size, address(value), *shape, *strides]

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        import numba
        from numba.core import sigutils
        from numba.cuda.compiler import compile_cuda, compile_ptx

        function = variant.kernel.py_func
        lines, first, file = cls.source(variant.kernel)
        given = cls.arguments(variant, problem, problem.arrays(variant)).values()
        signature: Any = getattr(variant.kernel, _SIGNATURES, None)
        if isinstance(signature, list):
            signature = signature[0]
        if signature is None:
            signature = tuple(numba.typeof(one) for one in given)
        wanted, _ = sigutils.normalize_signature(signature)
        options = variant.kernel.targetoptions
        fast, capability = bool(options.get("fastmath")), divmod(sm, 10)
        types, missing, ptx = (), [], None
        try:
            find_nvvm()
        except MissingToolError as error:
            missing.append(str(error))
        else:
            with _capability(capability):
                made = compile_cuda(
                    function, numba.types.void, wanted, debug=False, lineinfo=True, fastmath=fast,
                    nvvm_options={}, cc=capability,
                )  # fmt: skip
                types = typed(made.type_annotation, lines, first)
                ptx, _ = compile_ptx(
                    function, wanted, debug=False, lineinfo=True, fastmath=fast, cc=capability,
                    opt=options.get("opt") is not False,
                )  # fmt: skip
        return Built(
            lines=lines,
            first_line=first,
            file=file,
            types=types,
            made_by=f"Numba {numba.__version__}",
            ptx=ptx,
            threads=prod(variant.block or (1,)),
            shared=variant.shared,
            most_registers=options.get("max_registers"),
            missing=tuple(missing),
        )


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Within it, numba.cuda.jit keeps an explicit signature for later, so that a file can be read
    where there is no GPU."""
    from numba import cuda

    original = cuda.jit

    def jit(func_or_sig: Any = None, *arguments: Any, **options: Any) -> Any:
        if func_or_sig is None or isinstance(func_or_sig, FunctionType) or options.get("device"):
            return original(func_or_sig, *arguments, **options)

        def decorate(function: Any) -> Any:
            made = original(*arguments, **options)(function)
            setattr(made, _SIGNATURES, func_or_sig)
            return made

        return decorate

    with patch.object(cuda, "jit", jit):
        yield


@contextlib.contextmanager
def _capability(capability: tuple[int, int]) -> Iterator[None]:
    """Within it, Numba compiles the functions that a kernel calls, warp shuffles among them, for
    this compute capability. It asks the GPU otherwise, of which there may be none."""
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    device = SimpleNamespace(compute_capability=capability)
    with patch.object(dispatcher, "get_current_device", lambda: device):
        yield


@contextlib.contextmanager
def _without_device_code(function: Callable[..., None]) -> Iterator[None]:
    """Within it, what has no body but on a GPU refuses to be called."""
    from numba.cuda import libdevice

    with contextlib.ExitStack() as stack:
        for names in (vars(libdevice), function.__globals__):
            stack.enter_context(patch.dict(names, refusals(names, libdevice.__name__, _RUNNER)))
        yield


@contextlib.contextmanager
def _quick_turns() -> Iterator[None]:
    """While threads run, the simulator asks without a pause whether they do, and Python would let
    it ask for five milliseconds at a time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextlib.contextmanager
def _counted_barriers(thread: Any) -> Iterator[None]:
    """Count in each simulated thread how many barriers it has passed."""
    original = thread.syncthreads

    def counted(self: Any) -> None:
        original(self)
        self.barriers_passed = getattr(self, "barriers_passed", 0) + 1

    with patch.object(thread, "syncthreads", counted):
        yield


class _Watch:
    """Tells a Memory which thread touches it; one thread at a time."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.lock = threading.RLock()
        self._numbers: dict[tuple[Program, int], int] = {}
        self._groups: dict[Program, int] = {}

    def enter(self) -> None:
        """The current thread goes on, since its last barrier."""
        thread: Any = threading.current_thread()
        block = tuple(thread.blockIdx)
        key = (*block, *thread.threadIdx), getattr(thread, "barriers_passed", 0)
        number = self._numbers.get(key)
        if number is None:
            group = self._groups.setdefault(block, len(self._groups))
            self._numbers[key] = self.memory.begin(key[0], group, key[1])
        else:
            self.memory.resume(number)


class _Watched:
    """An array as a simulated kernel sees it: elements only, each access told to a Memory."""

    def __init__(self, tensor: CheckedTensor, watch: _Watch) -> None:
        self._tensor, self._watch = tensor, watch
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.ndim, self.size = len(tensor.shape), tensor.count

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        text = f"{self._tensor.name}.{name}"
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{text}: an array has no {name}")
        raise UnsupportedError(f"{text}: the checker follows single elements only")

    def _offset(self, index: Any) -> tuple[tuple[int, ...], NDArray[np.int64] | None]:
        """The index as a tuple, and its byte offset, or None if it lies outside.

        As in Numba, -1 is the last index of an axis.
        """
        try:
            given = tuple(map(operator.index, index if isinstance(index, tuple) else (index,)))
        except TypeError:
            given = ()
        if len(given) != self.ndim:
            raise UnsupportedError(
                f"{self._tensor.name}[{index!r}]: the checker follows single elements only; give "
                f"{self.ndim} integers"
            )
        pairs = zip(given, self.shape, strict=True)
        wrapped = tuple(i + size if i < 0 else i for i, size in pairs)
        if any(not 0 <= i < size for i, size in zip(wrapped, self.shape, strict=True)):
            return given, None
        steps = zip(wrapped, self._tensor.strides, strict=True)
        return given, np.array([sum(i * step for i, step in steps) * self._tensor.itemsize])

    def __getitem__(self, index: Any) -> Any:
        with self._watch.lock:
            self._watch.enter()
            given, offset = self._offset(index)
            if offset is None:
                nothing = np.array([poison(self.dtype)], self.dtype)
                self._watch.memory.outside("load", self._tensor, given, nothing)
                return nothing[0]
            if _is_atomic():
                return self._tensor.read(offset, self.dtype)[0]
            value = self._watch.memory.load(Lanes(self._tensor, offset), np.zeros(1, self.dtype))[0]
            # Numba computes with integers of 64 bits, NumPy with those that it is given.
            return np.int64(value) if value.dtype.kind in "iu" and value.itemsize < 8 else value

    def __setitem__(self, index: Any, value: Any) -> None:
        with self._watch.lock:
            self._watch.enter()
            given, offset = self._offset(index)
            memory, new = self._watch.memory, np.array([value]).astype(self.dtype)
            if offset is None:
                memory.outside("store", self._tensor, given, new)
            elif _is_atomic():
                memory.update(Lanes(self._tensor, offset), new, lambda old, lane: new[lane])
            else:
                memory.store(Lanes(self._tensor, offset), new)


class _Shared:
    """cuda.shared: arrays that see every access. Each block has its own, and fresh ones."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._arrays: dict[tuple[Any, ...], _Watched] = {}

    def array(self, shape: int | tuple[int, ...], dtype: Any) -> _Watched:
        """The array of this block that this line of the kernel makes. UnsupportedError for a size
        of 0, which stands for memory that the launch gives: a check gives none."""
        from numba.core import types
        from numba.np import numpy_support

        if shape == 0:
            raise UnsupportedError("dynamic shared memory is not checked; give the array a size")
        thread: Any = threading.current_thread()
        caller = sys._getframe(1)
        key = (*thread.blockIdx, caller.f_code, caller.f_lineno)
        with self._watch.lock:
            if key not in self._arrays:
                kind = np.dtype(
                    numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
                )
                values = np.zeros(shape, kind)
                line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
                name = f"shared {line.partition('=')[0].strip()}"
                memory = self._watch.memory
                if memory.recorder is not None:
                    # Each block's is shown by itself.
                    name += f" of block {list(thread.blockIdx)}"
                type_ = TensorType(name, str(kind), tuple(map(str, values.shape)))
                tensor = tensor_of(type_, values, "contiguous", "output", initialised=False)
                self._arrays[key] = _Watched(tensor, self._watch)
                if memory.recorder is not None:
                    memory.tensors[name] = tensor
            return self._arrays[key]


def _is_atomic() -> bool:
    """Whether the simulator's own atomic operations are what touches the array."""
    return sys._getframe(2).f_code.co_filename.endswith("kernelapi.py")
