"""What builds a graph from an exported program, node by node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lowbit.graph.graph import OPERATORS, Attribute, Constant, Expression, Graph, Node
from lowbit.graph.graph import Tensor as Fact
from lowbit.graph.writer import Writer
from lowbit.registry import Registry

SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_EXPRESSIONS = {
    "cleandiv": "floordiv", "inttruediv": "div", "floattruediv": "div", "pythonmod": "mod",
    "powbynatural": "pow", "floatpow": "pow", "trunctoint": "trunc", "equality": "eq",
    "unequality": "ne", "strictlessthan": "lt", "lessthan": "le", "strictgreaterthan": "gt",
    "greaterthan": "ge", "tofloat": "add",
}  # fmt: skip
"""Operators of sizes (`graph.OPERATORS`) by torch.export's classes, where names differ."""
_OF_SIZES = {
    "add": Writer.add, "mul": Writer.mul, "floordiv": Writer.div, "div": Writer.div,
    "pow": Writer.power, "mod": Writer.mod,
}  # fmt: skip
"""Operators of the graph by the same names; Div rounds integers towards 0."""

Value = str
"""A value of the graph, by name; "" is an input that is left out."""

Converter = Callable[..., Any]

converters: Registry[Converter] = Registry(
    "ATen operator that can be translated", "lowbit.torch.capture.operators"
)
"""By name, "aten::relu". Each is given a Builder and the operator's arguments by the names of its
schema (`self` is `x`): values by name, and numbers. It gives the name of the value it makes, or a
tuple of them."""


def converter(*names: str) -> Callable[[Converter], Converter]:
    """The decorator: says which operators a function translates; of ATen, if nothing is said."""

    def add(function: Converter) -> Converter:
        for name in names:
            converters.add(name if "::" in name else f"aten::{name}", function)
        return function

    return add


class FixedSize(NotImplementedError):
    """A size that a run should choose has to be that of the example."""


