"""Operations that are Python functions: types in the annotations, the reference in the body.

    @operation(exercise={"N0": 4, "T": 200}, summed=("T",))
    def row_sum(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0"]:
        return x.sum(axis=1)

The annotations are jaxtyping's (https://docs.kidger.site/jaxtyping/api/array/). A dimension is a
name, a fixed size, or an expression of names such as `MID//8`. An input with `| None = None` may be
left out. What stands behind a `*` is a static parameter; a parameter that is annotated `int`, has
no default and is called as a size gets that size. The body is run in float64, or in int64 for
tensors of integers. Where the annotations are of torch.Tensor, it is given torch's tensors.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.registry import Registry
from lowbit.spec import post_ops
from lowbit.spec.data import CORNERS, FILLS, FURTHER
from lowbit.spec.dtypes import DTYPES, Array
from lowbit.spec.operation import TERM, Operation, TensorType
from lowbit.spec.rounding import Rounded

_FORM = 'in jaxtyping\'s form, for example Float32[np.ndarray, "N0 T"]'


def one_of(name: str, *dtypes: str) -> Any:
    """An annotation like Float32 that leaves the dtype open: all tensors with it have the same, one
    of these, the first unless something else is chosen."""
    from jaxtyping import AbstractDtype  # so that the language can be looked at without it

    return type(name, (AbstractDtype,), {"dtypes": list(dtypes)})


def operation(
    *, result: str = "z", registry: Registry[Operation] | None = None, **facts: Any
) -> Callable[[Callable[..., Array]], Operation]:
    """Make an Operation of an annotated function.

    result: what the result is called; registry: where it is made known by its name; facts: the
    fields of `lowbit.spec.operation.Operation` that have defaults.
    TypeError or ValueError, with what to write instead, if an annotation is not understood.
    """

    def make(function: Callable[..., Array]) -> Operation:
        made = from_function(function, result, **facts)
        if made.exercise:
            made.complete(made.exercise)
        return made if registry is None else registry.add(made.name, made)

    return make


def from_function(function: Callable[..., Array], result: str = "z", **facts: Any) -> Operation:
    """The Operation of a function, which needs nothing but its annotations."""
    name = getattr(function, "__name__", "operation")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations that are text may hold anything
        raise TypeError(f"{name}: its annotations cannot be read: {error}") from error
    parameters = inspect.signature(function).parameters
    bare = (n for n, p in parameters.items() if p.default is p.empty)
    sized = tuple(name for name in bare if hints.get(name) is int)
    static = {
        n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n not in sized
    }
    tensors = [n for n in parameters if n not in (*static, *sized)]
    missing = [n for n in (*tensors, "return") if n not in hints]
    if missing:
        raise TypeError(f"{name}: {missing[0]} has no annotation; write one {_FORM}")
    for parameter, default in static.items():
        if default is inspect.Parameter.empty:
            raise TypeError(f"{name}: the static parameter {parameter} needs a default")
    # Switches are tried both ways without being told so.
    tried: dict[str, tuple[Any, ...]]
    tried = {n: (on, not on) for n, on in static.items() if isinstance(on, bool)}
    choices: dict[str, tuple[str, ...]] = {}
    stated = [_tensor_type(n, hints[n], name, choices) for n in tensors]
    returned = typing.get_args(hints["return"]) if _is_tuple(hints["return"]) else ()
    results = [
        _tensor_type(f"{result}{i}" if returned else result, one, name, choices)
        for i, one in enumerate(returned or (hints["return"],))
    ]
    stated.append(results[0])
    if facts.get("post_ops"):
        if "budget" not in facts:
            raise TypeError(f"{name}: post_ops need a budget, which they carry on")
        stated[-1:-1] = _operands(stated[-1], choices)
        static["post_ops"], tried["post_ops"] = None, post_ops.TRIED
    made = Operation(
        name=name,
        doc=inspect.getdoc(function) or "",
        reference=_by_torch(function) if _of_torch(hints["return"]) else function,
        stated=tuple(stated),
        choices=choices,
        dtypes={variable: dtypes[0] for variable, dtypes in choices.items()},
        static=static,
        sized=sized,
        **{**facts, "tried": {**tried, **facts.get("tried", {})}},
    )
    _refuse_unfitting(made)
    return _each_result(made, results) if returned else made


def _is_tuple(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def _each_result(made: Operation, results: Sequence[TensorType]) -> Operation:
    """The operation of the first of several results, which has those of the others."""
    first, *others = (
        replace(
            made,
            reference=_picked(made.reference, i),
            stated=(*made.stated[:-1], one),
            part=i,
            beside=tuple(other for other in results if other is not one),
        )
        for i, one in enumerate(results)
    )
    return replace(first, others=tuple(others))


def _picked(function: Callable[..., Any], part: int) -> Callable[..., Array]:
    """A function that returns one of several results."""

    @functools.wraps(function)
    def reference(*arguments: Any, **named: Any) -> Array:
        return function(*arguments, **named)[part]

    return reference


def _refuse_unfitting(made: Operation) -> None:
    """ValueError if facts speak of sizes, inputs or kinds of data that there are not."""
    named = {name: made.tensor(name) for name in (one.name for one in made.inputs)}
    for size in made.sized:
        if size not in made.names:
            raise ValueError(
                f"{made.name}: {size} is annotated int, so it is a size, and the annotations have "
                f"{', '.join(made.names) or 'none'}; name one of these, or give it a default"
            )
    for name, bounds in made.ranges.items():
        if name not in named or named[name].is_float:
            whole = ", ".join(n for n, one in named.items() if not one.is_float)
            raise ValueError(
                f"{made.name}: ranges are of inputs of integers ({whole or 'there are none'}), and "
                f"{name!r} is none; draws= makes data for others"
            )
        for bound in bounds:
            words = [term for term in TERM.findall(str(bound)) if term.isidentifier()]
            unknown = [term for term in words if term not in (*made.names, *made.static)]
            if unknown or TERM.sub("", str(bound)).strip():
                raise ValueError(
                    f"{made.name}: the bound {bound!r} of {name} is not understood; write a number "
                    f"or an expression of the sizes {', '.join(made.names)}"
                )
    _refuse_least(made)
    known = [one for one in (*FILLS, *FURTHER, *CORNERS) if one != "normal"]
    for fill in made.excludes:
        if fill not in known:
            raise ValueError(
                f"{made.name}: excludes names {fill!r}, which is no kind of data; there are "
                f"{', '.join(known)}"
            )


def _refuse_least(made: Operation) -> None:
    """ValueError if at_least speaks of what is no size, or leaves none."""
    for name, least in made.at_least.items():
        if name not in made.names:
            raise ValueError(
                f"{made.name}: at_least names {name!r}, which is no size; there are "
                f"{', '.join(made.names) or 'none'}"
            )
        if made.fitted({name: least})[name] < least or least < 0:
            raise ValueError(
                f"{made.name}: at_least is {least} for {name}, and there is no such size; at_most "
                f"is {made.most(name)}, multiple_of {made.step(name)}"
            )


def _of_torch(annotation: Any) -> bool:
    """Whether an annotation is of torch's tensors. (torch is not imported to know.)"""
    annotation = typing.get_args(annotation)[0] if _is_tuple(annotation) else annotation
    return getattr(annotation, "array_type", type).__module__.partition(".")[0] == "torch"


