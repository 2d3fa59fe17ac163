"""Triton kernels, run by Triton's interpreter on memory that sees every access.

The interpreter is switched on for the length of a run, in this process and without environment
variables: the language's functions are patched, helper functions that are jitted are interpreted
when they are called, and everything is put back. Pointers are numbers of no real memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lowbit.kernels.triton import NEWEST, OLDEST
from lowbit.registry.extras import install
from lowbit.registry.locks import Lock
from lowbit.spec.rounding import to_tf32
from lowbit_lab.run import block_types, folds, hints
from lowbit_lab.run.addresses import Addresses, address_of, numbers_of
from lowbit_lab.run.language import Bfloat16, Transformer, counting, logic, truth
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.outcome import refusals
from lowbit_lab.run.trace import Block, Kind, Step, block

_LOCK = Lock()
RUNNER = "Triton's interpreter"
_EXTRA = "triton.language.extra"


def triton_modules() -> tuple[Any, Any, Any]:
    """triton, triton.language and the interpreter's module.

    ModuleNotFoundError or RuntimeError, in one line with what to install, if Triton is missing, or
    of a version that is not known, or not what its version says.
    """
    known = "lowbit's checker knows Triton {}.{} to {}.{}".format(*OLDEST, *NEWEST)
    fitting = f"pip install 'triton>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    try:
        import triton
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"checking Triton kernels needs triton; {install('lab')}"
        ) from None
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if not OLDEST <= version <= NEWEST:
        raise RuntimeError(f"{known}; this is {triton.__version__}: {fitting}")
    try:
        import triton.compiler.code_generator  # it keeps functions that are replaced later
        import triton.language as tl
        from triton.runtime import interpreter

        operator.attrgetter(*_OF_TRITON)(triton)
        operator.attrgetter(*_OF_INTERPRETER)(interpreter)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{known}; this is {triton.__version__}, but another one inside ({error}): {fitting}"
        ) from None
    return triton, tl, interpreter


# What is used of Triton's internals, which may change with any version.
_OF_TRITON = ("knobs.runtime.interpret", "runtime.jit.JITFunction")
_OF_INTERPRETER = (
    "FunctionRewriter.ast_transformer", "InterpretedFunction", "ReduceOps.apply_impl",
    "ReduceOps.generic_reduce", "ScanOps.apply_impl", "ScanOps.generic_scan",
    "TensorHandle.__post_init__", "_get_np_dtype", "_implicit_cvt", "_patch_lang",
    "interpreter_semantic.broadcast_impl_value", "interpreter_builder.options",
    "interpreter_builder.binary_op", "interpreter_builder.cast_impl",
    "interpreter_builder.create_addptr", "interpreter_builder.create_fp_to_fp",
    "interpreter_builder.create_int_to_ptr",
    "interpreter_builder.unary_op", "interpreter_builder.create_masked_load",
)  # fmt: skip


@contextlib.contextmanager
def interpreted(memory: Memory) -> Iterator[Callable[[Any], Callable[..., Any]]]:
    """Within it, Triton's language computes on NumPy and its memory is `memory`.

    Yields what turns the text of a jitted function into one that Python can run.
    """
    triton, tl, interpreter = triton_modules()
    texts: dict[Any, Callable[..., Any]] = {}
    count = counting(tl, interpreter)
    names = {**logic(tl.tensor), "range": count}

    def rewritten(function: Any) -> Callable[..., Any]:
        if function not in texts:
            texts[function] = _rewritten(function, names, interpreter)
        return texts[function]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return rewritten(self.fn)(*args, **kwargs)

    builder = interpreter.interpreter_builder
    accesses = _Accesses(memory, builder, interpreter)
    patched = accesses.methods()
    visible = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with _LOCK, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        interpreting = triton.knobs.runtime.interpret
        scope = interpreter._patch_lang(visible)
        try:
            for holder, name, value in _replaced(tl, interpreter, memory, call, count):
                scope.set_attr(holder, name, value)
            for holder, name, value in (
                *folds.replacements(interpreter, tl.standard),
                *block_types.replacements(tl, interpreter),
                *hints.replacements(tl, memory),
            ):
                scope.set_attr(holder, name, value)
            for ops in (interpreter.ReduceOps, interpreter.ScanOps):
                scope.set_attr(ops, "apply_impl", accesses.folded(ops))
            triton.knobs.runtime.interpret = True
            vars(builder).update(patched)
            yield rewritten
        finally:
            for name in patched:
                vars(builder).pop(name, None)
            triton.knobs.runtime.interpret = interpreting
            scope.restore()


def _replaced(
    tl: Any, interpreter: Any, memory: Memory, call: Callable[..., Any], count: Callable[..., Any]
) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced besides memory while kernels are interpreted: of what, by which name."""
    from triton.runtime.jit import JITFunction

    # Triton 3.6 converts an array of one element, which NumPy 2.4 does no more.
    yield tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.reshape(-1)[0])
    yield tl.tensor, "__bool__", truth(memory.machinery, str(Path(tl.__file__).parent))
    yield tl, "range", count
    # It makes a dict of all dtypes at every operation.
    yield interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype)
    # Each integer addition is made a second time in 64 bits to look for overflow, and what that
    # finds is thrown away without `debug`.
    builder = interpreter.interpreter_builder
    yield builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)
    # The second is what triton.jit makes under TRITON_INTERPRET=1.
    yield JITFunction, "__call__", call
    yield interpreter.InterpretedFunction, "__call__", call
    for module in _extra_modules(tl):
        for name, refusal in refusals(vars(module), _EXTRA, RUNNER).items():
            yield module, name, refusal
    # Every operation makes one of these.
    made = interpreter.TensorHandle.__post_init__

    def counted(handle: Any) -> None:
        memory.step()
        made(handle)

    yield interpreter.TensorHandle, "__post_init__", counted