class Builder(Writer):
    """Nodes, constants and facts, as they come together.

    While a node of the program is translated, `node` is it, and `out` a fake tensor of its result.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {}
        self.inputs: dict[str, Fact] = {}
        self.values: dict[fx.Node, Any] = {}  # a Value, or a tuple of them
        self.known: dict[fx.Node, Tensor] = {}  # what does not depend on the inputs
        self.targets: dict[fx.Node, str] = {}  # of parameters: how the model calls them
        self.fakes: dict[Value, Any] = {}
        self.sources: dict[Any, tuple[Value, int]] = {}  # of a symbol: an input and its axis
        self.names: dict[Any, str] = {}  # of a symbol: how the size is called
        self.ranges: dict[str, tuple[int, int | None]] = {}  # of a size, by name
        self.derived: dict[Any, str] = {}  # of sizes of inputs that follow from others: their names
        self.conditions: set[Expression] = set()  # of sizes
        self._taken: set[str] = set()
        self._by_memory: dict[Any, Value] = {}
        self.node: fx.Node

    @property
    def out(self) -> Any:
        return self.node.meta["val"]

    @property
    def operator(self) -> str:
        """The name of the operator that is translated, "relu"."""
        return self.node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]

    def shape(self, value: Value) -> Sequence[Any]:
        """The sizes of an argument: numbers and torch.SymInt."""
        return self.fakes[value].shape

    def dtype(self, value: Value) -> torch.dtype:
        return self.fakes[value].dtype

    def unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._taken:
            name, count = f"{wanted}.{count}", count + 1
        self._taken.add(name)
        return name

    def op(self, op: str, *inputs: Value, **attributes: Attribute) -> Value:
        if any(isinstance(one, SYMBOLS) for one in pytree.tree_leaves(attributes)):
            raise FixedSize(f"{op} {self.node.name!r} has a size of the inputs as an attribute")
        output = self.unique(f"{self.node.name}.{op.lower()}")
        self.nodes.append(Node(op, inputs, (output,), attributes, self._layer()))
        return output

    def _layer(self) -> str:
        """The name of the module that the node is part of; where that has several weights, with
        the name of the one that the node reads."""
        stack: Mapping[str, tuple[str, Any]] = self.node.meta.get("nn_module_stack") or {}
        module = [name for name, _ in stack.values()][-1] if stack else ""
        second = self.node.args[1] if len(self.node.args) > 1 else None
        weight = self.targets.get(second, "") if isinstance(second, fx.Node) else ""
        own = weight.removesuffix("weight").rstrip("._")
        return own if module and own.startswith(f"{module}.") else module

    def split(self, x: Value, lengths: Sequence[int], axis: int) -> tuple[Value, ...]:
        """Consecutive parts of x."""
        outputs = tuple(self.unique(f"{self.node.name}.part") for _ in lengths)
        inputs = x, self.ints(lengths)
        self.nodes.append(Node("Split", inputs, outputs, {"axis": axis}, self._layer()))
        return outputs

    def constant(self, value: Constant, wanted: str = "") -> Value:
        name = self.unique(wanted or f"{self.node.name}.constant")
        self.constants[name] = value
        return name

    def number(self, number: float, dtype: torch.dtype) -> Value:
        """A constant of no axes, which wraps to an integer dtype as PyTorch's numbers do, or what
        becomes of sizes in a run."""
        if not isinstance(number, SYMBOLS):
            return self.constant(np.array(number).astype(numpy_name(dtype)))
        if isinstance(number, torch.SymInt):
            made = self.ints([number], scalar=True)
            own = torch.int64
        else:
            made = self.squeeze(self._real(number.node.expr), [0])
            own = torch.float32
        return made if dtype is own else self.cast(made, numpy_name(dtype))

    def _real(self, expression: Any) -> Value:
        """What follows from sizes of the inputs, float32 [1]."""
        if expression.is_number:
            return self.constant(np.array([float(expression)], np.float32))
        if expression in self.sources:
            return self.cast(self._size(expression), "float32")
        name = _operator(expression)
        if type(expression).__name__ == "OpaqueUnaryFn_sqrt":
            return self.sqrt(self._real(*expression.args))
        if name not in _OF_SIZES:
            raise FixedSize(f"{expression} follows from sizes in a way that has no operator")
        made = reduce(partial(_OF_SIZES[name], self), map(self._real, expression.args))
        return self.floor(made) if name == "floordiv" else made

    def parameter(self, tensor: Tensor, wanted: str = "") -> Value:
        """The constant of a tensor: one for all that are the same memory."""
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or same not in self._by_memory:
            array = np.array(tensor.detach().cpu().numpy(), order="C")  # a copy
            self._by_memory[same] = self.constant(array, wanted)
        return self._by_memory[same]

    def ints(self, numbers: Sequence[Any], scalar: bool = False) -> Value:
        """The int64 vector of some sizes, or the first as a scalar; a constant if all are known."""
        if any(isinstance(size, float | torch.SymFloat) for size in numbers):
            raise FixedSize(f"{numbers} are no integers")
        if not any(isinstance(size, torch.SymInt) for size in numbers):
            array = np.array(numbers, np.int64)
            return self.constant(np.asarray(array[0]) if scalar else array)
        parts = [
            self._size(size.node.expr) if isinstance(size, torch.SymInt) else self.ints([size])
            for size in numbers
        ]
        vector = self.concat(parts, 0)
        return self.squeeze(vector, [0]) if scalar else vector

    def _size(self, expression: Any) -> Value:
        """A size that follows from those of the inputs, int64 [1]."""
        if expression.is_Integer:
            return self.ints([int(expression)])
        if expression in self.sources:
            value, axis = self.sources[expression]
            return self.op("Shape", value, start=axis, end=axis + 1)
        name = _operator(expression)
        if name not in _OF_SIZES.keys() - {"div", "pow"}:
            raise FixedSize(f"the size {expression} follows from others in a way without operator")
        first, *rest = (self._size(one) for one in expression.args)
        for other in rest:
            if name == "floordiv" and any(one.is_negative for one in expression.args[0].atoms()):
                first = self.sub(first, self.mod(first, other))
            first = _OF_SIZES[name](self, first, other)
        return first

    def to(self, value: Value, dtype: torch.dtype) -> Value:
        """The value as numbers of another dtype."""
        if self.dtype(value) is dtype:
            return value
        return self.cast(value, numpy_name(dtype))

    def in_shape(self, x: Value, before: Sequence[Any], after: Sequence[Any]) -> Value:
        """x in another shape, of which at most one size need follow from the others."""
        wanted: list[Any] = []
        for axis, size in enumerate(after):
            if not isinstance(size, torch.SymInt):
                wanted.append(int(size))
            elif axis < len(before) and same_size(before[axis], size):
                wanted.append(0)
            else:
                wanted.append(-1)
        return self.reshape(x, after if wanted.count(-1) > 1 else wanted)

    def argument(self, given: Any) -> Any:
        """An argument of a node: a value by name, a number, or a tuple of such."""
        if isinstance(given, list | tuple):
            return tuple(self.argument(one) for one in given)
        if not isinstance(given, fx.Node):
            return given
        if given in self.known:
            tensor = self.known[given]
            name = self.parameter(tensor, self.targets.get(given, given.name))
            self.fakes[name] = tensor
            return name
        if given in self.values:
            return self.values[given]
        return given.meta["val"]  # of what computes with sizes only

    def translate(self, node: fx.Node, function: Converter) -> None:
        """Add what a call of an operator is."""
        self.node, first = node, len(self.nodes)
        schema: Any = node.target._schema  # type: ignore[union-attr]
        arguments = {
            "x" if one.name == "self" else one.name: self.argument(
                node.args[index] if index < len(node.args) else node.kwargs.get(one.name, default)
            )
            for index, one in enumerate(schema.arguments)
            for default in [one.default_value]
        }
        fakes = pytree.tree_leaves(node.meta["val"])
        if arguments.get("dim") is not None:
            arguments = {key: self._of_an_axis(given) for key, given in arguments.items()}
        made: Any = function(self, **arguments)
        one = not isinstance(made, tuple)
        if arguments.get("dim") is not None and any(not fake.shape for fake in fakes):
            every = zip((made,) if one else made, fakes, strict=False)
            flat = [x if fake.shape else self.in_shape(x, (), ()) for x, fake in every]
            made = flat[0] if one else tuple(flat)
        outputs = {value: n for n, value in enumerate((made,) if one else made)}
        renamed: dict[str, str] = {}
        for index in range(first, len(self.nodes)):
            made_here = self.nodes[index]
            for value in made_here.outputs:
                if value in outputs:
                    wanted = node.name if one else f"{node.name}.{outputs[value]}"
                    renamed[value] = self.unique(wanted)
            self.nodes[index] = made_here.replaced(
                inputs=tuple(renamed.get(value, value) for value in made_here.inputs),
                outputs=tuple(renamed.get(value, value) for value in made_here.outputs),
            )
        values = tuple(renamed.get(value, value) for value in outputs)
        fakes = (node.meta["val"],) if one else node.meta["val"]
        self.fakes.update(
            {value: fake for value, fake in zip(values, fakes, strict=False) if value}
        )
        self.values[node] = values[0] if one else values

    def _of_an_axis(self, given: Any) -> Any:
        """An argument beside an axis's number, which tensors without axes have, too: with one."""
        if not isinstance(given, str) or given not in self.fakes or self.shape(given):
            return given
        made = self.reshape(given, [1])
        self.fakes[made] = self.fakes[given].reshape(1)
        return made

    def graph(self, outputs: Sequence[Value], name: str) -> Graph:
        made = Graph(
            tuple(self.inputs), tuple(outputs), tuple(self.nodes), self.constants, self.inputs,
            name, self.ranges, tuple(sorted(self.conditions, key=str)),
        )  # fmt: skip
        return made.replaced()

    def check_sizes(self) -> None:
        """FixedSize: export or translating has made a number of what follows from a size."""
        environment: Any = None
        for name, fact in self.inputs.items():
            for size, wanted in zip(self.fakes[name].shape, fact.shape, strict=True):
                if not isinstance(wanted, str):
                    continue
                if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
                    raise FixedSize(f"the size {wanted} of {name!r} is needed as a number")
                environment = size.node.shape_env
        for expression, name in self.derived.items():
            self.conditions.add(("eq", name, self._condition(expression)))
        for guard in filter(_chooses, environment.guards if environment else ()):
            holds = environment.replace(guard.expr)  # symbols found equal are one
            if not holds.is_Boolean or holds.args:
                self.conditions.add(self._condition(holds))

    def not_one(self, size: Any) -> None:
        """The program is right only where a size, if a run chooses it, is not 1."""
        if isinstance(size, torch.SymInt):
            self.conditions.add(("ne", self._condition(size.node.expr), 1))

    def _condition(self, expression: Any) -> Expression:
        """What must hold of sizes. FixedSize: it cannot be written down."""
        if expression.is_Number:
            return int(expression) if expression.is_Integer else float(expression)
        if expression in self.names:
            return self.names[expression]
        name = _operator(expression)
        if name not in OPERATORS:
            raise FixedSize(f"the program is right only where {expression}")
        return (name, *map(self._condition, expression.args))

    def fact(self, fake: Any, name: str) -> Fact:
        """What the input of the program that is called so is. A size that follows from others has
        a name of its own, and a condition."""
        shape: list[int | str] = []
        for axis, size in enumerate(fake.shape):
            if not isinstance(size, torch.SymInt):
                shape.append(int(size))
            elif size.node.expr in self.names:
                shape.append(self.names[size.node.expr])
            else:
                shape.append(self.derived.setdefault(size.node.expr, f"{name}_{axis}"))
        return Fact(numpy_name(fake.dtype), tuple(shape))


