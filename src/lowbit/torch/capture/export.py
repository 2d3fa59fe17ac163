"""From a model and an example of its inputs to a graph."""

from __future__ import annotations

import inspect
import logging
import operator as python
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._decomp import global_decomposition_table
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from lowbit.graph.graph import Graph, fulfilled
from lowbit.torch.capture.attention import plain_attention
from lowbit.torch.capture.builder import SYMBOLS, Builder, FixedSize, converters
from lowbit.torch.capture.mode import evaluating, ordinary, without_inference_tensors

_log = logging.getLogger(__name__)
_NOT_SAID = ("Traceback ", "def forward(", "class GraphModule", "graph():", "While executing")
"""What a line begins with from which on an error of torch.export explains no more."""
_LEAST = 2  # of a size that is free, to torch.export
_CHECKS = frozenset(
    {
        "aten::sym_size",
        "aten::_assert_tensor_metadata",
        "aten::_assert_scalar",
        "aten::_assert_async",
    }
)
"""Calls that compute nothing. Conditions of sizes are kept, those of data are not."""


@dataclass(frozen=True)
class Captured:
    """A graph, and how a call of the model it was made from is one of it.

    - signature: of the model's forward. arguments: how those of the example were nested.
    - inputs: for each leaf of the arguments, the name of the graph's input; "" where it is no
      tensor. leaves: the example's, None in place of tensors.
    - outputs: the leaves of the result: names of values, or what is no tensor. spec: the nesting.
    """

    graph: Graph
    signature: inspect.Signature
    arguments: pytree.TreeSpec
    inputs: tuple[str, ...]
    leaves: tuple[Any, ...]
    outputs: tuple[Any, ...]
    results: Any


def to_graph(
    model: nn.Module, example: Any, *, batch: bool = True, dynamic_shapes: Any = None
) -> Graph:
    """The model as a graph of float32 operators, as it computes in eval mode.

    - example: a tensor, a tuple of positional arguments, or a dict of keywords.
    - batch: whether the first size of every input that is as large as that of the first can be any
      number, if the model computes with any. It is named "batch".
    - dynamic_shapes: which sizes can be any number, in place of `batch`: True for all that the
      model allows, or what torch.export takes by this name. Where the example has a size of 1, it
      stays 1, but, with True, for the first size of inputs. Where not all can be free that the
      model allows, the batch alone is, and a warning in the log says why.

    All other sizes stay as the example has them.

    Parameters and buffers are copied. Layers whose weights lowbit has quantized stay so.
    TypeError for what is not a module, or is compiled already; NotImplementedError for a model that
    chooses by its data which layers run, keeps state between calls, is not of float32, or has
    operators that have no translation, which are all named.
    """
    return capture(model, example, batch=batch, dynamic_shapes=dynamic_shapes).graph


