"""Which argument a kernel's parameter stands for, by its name.

`x_ptr` (or `x`) is the tensor x and `z_ptr` the result; `N0` a size; `stride_x0`, `x_stride_0` and
the like the stride of an axis of x, in elements; a constexpr a block size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from lowbit.spec import DTYPES, Array, Block, Operation, Sizes, TensorType
from lowbit.spec.operation import TERM, evaluate
from lowbit_lab.run.tensor import CheckedTensor, tensor_of

_DEFAULT_BLOCK = 32


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: whether it is fixed at compile time, and its default if any."""

    name: str
    constant: bool = False
    default: Any = None


@dataclass(frozen=True)
class TensorArgument:
    """Stands for a tensor among the arguments; or for a view of it, of another dtype perhaps, that
    starts so many bytes after its first element."""

    name: str
    offset: int = 0
    dtype: str | None = None


@dataclass(frozen=True)
class Packed:
    """Given for a parameter that stands for an input in a layout of its own: the input's name, and
    what lays its elements out."""

    name: str
    pack: Callable[[Array], Array]


@dataclass(frozen=True)
class Scratch:
    """Given for a parameter that is memory of the kernel's own: partial sums, locks.

    dtype: its name. shape: dimensions, as text ("N 2*B"): numbers, or expressions of sizes and of
    parameters that are numbers. initial: what the caller fills it with; if None it is poison, and
    to read an element before it is written is an error. ValueError for another dtype or shape.
    """

    dtype: str
    shape: str
    initial: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"no dtype {self.dtype!r}; there are {', '.join(DTYPES)}")
        if any(TERM.sub("", dim) for dim in self.shape.split()):
            raise ValueError(
                f"the shape {self.shape!r} is not understood; write numbers, sizes and parameters, "
                'and sums, products or // of these: "N 2*B"'
            )

    def type_at(self, name: str, numbers: Mapping[str, Any]) -> TensorType:
        """What it is where names are these numbers. ValueError if its shape has an unknown name."""
        try:
            shape = [evaluate(dim, numbers) for dim in self.shape.split()]
        except NameError as error:
            known = ", ".join(numbers)
            raise ValueError(f"the shape of {name}: {error}; there are {known}") from None
        return TensorType(name, self.dtype, tuple(map(str, shape)))

    def tensor(self, name: str, numbers: Mapping[str, Any]) -> CheckedTensor:
        """Fresh memory of this kind. ValueError if its shape has an unknown name."""
        type_ = self.type_at(name, numbers)
        filled = np.full(type_.shape({}), self.initial or 0, DTYPES[self.dtype].storage)
        return tensor_of(type_, filled, "contiguous", "output", self.initial is not None)


class Stride(NamedTuple):
    """Stands for the stride of one axis of a tensor, in elements."""

    name: str
    axis: int


