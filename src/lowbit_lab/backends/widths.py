"""How wide the blocks of a Triton kernel are, where its text says so: `tl.arange(0, 2048)`.

A kernel is often wrong beyond such a width, as it is beyond a block size that is a parameter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any


def widths_of(text: Callable[..., Any]) -> tuple[int, ...]:
    """The widths that are written in a kernel and in the jitted functions that it calls: numbers,
    or names that are numbers outside of it. Each once, in the order of the text."""
    found = dict[int, None]()
    seen = set[FunctionType]()
    waiting = [text]
    while waiting:
        function: Any = waiting.pop()
        if function not in seen:
            seen.add(function)
            names = {**function.__globals__, **_closure(function)}
            for node in ast.walk(_tree(function)):
                found |= dict.fromkeys(_widths(node, names))
                waiting += _jitted(node, names)
    return tuple(width for width in found if width > 1)


def _closure(function: Any) -> Mapping[str, Any]:
    try:
        return inspect.getclosurevars(function).nonlocals
    except (TypeError, ValueError):
        return {}


def _tree(function: Any) -> ast.AST:
    """The text of a function; empty where Python cannot find it."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _widths(node: ast.AST, names: Mapping[str, Any]) -> Iterator[int]:
    """The widths that a call of arange, or one with a block_shape, has."""
    if not isinstance(node, ast.Call):
        return
    if _name(node.func) == "arange" and len(node.args) == 2:
        first, end = (_number(argument, names) for argument in node.args)
        if first is not None and end is not None:
            yield end - first
    for keyword in node.keywords:
        if keyword.arg == "block_shape" and isinstance(keyword.value, (ast.Tuple, ast.List)):
            sizes = (_number(element, names) for element in keyword.value.elts)
            yield from (size for size in sizes if size is not None)


def _jitted(node: ast.AST, names: Mapping[str, Any]) -> Iterator[FunctionType]:
    """The function under triton.jit that a call is of, unless it is Triton's own."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = getattr(names.get(node.func.id), "fn", None)
        if isinstance(function, FunctionType) and not function.__module__.startswith("triton."):
            yield function


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _number(expression: ast.expr, names: Mapping[str, Any]) -> int | None:
    """An expression of numbers, and of names that are numbers; None if it is another."""
    words = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    known = {word: getattr(names.get(word), "value", names.get(word)) for word in words}
    plain = (ast.Expression, ast.Constant, ast.Name, ast.BinOp, ast.operator, ast.expr_context)
    whole = all(isinstance(node, plain) for node in ast.walk(expression))
    if not whole or not all(type(value) is int for value in known.values()):
        return None
    try:
        value = eval(compile(ast.Expression(expression), "", "eval"), {"__builtins__": {}}, known)
    except (ArithmeticError, TypeError):
        return None
    return value if isinstance(value, int) else None