def capture(
    model: nn.Module, example: Any, *, batch: bool = True, dynamic_shapes: Any = None
) -> Captured:
    """What `to_graph` gives, with what is needed to call it like the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(getattr(one, "graph", None), Graph) for one in model.modules()):
        raise TypeError(
            f"this {type(model).__name__} is, or holds, a network that is compiled already: "
            "start from the model that it was made from"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("this model is TorchScript: start from the module that it was made from")
    signature = inspect.signature(model.forward)
    args, kwargs = bind(signature, example)
    with torch.inference_mode(False), without_inference_tensors(model):
        args, kwargs = pytree.tree_map_only(Tensor, ordinary, (args, kwargs))
        return _capture(model, signature, args, kwargs, batch, dynamic_shapes)


def _capture(
    model: nn.Module,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: bool,
    dynamic_shapes: Any,
) -> Captured:
    if dynamic_shapes is True:
        try:
            program = _program(model, args, kwargs, every=True)
            return _captured(model, program, signature, args, kwargs)
        except RuntimeError as error:  # or NotImplementedError, which is one
            _log.warning("%s: only the batch is free: %s", type(model).__name__, error)
        dynamic_shapes = None
    if batch and dynamic_shapes is None:
        made, why = None, "the model fixes it"
        try:
            program = _program(model, args, kwargs, every=False)
            made = _captured(model, program, signature, args, kwargs)
        except RuntimeError as error:  # a model of fixed sizes, or one that no export can serve
            why = str(error)
        if made is None or not made.graph.open_sizes:
            _log.info("%s: the batch stays that of the example: %s", type(model).__name__, why)
        if made is not None:
            return made
    program = _exported(model, (args, kwargs), dynamic_shapes)
    return _captured(model, program, signature, args, kwargs)


def _captured(
    model: nn.Module,
    program: ExportedProgram,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured:
    builder = Builder()
    _inputs(builder, program)
    with torch.no_grad():
        _nodes(builder, program.graph)
    outputs = _outputs(builder, program.graph)
    builder.check_sizes()
    names = tuple(
        spec.arg.name if isinstance(spec.arg, TensorArgument) else ""
        for spec in program.graph_signature.input_specs
        if _is_input(spec)
    )
    values = tuple(name for name in outputs if isinstance(name, str))
    graph = builder.graph(values, type(model).__name__)
    given, arguments = pytree.tree_flatten((args, kwargs))
    _check_example(graph, names, given)
    leaves = tuple(None if isinstance(one, Tensor) else one for one in given)
    results = program.call_spec.out_spec
    return Captured(graph, signature, arguments, names, leaves, outputs, results)


def _check_example(graph: Graph, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """FixedSize: the example, of which two were exported, is not what the graph is right for."""
    given = {name: leaf.shape for name, leaf in zip(names, leaves, strict=True) if name}
    sizes = graph.sizes(given)
    if not all(fulfilled(one, sizes) for one in graph.conditions):
        raise FixedSize("the network is right for other sizes than those of the example")


def bind(signature: inspect.Signature, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments in the one order that a signature has for them."""
    several = example if isinstance(example, tuple | list) else (example,)
    args, kwargs = ((), example) if isinstance(example, Mapping) else (several, {})
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"forward{signature} does not take what is given: {error}. An example or a batch is a "
            "tensor, a tuple of positional arguments or a dict of keywords, without labels"
        ) from None
    if any(isinstance(one, np.ndarray) for one in pytree.tree_leaves((bound.args, bound.kwargs))):
        raise TypeError("an example or a batch holds arrays of NumPy: give torch.from_numpy(array)")
    return bound.args, bound.kwargs


def _program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], every: bool
) -> ExportedProgram:
    """With first sizes free, or with `every` one. RuntimeError: the model does not allow that."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    sized = [one for one in leaves if isinstance(one, Tensor) and one.dim()]
    size = sized[0].shape[0] if sized else 0
    if not size:
        return _exported(model, (args, kwargs), None)

    def has_batch(one: Any) -> bool:
        return isinstance(one, Tensor) and bool(one.dim()) and one.shape[0] == size

    def dims(one: Any) -> dict[int, Any] | None:
        if every and isinstance(one, Tensor):
            return dict.fromkeys(range(one.dim()), Dim.AUTO)
        return {0: Dim.AUTO} if has_batch(one) else None

    every_args, every_kwargs = pytree.tree_unflatten([dims(one) for one in leaves], spec)
    # torch.export takes them by parameters of forward, of which *args is one.
    bound = inspect.signature(model.forward).bind(*every_args, **every_kwargs)
    shapes = dict(bound.arguments)
    firsts = [index for index, one in enumerate(leaves) if has_batch(one)]
    why = RuntimeError("the model fixes its batch")
    # What is one in an example is one for ever, to torch.export.
    for doubled in [True, False][: 1 + every] if size == 1 else [False]:
        wide = [torch.cat([one, one]) if doubled and has_batch(one) else one for one in leaves]
        try:
            program = _exported(model, pytree.tree_unflatten(wide, spec), shapes)
        except RuntimeError as error:
            why = error
            continue
        if not doubled or all(_free(program)[index] for index in firsts):
            return program
    raise why


def _free(program: ExportedProgram) -> list[bool]:
    """Of each input, whether its first size is not fixed."""
    names = [one.arg.name for one in program.graph_signature.input_specs if _is_input(one)]
    fakes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [
        isinstance(fake := fakes[name], Tensor) and isinstance(fake.shape[0], torch.SymInt)
        for name in names
    ]


def _exported(model: nn.Module, example: Any, shapes: Any) -> ExportedProgram:
    args, kwargs = example
    try:
        with evaluating(model), plain_attention(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of what it does itself
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions(_decompositions())
        _settle(program.graph)
        return program
    except Exception as error:  # of any class: what goes wrong is in the model
        raise _explained(error) from error


def _decompositions() -> Any:
    """PyTorch's own, of all operators but those that have a converter."""
    table = torch.export.default_decompositions()
    for operator in list(table):
        if isinstance(operator, OpOverload) and operator._schema.name in converters.load():
            table.pop(operator)
    # Core operators stay in what is exported; of some, PyTorch knows what they consist of.
    for operator, function in global_decomposition_table["post_autograd"].items():
        if not isinstance(operator, OpOverload) or operator._schema.name in converters.load():
            continue
        if torch.Tag.core in operator.tags and function.__module__.startswith("torch._decomp"):
            table[operator] = function
    return table