@dataclass(frozen=True)
class Binding:
    """How the parameters of one kernel get their values from an operation.

    sources: for each parameter, in their order, a TensorArgument, a Stride, a function of the
    sizes, or the value itself. proposed: the block sizes that neither caller nor kernel gave.
    packed, scratch: by parameter, what was given for a tensor.
    """

    operation: Operation
    sources: Mapping[str, Any]
    proposed: frozenset[str] = frozenset()
    packed: Mapping[str, Packed] = field(default_factory=dict[str, Packed])
    scratch: Mapping[str, Scratch] = field(default_factory=dict[str, Scratch])

    @property
    def blocks(self) -> dict[str, int]:
        """The block sizes that are fixed numbers, by parameter."""
        return {p: n for p, n in self.sources.items() if isinstance(n, int) and n > 1}

    @property
    def free_blocks(self) -> dict[str, int]:
        """The block sizes, by parameter, that might be others as well."""
        return {p: n for p, n in self.blocks.items() if p in self.proposed}

    @property
    def strides_taken(self) -> dict[str, set[int]]:
        """For each tensor that the kernel takes strides of, the axes that they belong to."""
        taken: dict[str, set[int]] = {}
        for source in self.sources.values():
            if isinstance(source, Stride):
                taken.setdefault(source.name, set()).add(source.axis)
        passed = {s.name for s in self.sources.values() if isinstance(s, TensorArgument)}
        return {name: axes for name, axes in taken.items() if name in passed - set(self.scratch)}

    def arguments(
        self, sizes: Sizes, strides: Mapping[str, Sequence[int]]
    ) -> dict[str, TensorArgument | Any]:
        """The arguments at these sizes, by parameter."""

        def value(source: Any) -> Any:
            if isinstance(source, Stride):
                return strides[source.name][source.axis]
            return source(sizes) if is_of_sizes(source) else source

        return {name: value(source) for name, source in self.sources.items()}

    def scratch_at(self, sizes: Sizes) -> list[TensorType]:
        """What scratch is at these sizes."""
        numbers = self.numbers_at(sizes) if self.scratch else {}
        return [one.type_at(name, numbers) for name, one in self.scratch.items()]

    def numbers_at(self, sizes: Sizes) -> dict[str, Any]:
        """What a grid is made from: all sizes, and every parameter that is a number."""
        numbers = {
            name: source
            for name, source in self.sources.items()
            if not isinstance(source, (TensorArgument, Stride))
        }
        return {**sizes, **replace(self, sources=numbers).arguments(sizes, {})}


def is_of_sizes(value: Any) -> bool:
    """Whether a value that is given is a function of the sizes, and none that a kernel calls: one
    under triton.jit, or of Triton's language."""
    of_kernels = hasattr(value, "fn") or getattr(value, "__triton_builtin__", False)
    return callable(value) and not of_kernels


def bind(
    parameters: Sequence[Parameter],
    operation: Operation,
    given: Mapping[str, Any],
    output: str | None,
) -> Binding:
    """Find what each parameter stands for. `output` names the tensor that holds the result, if
    that is an input.

    ValueError, with the names that would be understood, for a parameter that stands for nothing,
    for a value given to no parameter, and if no parameter is the result.
    """
    unknown = set(given) - {p.name for p in parameters}
    if unknown:
        raise ValueError(
            f"the kernel has no parameter {sorted(unknown)[0]!r}; it has "
            f"{', '.join(p.name for p in parameters)}"
        )
    pointers = _pointer_names(operation, output)
    packed = {name: one for name, one in given.items() if isinstance(one, Packed)}
    scratch = {name: one for name, one in given.items() if isinstance(one, Scratch)}
    if operation.beside:
        named = _results_named(parameters, operation, given)
        mine = next(name for name, one in named.items() if one == operation.result)
        beside = tuple(replace(one, name=name) for name, one in named.items() if name != mine)
        operation = replace(operation, beside=beside)
        pointers |= {one.name: TensorArgument(one.name) for one in beside}
        pointers[mine] = TensorArgument(operation.result.name)
        scratch |= {one.name: Scratch(one.dtype, " ".join(one.dims)) for one in beside}
    own = {name: TensorArgument(name) for name in (*packed, *scratch)}
    known = {**pointers, **operation.static, **given, **own}
    if output is None and (other := _other_name(parameters, operation, pointers, known)):
        known[other] = pointers[other] = TensorArgument(operation.result.name)
    sources: dict[str, Any] = {}
    proposed: set[str] = set()
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        found = _found(name, operation, pointers)
        if name in known:
            sources[name] = known[name]
        elif found is not None:
            sources[name] = found
        elif parameter.constant or default is not None:
            usual = _DEFAULT_BLOCK if default is None else default
            sources[name] = operation.blocks.get(name, usual)
            if default is None:
                proposed.add(name)
        else:
            raise ValueError(_not_understood(name, operation, pointers))
    needed = output or operation.result.name
    if not any(isinstance(s, TensorArgument) and s.name == needed for s in sources.values()):
        raise ValueError(
            f"no parameter of the kernel is the result; name it {needed}_ptr"
            f"{'' if output or needed == 'z' else ' or z_ptr'}, or pass output= with the input "
            "that the result replaces"
        )
    return Binding(operation, sources, frozenset(proposed), packed, scratch)