@cache
def _remembered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of a dtype, which is asked once for each."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return found


def _extra_modules(tl: Any) -> list[types.ModuleType]:
    """The modules of functions that devices have. Those that tl.extra holds are loaded apart from
    those that an import statement gives."""
    imported = [module for name, module in sys.modules.items() if name.startswith(_EXTRA)]
    held = [one for one in vars(tl.extra).values() if isinstance(one, types.ModuleType)]
    inner = [one for module in held for one in vars(module).values()]
    return [*imported, *held, *(one for one in inner if isinstance(one, types.ModuleType))]


def _copy(function: Any, names: Mapping[str, Any]) -> Any:
    """The function with globals of its own: these, and what the rewriter fills them with."""
    seen = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return _with_globals(function, {**seen, **refusals(seen, _EXTRA, RUNNER), **names})


_REWRITTEN: WeakKeyDictionary[Any, types.FunctionType] = WeakKeyDictionary()


def _rewritten(function: Any, names: Mapping[str, Any], interpreter: Any) -> Any:
    """The function as Python can run it, with globals as they are now. Its text is read once."""
    text = _copy(function, names)
    if function not in _REWRITTEN:
        rewriter = interpreter.FunctionRewriter(text)
        rewriter.ast_transformer = Transformer(rewriter.ast_transformer)
        _REWRITTEN[function] = _with_globals(rewriter.rewrite_ast(), {})
    return _with_globals(_REWRITTEN[function], {**vars(interpreter), **text.__globals__})


def _with_globals(text: Any, names: dict[str, Any]) -> types.FunctionType:
    made = types.FunctionType(text.__code__, names, None, text.__defaults__, text.__closure__)
    made.__kwdefaults__ = text.__kwdefaults__
    return made


