"""Weights that a model uses outside of their layers, found in the source of its forwards.

`self.proj.weight.unsqueeze(0)` in the forward of a module that holds `proj` needs a float weight.
No inputs are at hand, so nothing is run: names are followed to the modules that they stand for,
through assignments, loops over lists of modules, and calls of methods and functions.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from lowbit.torch.kinds import kind_of
from lowbit.torch.weight import FUNCTIONS


class Weight(NamedTuple):
    """A weight of a layer that could be quantized, as a name or an expression may stand for it."""

    layer: nn.Module
    parameter: str


class Method(NamedTuple):
    """A function of a module's class, and the module."""

    module: nn.Module
    function: FunctionType


Things = tuple[Any, ...]  # what an expression may stand for: modules, Weights, Methods
_FACTS = frozenset({
    "device", "dim", "dtype", "element_size", "is_cuda", "is_meta", "is_quantized", "itemsize",
    "nbytes", "ndim", "numel", "requires_grad", "shape", "size",
})  # fmt: skip
_TURNED = frozenset({"T", "mT", "t"})
_ASKING = (isinstance, hasattr, type, id, len, getattr)
_LISTS = frozenset({"children", "items", "modules", "values"})
_HOLDERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_USE, _FACT, _PRODUCT, _NAME = "use", "fact", "product", "name"  # how an expression is used


def outside_uses(model: nn.Module) -> dict[nn.Module, str]:
    """By layer, where its weight is used otherwise than by calling the layer, by asking for its
    shape or dtype, or by what a quantized weight multiplies by itself, as F.linear."""
    found: dict[nn.Module, str] = {}
    seen: set[Any] = set()
    for module in model.modules():
        if kind_of(module) is None:
            _Reader(found, seen).read_method(module, "forward")
    return found