def _results_named(
    parameters: Sequence[Parameter], operation: Operation, known: Collection[str]
) -> dict[str, TensorType]:
    """Which parameter each of several results is: by its name, z0_ptr; or where no names say so,
    the pointers that nothing else is meant by, in order. ValueError if there are not as many."""
    inputs = {t.name for t in operation.inputs}
    results = [*operation.beside]
    results.insert(operation.part or 0, operation.result)
    by_name = {p.name: one for p in parameters for one in results
               if p.name.removesuffix("_ptr") == one.name}  # fmt: skip
    if len(by_name) == len(results):
        return by_name
    rest = [p.name for p in parameters if p.name.endswith("_ptr") and p.name not in known
            and p.name.removesuffix("_ptr") not in inputs]  # fmt: skip
    if len(rest) != len(results):
        names = ", ".join(f"{one.name}_ptr" for one in results)
        raise ValueError(f"{operation} returns {len(results)} tensors; name the parameters {names}")
    return dict(zip(rest, results, strict=True))


def _pointer_names(operation: Operation, output: str | None) -> dict[str, TensorArgument]:
    names = {t.name: t.name for t in operation.inputs}
    if output is None:
        result = operation.result.name
        names = {result: result, "z": result, "out": result, "output": result, **names}
    names = {**{f"{name}_ptr": tensor for name, tensor in names.items()}, **names}
    return {name: TensorArgument(tensor) for name, tensor in names.items()}


def _other_name(
    parameters: Sequence[Parameter],
    operation: Operation,
    pointers: Mapping[str, TensorArgument],
    known: Mapping[str, Any],
) -> str | None:
    """The parameter that is the result by being the one that nothing else is meant by, if there is
    just one, whatever it is called: c_ptr, whose strides are stride_cm or stride_c0."""
    result = TensorArgument(operation.result.name)
    if any(pointers.get(p.name) == result for p in parameters):
        return None
    unclear = [p.name for p in parameters
               if not p.constant and p.default is None and p.name not in known]  # fmt: skip

    def rest(other: str) -> list[str]:
        named = {**pointers, other: result}
        return [name for name in unclear if not _found(name, operation, named)]

    fitting = [name for name in unclear if rest(name) == [name]]
    return fitting[0] if len(fitting) == 1 else None


def _found(
    name: str, operation: Operation, pointers: Mapping[str, TensorArgument]
) -> Stride | Block | None:
    """The stride or the size that a parameter stands for."""
    return _stride_named(name, operation, pointers) or _size_named(name, operation)


def _size_named(name: str, operation: Operation) -> Block | None:
    alike = [size for size in operation.names if size.lower() == name.lower()]
    if name in operation.names:
        alike = [name]
    return itemgetter(alike[0]) if len(alike) == 1 else None


def _stride_named(
    name: str, operation: Operation, pointers: Mapping[str, TensorArgument]
) -> Stride | None:
    types = {t.name: t for t in (*operation.inputs, *operation.beside, operation.result)}
    for pointer, argument in pointers.items():
        prefix, tensor = re.escape(pointer.removesuffix("_ptr")), types[argument.name]
        axes = {str(axis): axis for axis in range(len(tensor.dims))}
        axes |= {dim.lower(): axis for axis, dim in enumerate(tensor.dims)}
        either = rf"(?:stride_{prefix}|{prefix}_stride)_?(\w+)"
        found = re.fullmatch(either, name)
        if found and found[1].lower() in axes:
            return Stride(tensor.name, axes[found[1].lower()])
    return None


def _not_understood(name: str, operation: Operation, pointers: Iterable[str]) -> str:
    tensors = ", ".join(p for p in pointers if p.endswith("_ptr"))
    return (
        f"the parameter {name!r} is not understood; a tensor is one of {tensors}, a size one of "
        f"{', '.join(operation.names)}, a stride like stride_{operation.result.name}0, a block "
        f"size a constexpr; or give its value: check(..., {name}=...), lab.Scratch(...) if it is "
        "memory of the kernel's own"
    )
