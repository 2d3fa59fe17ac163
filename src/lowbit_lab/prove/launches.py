"""The bounds of a launch, and of a kernel for all sizes of its operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from lowbit.registry.extras import installed
from lowbit.spec import Operation, TensorType
from lowbit_lab.backends.kernel import KernelSubject
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.prove.ttir import NotProvedError, Text, text_of
from lowbit_lab.run.bind import TensorArgument
from lowbit_lab.run.outcome import cause_of
from lowbit_lab.run.tensor import CheckedTensor, storage_dtype, strides_of
from lowbit_lab.run.trace import Grid

if TYPE_CHECKING:
    from lowbit_lab.prove.bounds import Extent, Verdict

_SECONDS = 10.0
"""For one kernel."""
_MOST_ELEMENTS = 1 << 30
"""Of a tensor, where sizes are not known."""


def available() -> bool:
    """Whether what proves is installed."""
    return installed("z3")


def bounds_of_launch(
    kernel: TritonKernel, values: Mapping[str, Any], tensors: Sequence[CheckedTensor], grid: Grid
) -> dict[str, Verdict]:
    """Of each tensor, by its first parameter, whether any program of this launch leaves it. values:
    all arguments, a TensorArgument for each tensor."""
    from lowbit_lab.prove.bounds import Extent, Question

    named = {tensor.name: tensor for tensor in tensors}
    given = {name: one for name, one in values.items() if isinstance(one, TensorArgument)}
    extents, dtypes = dict[str, Extent](), dict[str, str]()
    for name, argument in given.items():
        tensor = named[argument.name]
        extents[name] = Extent(tensor.shape, tensor.strides, tensor.itemsize)
        dtypes[name] = argument.dtype or tensor.type.dtype
    try:
        for argument in given.values():
            _as_it_is(argument, named[argument.name].type.dtype)
        text = _text(kernel, values, dtypes)
    except NotProvedError as error:
        return _none(given, str(error))
    numbers = {name: one for name, one in values.items() if name not in given}
    return Question(text, numbers, extents, grid).answered(_SECONDS)


def bounds_of_sizes(subject: Any) -> dict[str, Verdict]:
    """Of each tensor, by its parameter, whether any program leaves it at any sizes that the
    operation allows, with contiguous tensors of less than 2^30 elements, and the kernel's constants
    as they are. Empty for what is no Triton kernel that is bound to an operation, and where the
    number of programs is known at one set of sizes only."""
    if not isinstance(subject, KernelSubject) or not isinstance(subject.kernel, TritonKernel):
        return {}
    binding, operation = subject.binding, subject.operation
    if not subject.any_sizes or binding.packed:
        return {}
    import z3

    from lowbit_lab.prove.bounds import Extent, Question
    from lowbit_lab.prove.numbers import Number, plain

    sizes: dict[str, Any] = {name: Number(z3.Int(name)) for name in operation.names}
    grid_of: Any = subject.request.variant.grid
    types = {one.name: one for one in (*operation.inputs, operation.result)}
    for name, one in binding.scratch.items():
        types[name] = TensorType(name, one.dtype, tuple(one.shape.split()))
    passed = {p: s for p, s in binding.sources.items() if isinstance(s, TensorArgument)}
    try:
        # A dimension is made of names, numbers and arithmetic alone.
        numbers = binding.numbers_at(sizes)
        shapes = {
            name: tuple(eval(dim, {"__builtins__": {}}, numbers) for dim in one.dims)
            for name, one in types.items()
        }
        strides = {name: strides_of(shape, "contiguous") for name, shape in shapes.items()}
        arguments = subject.kernel.decided(binding.arguments(sizes, strides))
        for one in passed.values():
            _as_it_is(one, types[one.name].dtype)
        grid = grid_of(numbers)
        for one in subject.kernel.parameters:
            if one.constant and isinstance(arguments[one.name], Number):
                raise NotProvedError(f"{one.name} is a constant of the kernel, and a size")
        dtypes = {name: types[one.name].dtype for name, one in passed.items()}
        placeholders = {k: 2 if isinstance(v, Number) else v for k, v in arguments.items()}
        text = _text(subject.kernel, placeholders, dtypes)
    except NotProvedError as error:
        return _none(passed, str(error))
    except Exception as error:  # somebody's own functions of sizes may raise anything
        return _none(passed, f"its grid or a block follows otherwise from the sizes ({error})")
    extents = {
        name: Extent(
            tuple(map(plain, shapes[one.name])), None, storage_dtype(dtypes[name]).itemsize
        )
        for name, one in passed.items()
    }
    several = grid if isinstance(grid, (tuple, list)) else [grid]
    question = Question(
        text,
        {name: plain(one) for name, one in arguments.items() if name not in passed},
        extents,
        [*map(plain, several), 1, 1][:3],
        {name: plain(one) for name, one in sizes.items()},
        _known(operation, extents.values()),
    )
    return question.answered(_SECONDS)


def _known(operation: Operation, extents: Iterable[Extent]) -> list[Any]:
    """What is known of sizes."""
    import z3

    known = list[Any]()
    for name in operation.names:
        size, most = z3.Int(name), operation.most(name)
        known += [size >= operation.least(name), size % operation.step(name) == 0]
        known += [] if most is None else [size <= most]
    for extent in extents:
        known.append(prod(extent.shape, start=z3.IntVal(1)) < _MOST_ELEMENTS)
    return known


def in_words(verdict: Verdict, what: str) -> str:
    """A verdict as a line of a report; what: of all programs, or sizes."""
    at = f" (at {verdict.place})" if verdict.place else ""
    known = "proved" if verdict.proved else f"not proved: {verdict.why}{at}"
    return f"in bounds for all {what}: {known}"


def _as_it_is(argument: TensorArgument, dtype: str) -> None:
    """NotProvedError: elements of another size are seen in a tensor, or what begins behind its
    first."""
    seen = dtype if argument.dtype is None else argument.dtype
    if argument.offset or storage_dtype(seen).itemsize != storage_dtype(dtype).itemsize:
        raise NotProvedError("it is passed as a tensor of elements of another size")


def _text(kernel: TritonKernel, values: Mapping[str, Any], dtypes: Mapping[str, str]) -> Text:
    try:
        return text_of(kernel, values, dtypes)
    except NotProvedError:
        raise
    except Exception as error:  # compilers raise many kinds
        said = (str(cause_of(error)).strip() or type(error).__name__).splitlines()[-1]
        raise NotProvedError(f"Triton's compiler does not take it: {said}") from error


def _none(names: Mapping[str, Any], why: str) -> dict[str, Verdict]:
    from lowbit_lab.prove.bounds import Verdict

    return {name: Verdict(False, why) for name in names}
