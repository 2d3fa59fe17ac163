"""Which argument a kernel's parameter stands for, by its name.

`x_ptr` (or `x`) is the tensor x and `z_ptr` the result; `N0` a size; `stride_x0`, `x_stride_0` and
the like the stride of an axis of x, in elements; a constexpr a block size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.spec import Array, Block, Operation, Sizes, TensorType

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
class Binding:
    """How the parameters of one kernel get their values from an operation.

    `tensors` and `strides` map parameters to tensors, and to tensors and axes; the rest are
    numbers: `given` by the caller, sizes, or block sizes. `proposed` names the numbers that neither
    the caller nor the kernel gave.
    """

    operation: Operation
    tensors: Mapping[str, str]
    strides: Mapping[str, tuple[str, int]]
    sizes: Mapping[str, str]
    numbers: Mapping[str, Block | float]
    proposed: frozenset[str] = frozenset()
    packed: Mapping[str, Packed] = field(default_factory=dict[str, Packed])

    @property
    def free_blocks(self) -> dict[str, int]:
        """The block sizes, by parameter, that might be others as well."""
        numbers = {name: self.numbers[name] for name in self.numbers if name in self.proposed}
        return {name: n for name, n in numbers.items() if isinstance(n, int) and n > 1}

    @property
    def takes_strides(self) -> tuple[str, ...]:
        """The tensors of which the kernel takes every stride."""
        types = {t.name: t for t in (*self.operation.inputs, self.operation.result)}
        given = set(self.strides.values())
        return tuple(
            name
            for name in self.tensors.values()
            if name in types
            and types[name].dims
            and all((name, a) in given for a in range(len(types[name].dims)))
        )

    @property
    def blocks(self) -> tuple[int, ...]:
        """The block sizes that are fixed numbers."""
        return tuple(n for n in self.numbers.values() if isinstance(n, int) and n > 1)

    def arguments(
        self, sizes: Sizes, strides: Mapping[str, Sequence[int]]
    ) -> dict[str, TensorArgument | Any]:
        """The arguments at these sizes, by parameter."""
        return {
            **{p: TensorArgument(name) for p, name in self.tensors.items()},
            **{p: strides[name][axis] for p, (name, axis) in self.strides.items()},
            **{p: sizes[name] for p, name in self.sizes.items()},
            **{p: n(sizes) if callable(n) else n for p, n in self.numbers.items()},
        }

    def numbers_at(self, sizes: Sizes) -> dict[str, Any]:
        """What a grid is made from: all sizes, and every parameter that is a number."""
        resolved = {p: n(sizes) if callable(n) else n for p, n in self.numbers.items()}
        return {**sizes, **{p: sizes[name] for p, name in self.sizes.items()}, **resolved}


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
    tensors: dict[str, str] = {}
    strides: dict[str, tuple[str, int]] = {}
    sizes: dict[str, str] = {}
    numbers: dict[str, Block | float] = {}
    proposed: set[str] = set()
    for parameter in parameters:
        name = parameter.name
        size = _size_named(name, operation)
        if name in packed:
            tensors[name] = name
        elif name in given:
            numbers[name] = given[name]
        elif name in operation.static:
            numbers[name] = operation.static[name]
        elif name in pointers:
            tensors[name] = pointers[name]
        elif (stride := _stride_named(name, operation)) is not None:
            strides[name] = stride
        elif size is not None:
            sizes[name] = size
        elif parameter.constant or parameter.default is not None:
            numbers[name] = operation.blocks.get(name, _or_default(parameter.default))
            if parameter.default is None:
                proposed.add(name)
        else:
            raise ValueError(_not_understood(name, operation, pointers))
    needed = output or operation.result.name
    if needed not in tensors.values():
        raise ValueError(
            f"no parameter of the kernel is the result; name it {needed}_ptr"
            f"{'' if output or needed == 'z' else ' or z_ptr'}, or pass output= with the input "
            "that the result replaces"
        )
    return Binding(operation, tensors, strides, sizes, numbers, frozenset(proposed), packed)


def _or_default(default: Any) -> Any:
    return _DEFAULT_BLOCK if default is None else default


def _pointer_names(operation: Operation, output: str | None) -> dict[str, str]:
    names = {t.name: t.name for t in operation.inputs}
    if output is None:
        result = operation.result.name
        names = {result: result, "z": result, "out": result, "output": result, **names}
    return {**{f"{name}_ptr": tensor for name, tensor in names.items()}, **names}


def _size_named(name: str, operation: Operation) -> str | None:
    if name in operation.names:
        return name
    alike = [size for size in operation.names if size.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def _stride_named(name: str, operation: Operation) -> tuple[str, int] | None:
    tensors: dict[str, TensorType] = {t.name: t for t in operation.inputs}
    tensors = {"z": operation.result, operation.result.name: operation.result, **tensors}
    for prefix, tensor in tensors.items():
        axes = {str(axis): axis for axis in range(len(tensor.dims))}
        axes |= {dim.lower(): axis for axis, dim in enumerate(tensor.dims)}
        either = rf"(?:stride_{prefix}|{prefix}_stride)_?(\w+)"
        found = re.fullmatch(either, name)
        if found and found[1].lower() in axes:
            return tensor.name, axes[found[1].lower()]
    return None


def _not_understood(name: str, operation: Operation, pointers: Mapping[str, str]) -> str:
    tensors = ", ".join(p for p in pointers if p.endswith("_ptr"))
    return (
        f"the parameter {name!r} is not understood; a tensor is one of {tensors}, a size one of "
        f"{', '.join(operation.names)}, a stride like stride_{operation.result.name}0, a block "
        f"size a constexpr; or give its value: check(..., {name}=...)"
    )