def _by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's tensors as one of arrays."""

    @functools.wraps(function)
    def reference(*arguments: Any, **named: Any) -> Any:
        import torch

        def tensor(value: Any) -> Any:
            if isinstance(value, Rounded):
                return torch.tensor(np.asarray(value), dtype=torch.float32)
            return torch.tensor(value) if isinstance(value, np.ndarray | np.generic) else value

        given = {name: tensor(value) for name, value in named.items()}
        made = function(*map(tensor, arguments), **given)
        return tuple(one.numpy() for one in made) if isinstance(made, tuple) else made.numpy()

    return reference


def _operands(result: TensorType, choices: Mapping[str, tuple[str, ...]]) -> list[TensorType]:
    """What post-operations take: two operands and, where the result may be of 8 bits, its scale and
    zero point."""
    operands = [
        TensorType("bias", "float32", result.dims[-1:], optional=True),
        TensorType("residual", "float32", result.dims, optional=True),
    ]
    if "uint8" in choices.get(result.variable, ()):
        operands.append(TensorType("out_scale", "float32", (), optional=True))
        operands.append(TensorType("out_zero_point", "int32", (), optional=True))
    return operands


def _tensor_type(
    name: str, annotation: Any, function: str, choices: dict[str, tuple[str, ...]]
) -> TensorType:
    """What an annotation says; if it leaves the dtype open, `choices` gets to know of what."""
    optional = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    if optional:
        kept = [one for one in typing.get_args(annotation) if one is not types.NoneType]
        annotation = kept[0] if len(kept) == 1 else annotation
    dtypes, text = getattr(annotation, "dtypes", None), getattr(annotation, "dim_str", None)
    if dtypes is None or text is None:
        raise TypeError(f"{function}: the annotation of {name} is {annotation!r}; write it {_FORM}")
    # jaxtyping's Bool is NumPy's of both names.
    dtypes = [dtype for dtype in dtypes if dtype != "bool_"]
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes:
        raise TypeError(
            f"{function}: {name} has the dtypes {', '.join(map(str, dtypes))}; give one of "
            f"{', '.join(DTYPES)}, as in Float32, or say which with lowbit.spec.one_of"
        )
    dims = tuple(text.split())
    for dim in dims:
        if TERM.sub("", dim) or not _is_expression(dim):
            raise ValueError(
                f"{function}: the dimension {dim!r} of {name} is not understood; write a name, a "
                "number, or a sum, product or // of these"
            )
    variable = annotation.dtype.__name__ if len(dtypes) > 1 else ""
    if variable:
        choices[variable] = tuple(dtypes)
    return TensorType(name, dtypes[0], dims, variable, optional)


def _is_expression(dim: str) -> bool:
    try:
        compile(dim, "", "eval")
    except SyntaxError:
        return False
    return dim[0].isalnum() or dim[0] in "_("