def _explained(error: Exception) -> Exception:
    """What to tell a user about an error of torch.export."""
    text = _explanation(str(error))
    first = text or type(error).__name__
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        return NotImplementedError(
            "this model chooses by the values of its data what is computed, which a graph cannot: "
            "write the choice with torch.where, or compile the parts on either side of it. "
            f"torch.export says: {first}"
        )
    if "Cache'> in output" in first:
        return NotImplementedError(
            "this model gives back a cache of keys and values, which a graph does not hold: set "
            f"model.config.use_cache = False (and that of its decoder). torch.export says: {first}"
        )
    return RuntimeError(f"torch.export cannot export this model: {first}")


def _explanation(text: str) -> str:
    """What torch.export says, without the program's text and stacks of calls that it adds."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith(_NOT_SAID):
            break
        if line.strip():
            lines.append(line.rstrip())
    return "\n".join(lines)


def _settle(graph: fx.Graph) -> None:
    """Let sizes that export has found to be fixed be numbers, as the others are."""

    def number(size: Any) -> Any:
        if isinstance(size, torch.SymFloat) and size.node.expr.is_number:
            return float(size.node.expr)
        fixed = isinstance(size, torch.SymInt) and size.node.expr.is_Integer
        return int(size.node.expr) if fixed else size

    def settled(fake: Any) -> Any:
        if not isinstance(fake, FakeTensor):
            return number(fake)
        sizes = [number(size) for size in fake.shape]
        if all(one is other for one, other in zip(sizes, fake.shape, strict=True)):
            return fake
        with fake.fake_mode:
            return torch.empty(sizes, dtype=fake.dtype, device=fake.device)

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(settled, node.meta["val"])


def _is_input(spec: Any) -> bool:
    return spec.kind is InputKind.USER_INPUT


def _inputs(builder: Builder, program: ExportedProgram) -> None:
    """Inputs and parameters of the program, as values."""
    specs = {one.arg.name: one for one in program.graph_signature.input_specs}
    held: dict[Any, Any] = {**program.state_dict, **program.constants}
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, fake = specs[node.name], node.meta.get("val")
        if isinstance(spec.arg, ConstantArgument):
            builder.values[node] = spec.arg.value
        elif spec.kind is InputKind.TOKEN:  # of operators with effects, which `_nodes` names
            builder.values[node] = ""
        elif _is_input(spec):
            for axis, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    expression = size.node.expr
                    builder.sources.setdefault(expression, (node.name, axis))
                    name = _size_name(builder, node.name, axis)
                    if builder.names.setdefault(expression, name) == name:
                        _range(builder, name, program.range_constraints.get(expression))
            builder.values[node] = name = builder.unique(node.name)
            builder.fakes[name] = fake
            builder.inputs[name] = builder.fact(fake, node.name)
        else:
            builder.known[node] = held[spec.target]
            builder.targets[node] = str(spec.target)
    _check_state(program)


def _range(builder: Builder, name: str, given: Any) -> None:
    """Note for which sizes export has found the program right. Its own least size is 2, where
    nothing depends on that."""
    if given is None:
        return
    least, most = (int(one) if one.is_Integer else None for one in (given.lower, given.upper))
    least = 0 if least is None or least <= _LEAST else least
    if least or most is not None:
        builder.ranges[name] = least, most


def _size_name(builder: Builder, name: str, axis: int) -> str:
    """How a size is called that a run chooses: "batch", or by its input and axis."""
    first = not axis and "batch" not in builder.names.values()
    return "batch" if first else f"{name}_{axis}"


def _check_state(program: ExportedProgram) -> None:
    """NotImplementedError if the model changes buffers or inputs."""
    mutated = [
        spec
        for spec in program.graph_signature.output_specs
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    ]
    if mutated:
        names = ", ".join(str(one.target) for one in mutated)
        raise NotImplementedError(
            f"this model changes {names} when it is called; a graph keeps nothing between calls: "
            "give state as an input and return it"
        )


def _nodes(builder: Builder, graph: fx.Graph) -> None:
    """Translate the calls; what depends on no input is computed here and now."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    fixed = set(builder.known)
    missing = set[str]()
    for node in calls:
        if _is_fixed(node, fixed):
            fixed.add(node)
        elif (name := _name(node)) and name not in converters.load():
            missing.add(name)
    if missing:
        raise NotImplementedError(
            f"no translation is known of {', '.join(sorted(missing))}: replace them in the model, "
            "or leave the part that needs them out and compile the rest"
        )
    for node in calls:
        if node in fixed:
            builder.known[node] = _computed(node, builder.known)
        elif node.target is python.getitem:
            builder.values[node] = _picked(builder, node)
        elif name := _name(node):
            builder.translate(node, converters.get(name))