def _chooses(guard: Any) -> bool:
    """Whether what torch.export found to hold, for the example, of sizes may decide what the
    program computes. Most of it decides how PyTorch's tensors lie in memory, or is for ranges."""
    expression, where = guard.expr, getattr(guard.sloc, "framework_loc", None)
    name, operands = _operator(expression), expression.args
    bare = any(one.is_Symbol for one in operands) and any(one.is_number for one in operands)
    if bare and name != "ne":
        return False
    if where is None or any(one.is_Float for one in operands):
        return True
    file = where.filename
    outside = not file.startswith(_TORCH)
    if outside or file.endswith("decompositions.py") or where.name == "infer_size":
        return True
    remainder = any(_operator(one) == "mod" for one in operands)
    return file.endswith("_ops.py") and remainder and name not in ("and", "or", "ne")


def _operator(expression: Any) -> str:
    """What an expression of torch.export's is, as `graph.OPERATORS` calls it."""
    name = type(expression).__name__.lower()
    return _EXPRESSIONS.get(name, name)


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are the same for all inputs."""
    both = isinstance(one, torch.SymInt), isinstance(other, torch.SymInt)
    return one.node.expr == other.node.expr if all(both) else not any(both) and one == other


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """The same of shapes. `==` of sizes would make what it says a condition."""
    return len(one) == len(other) and all(map(same_size, one, other))


def numpy_name(dtype: torch.dtype) -> str:
    """NumPy's name of a dtype. NotImplementedError for floats that are not float32."""
    if dtype in (torch.float64, torch.float16, torch.bfloat16) or dtype.is_complex:
        raise NotImplementedError(f"{dtype} has no kernels here: convert the model by .float()")
    return str(dtype).removeprefix("torch.")
