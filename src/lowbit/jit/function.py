"""Functions of machine code: kernels (jit.emit), and what runs them, which is written like these.

A text of the second kind is a Python function whose first parameter `k` is a Function. The others
are annotated, by what they are: `Int`, `Int32` and `Bit` are numbers (an address is an Int),
`Words` and the ctypes.Structures are addresses of such, which Python reads and writes in the same
layout. Beside the statements of kernels it may say

    for _ in k.unless(i < n): ...        the opposite of `when`
    for _ in k.otherwise(): ...          right after `when` or `unless`: where that did not run
    for leave in k.loop(): ...           until the function returns, or the condition holds that
                                         leave(condition) is given
    k.returns(value)                     return early; the Python function returns at the end
    k.return_if(i < n, value)            the same, under a condition; also k.return_unless
    k.call(target, *arguments)           a C function by its name, an address, or another text

and use the atomic operations of LLVM. No interpreter runs it.
"""

from __future__ import annotations

import ctypes
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

from lowbit.isa import get, host
from lowbit.isa.generic import constant_like
from lowbit.isa.instruction import Call, Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Scalar, Type, Vector, bit, f32, f64, ir, s32, s64, tile, u8
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.jit.cache import is_known, load
from lowbit.jit.compile import Loaded

Int32 = Annotated[Value, s32]
Bit = Annotated[Value | bool, bit]
Text = Callable[..., Any]

_NUMBERS: dict[Any, Scalar] = {
    ctypes.c_int32: s32,
    ctypes.c_int64: s64,
    ctypes.c_float: f32,
    ctypes.c_double: f64,
}


