"""What the host does between kernels: torch's memory, seen by the checker.

A function of tensors allocates, copies and launches. Within a `Host`, memory that torch leaves
uninitialised is filled with poison and known as unwritten, until a kernel or an operation of torch
writes it; and every launch of a Triton kernel on CPU tensors runs in the interpreter, on the memory
that the tensors have.

torch.utils.deterministic.fill_uninitialized_memory would fill memory as well, but it needs torch's
global switch for determinism, and cannot tell what was written with the value that it fills in.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lowbit.jit.memory import offsets_of
from lowbit.kernels.triton.fast import launch
from lowbit.spec import TensorType
from lowbit_lab.backends.intercept import launches
from lowbit_lab.backends.living import LivingMemory, Range
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.run.bind import TensorArgument
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import shuffled
from lowbit_lab.run.tensor import (
    NOBODY,
    POISON,
    CheckedTensor,
    TensorView,
    array_of,
    dtype_of,
    name_of_dtype,
    strides_of,
    tensor_of,
)
from lowbit_lab.run.trace import Grid, Program, grid_of, programs_of
from lowbit_lab.run.triton import triton_modules

_FRESH = {
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
}
_COPIES = {"aten::_to_copy", "aten::clone", "aten::copy_"}
TORCH = -3
"""The number of a program of which no more is known than that it came before."""


class Poisoning(TorchDispatchMode):
    """Within it, memory that torch does not initialise holds poison: NaN, or a pattern of bits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.namespace != "aten":
            return self._inside(func, args, named)
        result = func(*args, **named)
        if func._schema.name in _FRESH:
            self.fresh(result)
        else:
            self.done(func._schema, args, named, result)
        return result

    def _inside(self, func: Any, args: Any, named: Mapping[str, Any]) -> Any:
        """An operator of somebody's own: what it does is seen too."""
        tensors = (one for one in tree_iter((args, named)) if isinstance(one, Tensor))
        device = next((one.device.type for one in tensors), "cpu")
        key = torch._C.DispatchKey.CUDA if device == "cuda" else torch._C.DispatchKey.CPU
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **named)

    def fresh(self, tensor: Tensor) -> None:
        """Memory was made, and not initialised."""
        if tensor.device.type != "meta":
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            pattern = 0xFF if tensor.dtype.is_floating_point else POISON
            whole.set_(tensor.untyped_storage()).fill_(pattern)

    def done(self, schema: Any, args: Any, named: Mapping[str, Any], result: Any) -> None:
        """An operation of torch has run."""


@dataclass(frozen=True)
class _Held:
    """Memory of torch as a tensor of the checker. A weak reference to the storage keeps its key
    from being given to another; `own` is the name of an input."""

    tensor: CheckedTensor
    storage: StorageWeakRef
    own: str | None

    def elements(self, view: Tensor) -> NDArray[np.int64]:
        """The element that each element of a view of this memory is, -1 for none."""
        at = int(view.storage_offset()) + offsets_of(tuple(view.shape), view.stride())
        size = view.element_size()
        return self.tensor.locate(at * size, np.ones(at.shape, bool), size)[0]