def _picked(builder: Builder, node: fx.Node) -> Any:
    """One of the results of a node. NotImplementedError: it has no translation."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    values = builder.values[source]
    if not isinstance(values, tuple) or not -len(values) <= index < len(values):
        what = "the indices" if "max_pool" in _name(source) else f"result {index}"
        raise NotImplementedError(
            f"{what} of {_name(source)} ({source.name}) have no translation: leave the part that "
            "needs them out of the model, and compile the rest"
        )
    return values[index]


def _name(node: fx.Node) -> str:
    """The operator's name, "aten::relu"; "" of what picks a result, or computes with sizes."""
    if node.target is with_effects:  # of an operator that may raise, such as a check
        return node.args[1]._schema.name  # type: ignore[union-attr]
    if isinstance(node.target, HigherOrderOperator):
        return f"higher_order::{node.target.name()}"
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None or schema.name in _CHECKS else schema.name


def _is_fixed(node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Whether a node makes tensors of tensors that are known, and always the same."""
    target, made = node.target, node.meta.get("val")
    if target is not python.getitem:
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            return False
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
    return all(
        isinstance(one, Tensor) and not any(isinstance(n, torch.SymInt) for n in one.shape)
        for one in (made if isinstance(made, tuple | list) and made else (made,))
    ) and all(one in fixed for one in node.all_input_nodes)


def _computed(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: known[one])
    return node.target(*args, **kwargs)  # type: ignore[operator, misc]


def _outputs(builder: Builder, graph: fx.Graph) -> tuple[Any, ...]:
    """The leaves of the result. A value that is given twice, or is an input, has two names."""
    (node,) = (one for one in graph.nodes if one.op == "output")
    builder.node = node
    seen = set(builder.inputs)
    outputs = []
    for given in node.args[0]:  # type: ignore[union-attr]
        leaf = builder.argument(given)
        if isinstance(leaf, SYMBOLS):
            raise FixedSize("the model gives back a size of its inputs")
        if isinstance(given, fx.Node) and leaf in seen:
            leaf = builder.same(leaf)
        seen.add(leaf)
        outputs.append(leaf)
    return tuple(outputs)