class View:
    """Numbers or structures in memory, of a ctypes kind: `view[i]`, and `view + n` for those that
    follow. Members of the first structure are attributes; those that point to others are views."""

    def __init__(self, k: Function, kind: Any, pointer: Value) -> None:
        element: Any = _NUMBERS.get(kind, u8)
        vars(self).update(_k=k, _kind=kind, pointer=pointer.cast(element))

    def at(self, place: Value | int | str) -> Value:
        """The address of one of them, or of a member."""
        if isinstance(place, str):
            pointer = self.pointer + getattr(self._kind, place).offset
            return pointer.cast(_NUMBERS.get(_kinds(self._kind)[place], u8))
        if self._kind in _NUMBERS:
            return self.pointer + place
        return self.pointer + self._k.index(place) * ctypes.sizeof(self._kind)

    @property
    def end(self) -> Words:
        """What follows in memory."""
        return View(self._k, ctypes.c_int64, self.at(1))

    def __add__(self, count: Value | int) -> View:
        return View(self._k, self._kind, self.at(count))

    def __getitem__(self, index: Value | int) -> Any:
        return self._k.read(self._kind, self.at(index))

    def __setitem__(self, index: Value | int, value: Any) -> None:
        self._k.write(self.at(index), value)

    def __getattr__(self, name: str) -> Any:
        return self._k.read(_kinds(self._kind)[name], self.at(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._k.write(self.at(name), value)


Words = Annotated[View, ctypes.c_int64]


@cache
def _kinds(structure: type[ctypes.Structure]) -> dict[str, Any]:
    """The ctypes of its members."""
    return {member[0]: member[1] for member in structure._fields_}


class _Variable(Register):
    """A stack slot that LLVM's mem2reg turns into a register."""

    def __init__(self, function: Function, initial: Value) -> None:
        self._function = function
        with function.at_entry():
            self._slot: Any = function.builder.alloca(initial.type.llvm)
        if isinstance(initial.type, Pointer):
            self._slot.type = ir.PointerType()  # llvmlite 0.45 writes "ptr*", which LLVM refuses
        super().__init__(initial)

    def _get(self) -> Value:
        loaded = self._function.builder.load(self._slot, typ=self._type.llvm)
        return Value(self._function, self._type, loaded)

    def _put(self, new: Value) -> None:
        self._function.builder.store(new.payload, self._slot)


class Function(Builder):
    """A Builder that writes one LLVM function, into a module of its own or a given one."""

    def __init__(
        self,
        isa: InstructionSet,
        name: str,
        types: Sequence[Type],
        returns: Type | None = None,
        module: ir.Module | None = None,
    ) -> None:
        super().__init__(isa)
        self.module = ir.Module(name) if module is None else module
        self._returns = returns
        result = ir.VoidType() if returns is None else returns.llvm
        signature = ir.FunctionType(result, [type_.llvm for type_ in types])
        self.function = ir.Function(self.module, signature, name)
        self._entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self._entry_end = ir.IRBuilder(self._entry).branch(body)
        self.builder: Any = ir.IRBuilder(body)  # llvmlite's methods are untyped
        self._open = 0
        self._last: tuple[Any, Any] = None, None

    @contextmanager
    def at_entry(self) -> Iterator[None]:
        """Emit into the entry block, where stack slots belong."""
        block = self.builder.block
        self.builder.position_before(self._entry_end)
        yield
        self.builder.position_at_end(block)

    def execute(self, instruction: Instruction, operands: tuple[Any, ...]) -> Value | None:
        types, payloads, result = self.typed(instruction, operands)
        value = instruction.emit(Call(self.builder, types, result), *payloads)
        return None if result is None else Value(self, result, value)

    def _constant(self, value: float, type_: Type) -> Value:
        assert isinstance(type_, Scalar | Vector)
        return Value(self, type_, constant_like(type_, value))

    def advance(self, pointer: Value, elements: Value | int) -> Value:
        source = self._check_pointer(pointer).element.llvm
        moved = self.builder.gep(
            pointer.payload, [self.index(elements).payload], source_etype=source
        )
        return Value(self, pointer.type, moved)

    def reinterpret(self, pointer: Value, element: Scalar) -> Value:
        self._check_pointer(pointer)
        return Value(self, Pointer(element), pointer.payload)

    def local(self, element: Scalar, count: int) -> Value:
        with self.at_entry():
            return self._allocated(element, count)

    def _allocated(self, element: Scalar, count: Any, align: int = 64) -> Value:
        memory: Any = self.builder.alloca(element.llvm, count)
        memory.align = align
        memory.type = ir.PointerType()  # llvmlite gives it a typed one, which LLVM has not
        return Value(self, Pointer(element), memory)

    def _register(self, initial: Value) -> Register:
        return _Variable(self, initial)

    def _tile(self, number: int) -> Value:
        return Value(self, tile, ir.Constant(u8.llvm, number))

    # Statements.

    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]:
        self._check_step(step)
        first, end, by = self.index(start), self.index(stop), self.index(step)
        b = self.builder
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed("<", first.payload, end.payload), body, after)
        b.position_at_end(body)
        i = b.phi(s64.llvm)
        i.add_incoming(first.payload, before)
        self._open += 1
        yield Value(self, s64, i)
        self._open -= 1
        following = b.add(i, by.payload, flags=["nsw"])
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, end.payload), body, after)
        b.position_at_end(after)

    def when(self, condition: Value) -> Iterator[None]:
        return self._branch(condition, holds=True)

    def unless(self, condition: Value) -> Iterator[None]:
        """The body runs if the condition does not hold."""
        return self._branch(condition, holds=False)

    def _branch(self, condition: Value, holds: bool) -> Iterator[None]:
        b = self.builder
        body, after = b.append_basic_block(), b.append_basic_block()
        branch = b.cbranch(condition.payload, *((body, after) if holds else (after, body)))
        return self._body(body, after, branch)

    def otherwise(self) -> Iterator[None]:
        """The body runs if that of the `when` or `unless` just before did not."""
        branch, after = self._last
        if after is not self.builder.block or after.instructions:
            raise RuntimeError("k.otherwise does not follow the body of a k.when or k.unless")
        body = self.builder.append_basic_block()
        branch.operands = [body if target is after else target for target in branch.operands]
        return self._body(body, after, None)

    def _body(self, body: Any, after: Any, branch: Any) -> Iterator[None]:
        self.builder.position_at_end(body)
        self._open += 1
        yield
        self._open -= 1
        self._go(after)
        self.builder.position_at_end(after)
        self._last = branch, after

    def loop(self) -> Iterator[Callable[[Value], None]]:
        """The body runs again and again, until it returns or gives a condition that holds."""
        b = self.builder
        body, after = b.append_basic_block(), b.append_basic_block()

        def leave(condition: Value) -> None:
            rest = b.append_basic_block()
            b.cbranch(condition.payload, after, rest)
            b.position_at_end(rest)

        b.branch(body)
        b.position_at_end(body)
        self._open += 1
        yield leave
        self._open -= 1
        self._go(body)
        b.position_at_end(after)

    def _check_bodies(self) -> None:
        if self._open:
            raise RuntimeError(
                f"{self.function.name}: {self._open} bodies of k.range, k.when or k.parallel "
                "were left by break or return, which only the interpreter would have obeyed"
            )

    def _go(self, block: Any) -> None:
        if not self.builder.block.is_terminated:
            self.builder.branch(block)

    def returns(self, value: Any = None) -> None:
        """Return from the function, with a number, or an address where it returns one."""
        if self._returns is None:
            self.builder.ret_void()
        else:
            self.builder.ret(self._as(self._returns, value).payload)

    def return_if(self, condition: Value, value: Any = None) -> None:
        """`returns` where the condition holds. value: or a function of k that makes it there."""
        for _ in self.when(condition):
            self.returns(value(self) if callable(value) else value)

    def return_unless(self, condition: Value, value: Any = None) -> None:
        """`return_if` it does not hold."""
        for _ in self.unless(condition):
            self.returns(value(self) if callable(value) else value)

    # Memory and addresses.

    def view(self, kind: Any, address: Any) -> Any:
        """What lies at an address: `kind` is one of ctypes, or Words."""
        kind = getattr(kind, "__metadata__", (kind,))[0]
        return View(self, kind, self._as(Pointer(u8), address))

    def address(self, place: Any) -> Value:
        """An address as a number: of a view, of what a pointer points to, of another text."""
        return self._as(s64, place)

    def external(self, name: str) -> Value:
        """The address of a variable of this process."""
        variable: Any = self.module.globals.get(name)
        variable = variable or ir.GlobalVariable(self.module, u8.llvm, name)
        return Value(self, s64, self.builder.ptrtoint(variable, s64.llvm))

    def shared(self, kind: type[ctypes.Structure]) -> View:
        """The memory of the module for such a structure, zeros at first, which all texts share."""
        variable = self.module.globals.get(kind.__name__)
        if variable is None:
            bytes_ = ir.ArrayType(u8.llvm, ctypes.sizeof(kind))
            variable: Any = ir.GlobalVariable(self.module, bytes_, kind.__name__)
            variable.linkage, variable.align = "internal", 64
            variable.initializer = ir.Constant(bytes_, None)
            variable.type = ir.PointerType()  # as of `_allocated`
        return View(self, kind, Value(self, Pointer(u8), variable))

    def text(self, text: str) -> Value:
        """The address of a text, which ends with a zero."""
        content = bytearray(text.encode() + b"\0")
        kind = ir.ArrayType(u8.llvm, len(content))
        name = self.module.get_unique_name("text")
        variable: Any = ir.GlobalVariable(self.module, kind, name)
        variable.linkage, variable.global_constant = "private", True
        variable.initializer = ir.Constant(kind, content)
        return Value(self, s64, self.builder.ptrtoint(variable, s64.llvm))

    def variable(self, kind: type[ctypes.Structure]) -> View:
        """A structure of the function's own, undefined at first."""
        with self.at_entry():
            return View(self, kind, self._allocated(u8, ctypes.sizeof(kind), 8))

    def stack(self, size: Value, align: int = 64) -> Value:
        """So many bytes of the stack, until the function returns."""
        return self._allocated(u8, size.payload, align)

    def copy(self, target: Any, source: Any, size: Value | int) -> None:
        """So many bytes from one address to another."""
        kind = ir.FunctionType(
            ir.VoidType(), [ir.PointerType(), ir.PointerType(), s64.llvm, bit.llvm]
        )
        places = [self._as(Pointer(u8), place).payload for place in (target, source)]
        self._call("llvm.memcpy.p0.p0.i64", kind, [*places, self.index(size).payload, bit.llvm(0)])

    def read(self, kind: Any, pointer: Value) -> Any:
        """What lies there: a number, or a view of a structure, an array, what is pointed to."""
        if kind in _NUMBERS:
            return self._loaded(pointer, _NUMBERS[kind])
        if issubclass(kind, ctypes.Structure):
            return View(self, kind, pointer)
        if not issubclass(kind, ctypes.Array):
            pointer = self._loaded(pointer, Pointer(u8))
        return View(self, kind._type_, pointer)

    def _loaded(self, pointer: Value, type_: Type) -> Value:
        return Value(self, type_, self.builder.load(pointer.payload, typ=type_.llvm))

    def write(self, pointer: Value, value: Any) -> None:
        """Store a value, or a number of the type that the aligned pointer points to."""
        self.builder.store(self._as(self._check_pointer(pointer).element, value).payload,
                           pointer.payload)  # fmt: skip

    def _as(self, type_: Type, value: Any) -> Value:
        """A number of this type: a Python number, or an address in another form."""
        if callable(value):
            value = Value(self, Pointer(u8), self._function_of(value)[0])
        elif isinstance(value, View):
            value = value.pointer
        elif not isinstance(value, Value):
            value = self.constant(value, s64 if isinstance(type_, Pointer) else type_)
        if isinstance(type_, Pointer) and value.type == s64:
            return Value(self, type_, self.builder.inttoptr(value.payload, type_.llvm))
        if isinstance(value.type, Pointer) and type_ == s64:
            return Value(self, s64, self.builder.ptrtoint(value.payload, s64.llvm))
        if value.type != type_ and not isinstance(value.type, Pointer):
            raise TypeError(f"a {type_} is expected, got {value.type}")
        return value

    # Calls.

    def call(
        self, target: Any, *arguments: Any, returns: Type | None = s64, fixed: int | None = None
    ) -> Any:
        """Call a text, or a C function by name or address, which is given addresses as numbers.

        `returns`, `fixed`: of a C function, what it returns, and how many parameters come before
        those that vary in number.
        """
        if callable(target):
            function, types, returns = self._function_of(target)
            given = [self._as(*pair).payload for pair in zip(types, arguments, strict=True)]
            result = self.builder.call(function, given)
        else:
            given = [
                (one if isinstance(one, Value) and one.type in (s32, f64) else self._as(s64, one))
                for one in arguments
            ]  # fmt: skip
            kind = ir.FunctionType(
                ir.VoidType() if returns is None else returns.llvm,
                [one.type.llvm for one in given[:fixed]], var_arg=fixed is not None,
            )  # fmt: skip
            result = self._call(target, kind, [one.payload for one in given])
        return None if returns is None else Value(self, returns, result)

    def _call(self, target: Any, kind: ir.FunctionType, given: Sequence[Any] = ()) -> Any:
        """Call what is outside of the module, by its name or address."""
        if isinstance(target, Value):
            function = self.builder.inttoptr(target.payload, kind.as_pointer())
        else:
            function = self.module.globals.get(target) or ir.Function(self.module, kind, target)
        return self.builder.call(function, given)

    def _function_of(self, text: Text) -> tuple[ir.Function, list[Type], Type | None]:
        """The function of another text, which is emitted when it is first asked for."""
        kinds, returns = _signature(text)
        types = [_type_of(kind) for kind in kinds]
        name = f"{text.__module__}.{text.__name__}"
        function: Any = self.module.globals.get(name)
        if function is None:
            function = Function(self.isa, name, types, returns, self.module).emit(text)
            function.linkage = "private"
        return function, types, returns

    def emit(self, text: Text) -> ir.Function:
        """Run a text with this function's parameters, and end it."""
        pairs = zip(_signature(text)[0], self.function.args, strict=True)
        given = [(kind, Value(self, _type_of(kind), payload)) for kind, payload in pairs]
        answer = text(self, *(v if isinstance(kind, Scalar) else self.view(kind, v)
                              for kind, v in given))  # fmt: skip
        self._check_bodies()
        if answer is not None or self._returns is None:
            self.returns(answer)
        elif not self.builder.block.is_terminated:
            self.builder.unreachable()
        return self.function

    # What threads share.

    def load_atomic(self, pointer: Value, ordering: str) -> Value:
        element = self._check_pointer(pointer).element
        loaded = self.builder.load_atomic(
            pointer.payload, ordering, element.bytes, typ=element.llvm
        )
        return Value(self, element, loaded)

    def store_atomic(self, pointer: Value, value: Value | int, ordering: str) -> None:
        element = self._check_pointer(pointer).element
        payload, b = self._as(element, value).payload, self.builder
        # b.store_atomic asks a pointer for the type that it points to.
        b._insert(
            ir.instructions.StoreAtomicInstr(
                b.block, payload, pointer.payload, ordering, element.bytes
            )
        )

    def fetch(self, operation: str, pointer: Value, value: Value | int, ordering: str) -> Value:
        """The number there, before this operation (LLVM's "add", "sub", "and") changed it."""
        element = self._check_pointer(pointer).element
        payload = self._as(element, value).payload
        before = self.builder.atomic_rmw(operation, pointer.payload, payload, ordering)
        return Value(self, element, before)

    def replace(
        self, pointer: Value, expected: Value | int, value: Value | int, ordering: str
    ) -> Value:
        """Whether the number there was the one expected, in whose place now is another."""
        element = self._check_pointer(pointer).element
        pair = [self._as(element, number).payload for number in (expected, value)]
        answer = self.builder.cmpxchg(pointer.payload, *pair, ordering, "monotonic")
        return Value(self, bit, self.builder.extract_value(answer, 1))

    @property
    def is_x86(self) -> bool:
        return (self.isa.architecture or host.architecture()) == "x86_64"

    def pause(self) -> None:
        """Leave the memory that is waited for to those who write it."""
        if self.is_x86:
            self._call("llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []))
        else:
            self.builder.fence("seq_cst")  # which takes a while, too


@cache
def _signature(text: Text) -> tuple[list[Any], Type | None]:
    """What the parameters are, but for the first, and what is returned."""
    hints = typing.get_type_hints(text, include_extras=True)
    _, *kinds, returned = [getattr(hint, "__metadata__", (hint,))[0] for hint in hints.values()]
    return kinds, None if returned is type(None) else returned


def _type_of(kind: Any) -> Type:
    return kind if isinstance(kind, Scalar) else Pointer(u8)


def function_ir(text: Text) -> str:
    """The LLVM IR of a text, as a function of its name, and of those that it calls."""
    kinds, returns = _signature(text)
    function = Function(get("generic"), text.__name__, [*map(_type_of, kinds)], returns)
    function.emit(text)
    return str(function.module)


def compiled(text: Text, *parts: object) -> Loaded:
    """The machine code of a text, from the cache or compiled now. `parts`: what it depends on
    besides the source."""
    source = (f"{text.__module__}.{text.__qualname__}", *parts) if is_known(text) else ()
    return load(text.__name__, get("generic"), lambda: function_ir(text), *source)