class Host(Poisoning):
    """A run of a function of CPU tensors. `memory` takes down what is found; with a seed, the
    programs of a launch run in another order."""

    def __init__(self, memory: Memory, seed: int | None) -> None:
        super().__init__()
        self.memory, self._seed = memory, seed
        self.several = False
        self.living = LivingMemory(self._reached_in)
        self._held: dict[int, _Held] = {}
        self._reached: dict[int, CheckedTensor] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it, torch and the launches of kernels are watched."""
        launching = launch.running(self.launch), launches(self.launch, self.on_gpu)
        with launching[0], launching[1], self.living.watching(), self:
            yield

    def on_gpu(
        self, start: Callable[[], Any], kernel: Any, grid: Sequence[int],
        arguments: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """A launch with a GPU's tensors, which `start` makes. Returns what that returns."""
        return start()

    def give(self, checked: CheckedTensor) -> Tensor:
        """A torch tensor in the memory of a checked one."""
        dtype = getattr(torch, checked.type.dtype)
        whole = torch.from_numpy(checked.storage)
        storage = StorageWeakRef(whole.untyped_storage())
        self._held[_key(whole)] = _Held(checked, storage, checked.name)
        return torch.as_strided(whole.view(dtype), checked.shape, checked.strides)

    def output(self, result: Tensor, type_: TensorType) -> CheckedTensor:
        """What a function returned, with what is known of each element."""
        held = self._of(result)
        output = tensor_of(type_, array_of(result), "contiguous", "output")
        output.initialised = held.tensor.initialised
        elements = held.elements(result).reshape(-1)
        output.writer[:] = held.tensor.writer[elements]
        output.place[:] = held.tensor.place[elements]
        return output

    def fresh(self, tensor: Tensor) -> None:
        super().fresh(tensor)
        if tensor.device.type == "cpu":
            self._hold(tensor, initialised=False)

    def done(self, schema: Any, args: Any, named: Mapping[str, Any], result: Any) -> None:
        copies = schema.name in _COPIES or _is_view(schema)
        silent = copies or schema.name.endswith("_like") or schema.name.startswith("aten::new_")
        written, read = list[Tensor](), list[Tensor]()
        values = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **named}
        for argument in schema.arguments:
            tensors = [one for one in tree_iter(values.get(argument.name)) if _on_cpu(one)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(tensors)
        for tensor in read if not silent else ():
            self._is_read(schema.name, tensor)
        for tensor in written:
            self._is_written(schema.name, tensor)
        if copies and read and isinstance(result, Tensor):
            self._is_copied(read[-1], result)

    def _hold(self, tensor: Tensor, initialised: bool) -> _Held:
        """Take memory in: with the elements of this tensor where it is all of them, else whole."""
        storage = tensor.untyped_storage()
        if initialised or tensor.storage_offset():
            return self._hold_whole(storage, tensor.dtype, initialised)
        memory = _bytes(storage.data_ptr(), storage.nbytes())
        shape, strides = tuple(tensor.shape), tensor.stride()
        checked = _in_place("", tensor.dtype, shape, strides, memory, initialised)
        self._held[storage._cdata] = held = _Held(checked, StorageWeakRef(storage), None)
        return held

    def _hold_whole(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, initialised: bool
    ) -> _Held:
        """Take memory in as elements of this dtype, one after the other."""
        memory = _bytes(storage.data_ptr(), storage.nbytes())
        shape = (storage.nbytes() // dtype.itemsize,)
        checked = _in_place("", dtype, shape, (1,), memory, initialised)
        self._held[storage._cdata] = held = _Held(checked, StorageWeakRef(storage), None)
        return held

    def reached(self, tensor: CheckedTensor) -> None:
        """A kernel reaches a tensor that it was not given, by an integer."""

    def _reached_in(self, known: Range) -> CheckedTensor:
        """The tensor of memory that a kernel reaches by an integer: all of the memory."""
        storage = known.storage
        assert storage is not None
        key = storage._cdata
        if key in self._reached:
            return self._reached[key]
        held = self._held.get(key) or self._hold_whole(storage, known.dtype, initialised=True)
        tensor = held.tensor
        if held.own is None:
            alike = sum(one.type.dims == known.dims for one in self._reached.values())
            name = f"the tensor {list(known.shape)} by its address" + f" ({alike + 1})" * (
                alike > 0
            )
            type_ = TensorType(name, name_of_dtype(known.dtype), known.dims)
            strides = strides_of(known.shape, "contiguous")
            tensor = TensorView(type_, tensor, known.shape, strides, known.dtype.itemsize, 0)
        self._reached[key] = tensor
        self.reached(tensor)
        return tensor

    def forget_freed(self) -> None:
        """Drop what is known of memory that is no longer there."""
        freed = [key for key, held in self._held.items() if held.storage.expired()]
        for key in freed:
            del self._held[key]

    def _of(self, tensor: Tensor) -> _Held:
        found = self._held.get(_key(tensor))
        if found is None or found.tensor.storage.size != tensor.untyped_storage().nbytes():
            return self._hold(tensor, initialised=True)
        return found

    def _unwritten(self, tensor: Tensor) -> NDArray[np.int64]:
        """The elements of a tensor that nobody has written."""
        held = self._held.get(_key(tensor))
        if held is None or held.tensor.initialised or (held.tensor.writer != NOBODY).all():
            return np.empty(0, np.int64)
        elements = self._of(tensor).elements(tensor).reshape(-1)
        return elements[(elements >= 0) & (held.tensor.writer[elements] == NOBODY)]

    def _is_read(self, name: str, tensor: Tensor) -> None:
        unwritten = self._unwritten(tensor)
        if unwritten.size:
            what = f"is read by {name}, and unwritten"
            self.found("unwritten-read", self._of(tensor), unwritten[0], what)

    def _is_written(self, name: str, tensor: Tensor) -> None:
        if _key(tensor) not in self._held:
            return
        held = self._of(tensor)
        elements = held.elements(tensor).reshape(-1)
        elements = elements[elements >= 0]
        if held.own is not None and elements.size:
            self.found("input-written", held, elements[0], f"is an input, and written by {name}")
        held.tensor.writer[elements], held.tensor.place[elements] = TORCH, self.memory.place()

    def found(self, kind: str, held: _Held, element: Any, what: str) -> None:
        """Something is wrong with what torch does to an element."""
        index = held.tensor.index(int(element))
        message = f"{held.own or 'a temporary tensor'}{list(index)} {what}"
        place = self.memory.here()
        self.memory.note(Finding(kind, message, tensor=held.own, index=index, place=place))

    def _is_copied(self, source: Tensor, target: Tensor) -> None:
        """Elements that nobody has written are so in a copy too."""
        if _key(source) == _key(target) or not self._unwritten(source).size:
            return
        held = self._of(source)
        writer = held.tensor.writer[held.elements(source)]
        new = self._held.get(_key(target)) or self._hold(target, initialised=True)
        new.tensor.initialised = False
        new.tensor.writer[new.tensor.writer == NOBODY] = TORCH
        if writer.size != target.numel():
            writer = np.broadcast_to(writer, target.shape)
        new.tensor.writer[new.elements(target).reshape(-1)] = writer.reshape(-1)

    def launch(self, kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Run a kernel on tensors on the CPU, with all parameters by name."""
        self.run(TritonKernel.of(kernel), *self.taken(arguments), grid_of(grid))

    def taken(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[CheckedTensor]]:
        """The arguments as the interpreter takes them, and the tensors among them. A tensor has the
        name of the input that it is, else of its first parameter; views of one memory know of each
        other, and each has bounds of its own."""
        taken: dict[tuple[Any, ...], CheckedTensor] = {}
        self._reached.clear()

        def take(name: str, tensor: Tensor) -> TensorArgument:
            held, start = self._of(tensor), int(tensor.storage_offset()) * tensor.element_size()
            if held.own is not None:
                taken[(_key(tensor),)] = held.tensor
                return TensorArgument(held.own, start, dtype_of(tensor))
            place = (_key(tensor), start, tensor.shape, tensor.stride(), tensor.dtype)
            if place not in taken:
                shape, size = tuple(tensor.shape), tensor.element_size()
                type_ = TensorType(name, dtype_of(tensor), tuple(map(str, shape)))
                view = TensorView(type_, held.tensor, shape, tensor.stride(), size, start)
                taken[place] = view
            return TensorArgument(taken[place].name, 0, dtype_of(tensor))

        values = {name: _argument(name, one, take) for name, one in arguments.items()}
        return values, list(taken.values())

    def run(
        self, kernel: TritonKernel, values: dict[str, Any], tensors: list[CheckedTensor],
        grid: Grid, chosen: Sequence[Program] | None = None,
    ) -> None:  # fmt: skip
        """Run a kernel on what `taken` gave; all of its programs, or those that are chosen."""
        programs, memory = list(chosen or programs_of(grid)), self.memory
        self.several |= len(programs) > 1
        memory.tensors = {one.name: one for one in tensors}
        memory.kernel, memory.owners = kernel.name, self.living
        memory.barrier()
        try:
            kernel.run(memory, values, shuffled(programs, self._seed), grid)
        finally:
            self.living.forget()
        memory.barrier()
        memory.kernel = memory.running = None


def machinery() -> tuple[str, ...]:
    """Where the lines are that neither a kernel nor a function has: in Triton and torch, and in
    what dataclasses make."""
    files = [triton_modules()[0].__file__, torch.__file__]
    return (*(str(Path(file).parent) for file in files if file is not None), "<string>")


def _argument(name: str, value: Any, take: Callable[[str, Tensor], TensorArgument]) -> Any:
    """An argument as Triton's interpreter takes it: `take` says what stands for its tensors."""
    if isinstance(value, tuple):
        return tuple(_argument(f"{name}[{i}]", one, take) for i, one in enumerate(value))
    if is_reinterpreted(value):
        return replace(take(name, value.base), dtype=_name_of(value.dtype))
    if hasattr(value, "block_shape"):
        descriptor = copy.copy(value)
        descriptor.base = _argument(name, value.base, take)
        return descriptor
    return take(name, value) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Within it, the functions of `lowbit.torch.functional` run their kernels on CPU tensors in
    Triton's interpreter. An access out of bounds, or a race between programs, raises AssertionError
    with what and where.

    ModuleNotFoundError or RuntimeError if Triton is missing or of an unknown version.
    """
    with launch.running(run_checked):
        yield


def run_checked(kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
    """Run a kernel on torch tensors on the CPU. AssertionError if something is wrong with it."""
    launched = TritonKernel.of(kernel)
    memory = Memory([], machinery=launched.machinery)

    def take(name: str, tensor: Tensor) -> TensorArgument:
        shape, strides = tuple(tensor.shape), tensor.stride()
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        held = _bytes(tensor.data_ptr(), size)
        memory.tensors[name] = _in_place(name, tensor.dtype, shape, strides, held, True)
        return TensorArgument(name)

    values = {name: _argument(name, one, take) for name, one in arguments.items()}
    dims = grid_of(grid)
    launched.run(memory, values, programs_of(dims), dims)
    wrong = [str(one) for one in memory.findings if one.severity == "error"]
    if wrong:
        raise AssertionError(f"{launched.name}: " + "; ".join(wrong))


def is_reinterpreted(value: Any) -> bool:
    """Whether this is a tensor under triton.reinterpret."""
    return type(value).__name__ == "TensorWrapper"


def _name_of(dtype: Any) -> str:
    """What Triton's language calls one of its dtypes."""
    return next(name for name, one in vars(triton_modules()[1]).items() if one is dtype)


def _in_place(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: Sequence[int],
    memory: NDArray[np.uint8],
    initialised: bool,
) -> CheckedTensor:
    """Memory of torch as a tensor of the checker, with elements of this dtype."""
    type_ = TensorType(name, name_of_dtype(dtype), tuple(map(str, shape)))
    try:
        stored = np.dtype(type_.dtype)
    except TypeError:  # NumPy has none that is called so
        stored = np.dtype(f"u{dtype.itemsize}")
    return CheckedTensor(type_, np.empty(shape, stored), strides, "both", initialised, memory)


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    """Memory at an address. Not through torch, whose operations are watched."""
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _is_view(schema: Any) -> bool:
    """Whether an operation returns a view, or what it copies where it cannot."""
    infos = [one.alias_info for one in schema.returns]
    return any(info is not None and not info.is_write for info in infos)