class _Accesses:
    """The methods of the interpreter's builder that touch memory or multiply."""

    def __init__(self, memory: Memory, builder: Any, interpreter: Any) -> None:
        self._memory, self._builder, self._interpreter = memory, builder, interpreter
        self._addresses = Addresses(memory)
        self._dot, self._bfloat16 = builder.create_dot, Bfloat16(builder, interpreter)

    def folded(self, folds: Any) -> Callable[..., Any]:
        """What replaces the method apply_impl of ReduceOps or ScanOps: the same, and recorded."""
        original = folds.apply_impl
        kind: Step = "reduction" if folds is self._interpreter.ReduceOps else "scan"

        def apply(ops: Any, blocks: Any) -> Any:
            made = original(ops, blocks)
            first = made[0] if isinstance(made, (tuple, list)) else made
            name = getattr(ops.combine_fn, "__name__", kind)
            self._memory.computed(
                kind,
                f"{_FOLDS.get(name, name)} along axis {ops.axis}",
                [_block(one.handle) for one in blocks],
                _block(first.handle),
            )
            return made

        return apply

    def methods(self) -> dict[str, Callable[..., Any]]:
        """By their names in the builder."""
        return {
            "create_load": lambda ptr, *rest: self._load(ptr, None, None, bool(rest[-1])),
            "create_store": lambda ptr, value, *_: self._store(ptr, value, None),
            "create_masked_load": lambda ptr, mask, other, *rest, **__: self._load(
                ptr, mask, other, bool(rest and rest[-1])
            ),
            "create_masked_store": lambda ptr, value, mask, *_: self._store(ptr, value, mask),
            "create_atomic_rmw": self._rmw,
            "create_atomic_cas": self._cas,
            "create_atomic_load": self._atomic_load,
            "create_atomic_store": self._atomic_store,
            "create_int_to_ptr": self._pointers,
            "create_dot": self._multiply,
            # Triton 3.6 keeps a NaN in these, which a GPU drops.
            "create_maxnumf": lambda left, right: self._builder.binary_op(left, right, np.fmax),
            "create_minnumf": lambda left, right: self._builder.binary_op(left, right, np.fmin),
            "create_clampf": self._clamp,
            **self._bfloat16.methods(),
            **(self._watched_methods() if self._memory.follows_wraps else {}),
        }

    def _parts(self, ptr: Any, active: Any, kind: Kind, masked: bool) -> Iterator[Lanes]:
        """The lanes of each tensor that active lanes point to; for none active, of the first."""
        addresses = np.asarray(ptr.data).astype(np.uint64)
        numbers = numbers_of(addresses)
        if not (np.count_nonzero(active) and np.count_nonzero(numbers != numbers.flat[0])):
            touched = numbers.reshape(-1)[:1]
        else:
            touched = np.unique(numbers[active])
        for number in touched:
            lanes = active & (numbers == number)
            if number < len(self._addresses.tensors):
                offsets = addresses.astype(np.int64) - address_of(int(number))
                yield Lanes(self._addresses.tensors[int(number)], offsets, lanes, masked)
            elif lanes.any():
                first = int(addresses[lanes].flat[0])
                self._memory.outside_of_all(kind, int(lanes.sum()), masked, first)

    def _pointers(self, numbers: Any, element: Any) -> Any:
        """Integers that become addresses. TypeError if they are too short to be any."""
        if numbers.data.itemsize != 8:
            raise TypeError(
                f"a pointer is made of an integer of 64 bits, and this is an {numbers.data.dtype}"
            )
        addresses = self._addresses.of_integers(numbers.data)
        return self._interpreter.TensorHandle(addresses, element.scalar)

    def _load(
        self, ptr: Any, mask: Any, other: Any, volatile: bool = False, acquires: bool = False
    ) -> Any:
        element = ptr.get_element_ty()
        dtype = self._interpreter._get_np_dtype(element)
        shape = np.shape(ptr.data)
        masked, active = mask is not None, _active(mask, shape)
        if other is not None:
            values = _spread(other.data, shape).astype(dtype)
        elif np.count_nonzero(active) == active.size:
            values = np.zeros(shape, dtype)
        else:
            name = "bfloat16" if element == self._interpreter.tl.bfloat16 else dtype.name
            values = self._memory.undefined_values(name, shape)
        for lanes in self._parts(ptr, active, "load", masked):
            values = self._memory.load(lanes, values, volatile=volatile, acquires=acquires)
        return self._interpreter.TensorHandle(values, element)

    def _store(self, ptr: Any, value: Any, mask: Any) -> None:
        dtype = self._interpreter._get_np_dtype(ptr.get_element_ty())
        shape = np.shape(ptr.data)
        values = self._addresses.stored(_spread(value.data, shape).astype(dtype))
        for lanes in self._parts(ptr, _active(mask, shape), "store", mask is not None):
            self._memory.store(lanes, values)

    def _rmw(self, op: Any, ptr: Any, value: Any, mask: Any, *order: Any) -> Any:
        name, shape = str(op).rpartition(".")[2], np.shape(ptr.data)
        combine, values = _COMBINE[name], np.broadcast_to(value.data, shape)
        made = lambda o, i: combine(o, values[i])  # noqa: E731
        return self._update(ptr, value, mask, made, order, exchange=name == "XCHG")

    def _cas(self, ptr: Any, compared: Any, value: Any, *order: Any) -> Any:
        shape = np.shape(ptr.data)
        values, wanted = (np.broadcast_to(one.data, shape) for one in (value, compared))
        made = lambda o, i: values[i] if o == wanted[i] else o  # noqa: E731
        return self._update(ptr, value, None, made, order)

    def _atomic_load(self, ptr: Any, mask: Any, *order: Any) -> Any:
        return self._load(ptr, mask, None, True, _orders(order)[0])

    def _atomic_store(self, ptr: Any, value: Any, mask: Any, *order: Any) -> None:
        values = np.broadcast_to(value.data, np.shape(ptr.data))
        self._update(ptr, value, mask, lambda _, i: values[i], order, exchange=True)

    def _update(
        self, ptr: Any, value: Any, mask: Any, combine: Callable[..., Any], order: Sequence[Any],
        *, exchange: bool = False,
    ) -> Any:  # fmt: skip
        """An atomic operation; returns the old values. order: its semantics and scope."""
        acquires, releases = _orders(order)
        shape = np.shape(ptr.data)
        values = np.broadcast_to(value.data, shape)
        old = np.zeros(shape, values.dtype)
        for lanes in self._parts(ptr, _active(mask, shape), "atomic", True):
            read = self._memory.update(
                lanes, values, combine, exchange=exchange, acquires=acquires, releases=releases
            )  # fmt: skip
            old = np.where(lanes.active, read, old)
        return self._interpreter.TensorHandle(old, value.dtype.scalar)

    def _clamp(self, value: Any, low: Any, high: Any, propagate: Any) -> Any:
        keeps = str(propagate).rpartition(".")[2] == "ALL"
        larger, smaller = (np.maximum, np.minimum) if keeps else (np.fmax, np.fmin)
        apply = self._builder.binary_op
        return apply(apply(value, low, larger), high, smaller)

    def _multiply(self, left: Any, right: Any, *rest: Any) -> Any:
        wide = self._bfloat16.wide
        a, b = wide(left), wide(right)
        if self._in_tf32(left, right, *rest):
            self._memory.tf32 = True
            a, b = (self._interpreter.TensorHandle(to_tf32(x.data), x.dtype) for x in (a, b))
        made = self._dot(a, b, *rest)
        self._memory.computed("product", "dot", (_block(left), _block(right)), _block(made))
        return made

    def _watched_methods(self) -> dict[str, Callable[..., Any]]:
        """Of operators on integers: that fewer than 64 bits do not hold what comes of two operands,
        or of a conversion, is told to the memory."""
        own = self._bfloat16.methods()

        def combined(left: Any, right: Any, op: Callable[..., Any]) -> Any:
            made = own["binary_op"](left, right, op)
            if op in _WRAPPING and _is_short(made.data):
                exact = op(left.data.astype(np.int64), right.data.astype(np.int64))
                if (exact != made.data).any():
                    self._memory.wrapped()
            return made

        def converted(source: Any, dtype: Any) -> Any:
            made = own["cast_impl"](source, dtype)
            whole = source.data.dtype.kind in "iu" and _is_short(made.data)
            if whole and (source.data.astype(np.int64) != made.data).any():
                self._memory.wrapped()
            return made

        return {"binary_op": combined, "cast_impl": converted}

    def _in_tf32(self, left: Any, right: Any, total: Any, precision: Any, *_: Any) -> bool:
        """Whether a product of float32 is asked for as tensor cores take it, Triton's default."""
        floats = all(x.dtype.scalar == self._interpreter.tl.float32 for x in (left, right, total))
        return floats and str(precision).rpartition(".")[2] == "TF32"