class _Reader:
    """Reads one function. names: what its names may stand for."""

    def __init__(self, found: dict[nn.Module, str], seen: set[Any]) -> None:
        self.found, self.seen = found, seen
        self.names: dict[str, Things] = {}
        self.globals: Mapping[str, Any] = {}
        self.where = ""
        self.code: Any = None
        self.first = ""  # the name of the first parameter

    def read_method(self, module: nn.Module, name: str) -> None:
        for method in _attribute(module, name):
            if isinstance(method, Method):
                self.read(method.function, [(module,)], {})

    def read(self, function: Any, args: list[Things], named: Mapping[str, Things]) -> None:
        """Read a function for what its arguments may be."""
        function = inspect.unwrap(function)
        tree = _tree(function)
        if tree is None:
            return
        parameters = [one.arg for one in (*tree.args.posonlyargs, *tree.args.args)]
        self.names = {**dict(zip(parameters, args, strict=False)), **named}
        key = function.__code__, *((n, *map(id, some)) for n, some in sorted(self.names.items()))
        weights = (one for some in self.names.values() for one in some if type(one) is Weight)
        key = *key, *((id(one.layer), one.parameter) for one in weights)
        if key in self.seen:
            return
        self.seen.add(key)
        self.globals, self.where = function.__globals__, function.__qualname__
        self.code, self.first = function.__code__, (parameters or [""])[0]
        for statement in tree.body:
            self.visit(statement)

    # What an expression may stand for

    def things(self, node: ast.expr | None) -> Things:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return self._attributes(node)
        if isinstance(node, ast.IfExp):
            return self.things(node.body) + self.things(node.orelse)
        if isinstance(node, ast.BoolOp | ast.List | ast.Tuple):
            parts = node.values if isinstance(node, ast.BoolOp) else node.elts
            return tuple(one for part in parts for one in self.things(part))
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.things(node.value)
        if isinstance(node, ast.Subscript):
            return _elements(self.things(node.value), node.slice)
        if isinstance(node, ast.Call):
            return self._results(node)
        return ()

    def _attributes(self, node: ast.Attribute) -> Things:
        if isinstance(node.value, ast.Call) and self._known(node.value.func) is super:
            modules = (one for one in self.names[self.first] if isinstance(one, nn.Module))
            return tuple(x for one in modules for x in _inherited(one, node.attr, self.code))
        before = self.things(node.value)
        turned = tuple(one for one in before if type(one) is Weight and node.attr in _TURNED)
        modules = (one for one in before if isinstance(one, nn.Module))
        return turned + tuple(found for one in modules for found in _attribute(one, node.attr))

    def _results(self, node: ast.Call) -> Things:
        """Of `weight.t()`, `getattr(self, "proj")`, and what lists modules."""
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr in _LISTS:
                return _elements(self.things(function.value))
            return tuple(one for one in self.things(function) if type(one) is Weight)
        called = self._known(function)
        if called is getattr and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            modules = (one for one in self.things(node.args[0]) if isinstance(one, nn.Module))
            return tuple(x for one in modules for x in _attribute(one, str(node.args[1].value)))
        if called in (enumerate, zip, reversed, list, tuple, iter):
            return tuple(one for arg in node.args for one in _elements(self.things(arg)))
        return ()

    def _known(self, node: ast.expr) -> Any:
        """The function of that name, in the function's module or what it imports."""
        if isinstance(node, ast.Name) and node.id not in self.names:
            builtins = self.globals.get("__builtins__", {})
            table = vars(builtins) if isinstance(builtins, ModuleType) else builtins
            return self.globals.get(node.id, table.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self._known(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        return None

    def _truth(self, node: ast.expr) -> bool | None:
        """A condition that is the same in every call, where gradients are of no matter."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self._truth(node.operand)
            return None if truth is None else not truth
        if isinstance(node, ast.BoolOp):
            last = isinstance(node.op, ast.Or)
            each = [self._truth(one) for one in node.values]
            return last if last in each else None if None in each else not last
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners = [one for one in self.names.get(node.value.id, ()) if type(one) is not Weight]
            if not owners or not all(isinstance(one, nn.Module) for one in owners):
                return None
            if node.attr == "training":
                return False
            first, *others = (inspect.getattr_static(one, node.attr, None) for one in owners)
            return (
                first if isinstance(first, bool) and all(one is first for one in others) else None
            )
        known = self._known(node)
        return known if isinstance(known, bool) else None

    # What is done with it

    def visit(self, node: ast.AST, use: str = _USE) -> None:
        if isinstance(node, ast.expr) and use == _USE:
            for one in self.things(node):
                if type(one) is Weight:
                    self.found.setdefault(one.layer, self.where)
        method = getattr(self, f"visit_{type(node).__name__}", None)
        if method is not None:
            method(node, *([use] if isinstance(node, ast.expr) else []))
            return
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute, use: str = _USE) -> None:
        owners = self.things(node.value)
        weights = any(type(one) is Weight for one in owners)
        for one in owners:
            found = inspect.getattr_static(type(one), node.attr, None)
            if isinstance(one, nn.Module) and isinstance(found, property):
                _Reader(self.found, self.seen).read(found.fget, [(one,)], {})
        if node.attr in _FACTS:
            use = _FACT
        elif not weights or node.attr not in _TURNED:
            use = _USE
        self.visit(node.value, use)

    def visit_Subscript(self, node: ast.Subscript, use: str = _USE) -> None:
        self.visit(node.slice)
        kept = isinstance(node.slice, ast.Slice) and node.slice.step is None
        self.visit(node.value, use if kept else _USE)

    def visit_IfExp(self, node: ast.IfExp, use: str = _USE) -> None:
        self.visit(node.test)
        for part, kept in ((node.body, True), (node.orelse, False)):
            if self._truth(node.test) in (kept, None):
                self.visit(part, use)

    def visit_BinOp(self, node: ast.BinOp, use: str = _USE) -> None:
        self.visit(node.left)
        self.visit(node.right, _PRODUCT if isinstance(node.op, ast.MatMult) else _USE)

    def visit_Compare(self, node: ast.Compare, use: str = _USE) -> None:
        asks = all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
        for one in (node.left, *node.comparators):
            self.visit(one, _FACT if asks else _USE)

    def visit_Call(self, node: ast.Call, use: str = _USE) -> None:
        method = isinstance(node.func, ast.Attribute) and any(
            type(one) is Weight for one in self.things(node.func.value)
        )
        if method and node.func.attr in _TURNED | _FACTS:  # type: ignore[union-attr]
            self.visit(node.func, use)
        else:
            self.visit(node.func)
        called = self._known(node.func)
        if called in _ASKING:
            use = _FACT
        elif any(called is one for one in _multiplying()):
            use = _PRODUCT
        else:
            use = _NAME if self._follow(node, called) else _USE
        for one in (*node.args, *(word.value for word in node.keywords)):
            self.visit(one, use)

    def _follow(self, node: ast.Call, called: Any) -> bool:
        """Read what is called, if it is known, for the modules and weights that it is given."""
        args = [self.things(one) for one in node.args]
        named = {one.arg: self.things(one.value) for one in node.keywords if one.arg}
        given = any(args) or any(named.values())
        targets: list[tuple[Any, list[Things]]] = []
        for one in self.things(node.func):
            if isinstance(one, Method):
                targets.append((one.function, [(one.module,), *args]))
            elif isinstance(one, nn.Module) and given and kind_of(one) is None:
                forward = [x for x in _attribute(one, "forward") if isinstance(x, Method)]
                targets += [(x.function, [(one,), *args]) for x in forward]
        if given and isinstance(called, FunctionType):
            targets.append((called, args))
        for function, arguments in targets:
            _Reader(self.found, self.seen).read(function, arguments, named)
        return bool(targets) and all(_tree(inspect.unwrap(one)) for one, _ in targets)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value, _NAME)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value, _NAME)
            self._bind(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr, use: str = _USE) -> None:
        self.visit(node.value, use)
        self._bind(node.target, node.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
        elif isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id, ()) + self.things(value)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter, _NAME)
        self._loop(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter, _NAME)
        self._loop(node.target, node.iter)
        for condition in node.ifs:
            self.visit(condition)

    def _loop(self, target: ast.expr, over: ast.expr) -> None:
        """Let each name of a target be any of what is gone through."""
        things = self.things(over) if isinstance(over, ast.Call) else _elements(self.things(over))
        for one in ast.walk(target):
            if isinstance(one, ast.Name):
                self.names[one.id] = self.names.get(one.id, ()) + things

    def _comprehension(self, node: Any, use: str = _USE) -> None:
        for one in node.generators:
            self.visit(one)
        for field in ("elt", "key", "value"):
            if hasattr(node, field):
                self.visit(getattr(node, field))

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        truth = self._truth(node.test)
        for part, kept in ((node.body, True), (node.orelse, False)):
            for statement in part if truth in (kept, None) else ():
                self.visit(statement)


def _multiplying() -> Iterator[Any]:
    """Functions that a quantized weight serves as it is."""
    yield from FUNCTIONS
    yield functional.embedding


def _attribute(module: nn.Module, name: str) -> Things:
    """A submodule, a weight, or a method of that name; nothing is called to find it."""
    if name in module._modules:
        child = module._modules[name]
        return () if child is None else (child,)
    kind = kind_of(module)
    if kind is not None and name in kind.weight_names(module):
        return (Weight(module, name),)
    found = vars(module).get(name, inspect.getattr_static(type(module), name, None))
    if isinstance(found, staticmethod):
        return ()
    if isinstance(found, nn.Module):
        return (found,)
    function = getattr(found, "__func__", found)
    return (Method(module, function),) if isinstance(function, FunctionType) else ()


def _inherited(module: nn.Module, name: str, code: Any) -> Things:
    """The method that `super()` finds in a method of that code."""
    classes = iter(type(module).__mro__)
    for one in classes:
        method = inspect.unwrap(vars(one).get(name, one))
        if getattr(method, "__code__", None) is code:
            break
    later = (vars(one)[name] for one in classes if name in vars(one))
    found = next(later, None)
    return (Method(module, found),) if isinstance(found, FunctionType) else ()


def _elements(things: Things, index: ast.expr | None = None) -> Things:
    """What a list of modules holds, or a part of a weight is."""
    made: list[Any] = []
    for one in things:
        if isinstance(one, _HOLDERS):
            made += one.children()
        elif type(one) is not Weight or (isinstance(index, ast.Slice) and index.step is None):
            made.append(one)
    return tuple(made)


_trees: dict[Any, Any] = {}


def _tree(function: Callable[..., Any]) -> Any:
    """What a function's source says; None: it is PyTorch's own, has none, or is a lambda."""
    code = getattr(function, "__code__", None)
    if code is None or str(function.__module__).partition(".")[0] == "torch":
        return None
    if code not in _trees:
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            tree = None
        _trees[code] = tree if isinstance(tree, ast.FunctionDef) else None
    return _trees[code]