def _orders(order: Sequence[Any]) -> tuple[bool, bool]:
    """Whether an atomic operation of this semantics and scope acquires, and releases, for others
    than the threads of a program."""
    how, scope = (str(one).rpartition(".")[2] for one in order)
    return "ACQUIRE" in how and scope != "CTA", "RELEASE" in how and scope != "CTA"


# What may take more bits than its operands have.
_WRAPPING = (np.add, np.subtract, np.multiply, np.left_shift)


def _is_short(data: Any) -> bool:
    """Whether these are integers of fewer than 64 bits."""
    return data.dtype.kind in "iu" and data.itemsize < 8


_FOLDS = {"_sum_combine": "sum", "_elementwise_max": "max", "_elementwise_min": "min"}


def _block(handle: Any) -> Block:
    return block(handle.data, "bfloat16" if str(handle.dtype) == "bf16" else None)


_COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "ADD": operator.add, "FADD": operator.add, "MIN": min, "UMIN": min, "MAX": max, "UMAX": max,
    "AND": operator.and_, "OR": operator.or_, "XOR": operator.xor, "XCHG": lambda old, new: new,
}  # fmt: skip


def _active(mask: Any, shape: tuple[int, ...]) -> Any:
    if mask is None:
        return np.ones(shape, bool)
    return _spread(mask.data, shape).astype(bool)


def _spread(data: Any, shape: tuple[int, ...]) -> Any:
    """As many elements as this shape has. NumPy's function costs more than most blocks' sums."""
    return data if np.shape(data) == shape else np.broadcast_to(data, shape)
