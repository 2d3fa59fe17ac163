"""The compiling backend: a kernel text becomes a module of LLVM IR.

The function it becomes has the signature `void kernel(int64_t *slots)`: one 8-byte slot for each
parameter, in order, followed by `builder.counters`. As many threads as these say, or fewer, may
enter with the same slots at the same time: each takes items from counters until none is left, and
waits behind each region until every item is done. So the result does not depend on how many threads
came, and one that comes too late finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from lowbit.isa import host
from lowbit.isa.generic import constant_like
from lowbit.isa.instruction import Call, Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Scalar, Type, Vector, s64, tile
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import (
    LAST_NUMBERS,
    MAX_REGIONS,
    NUMBERS,
    PROCESSORS,
    REGION,
    REGIONS,
    RUNS,
    THREADS,
    Builder,
)

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_SPINS_BEFORE_YIELD = 1 << 8  # some 5 to 15 microseconds
_BITS = 64  # of threads that have a number; beyond, they are numbered as they come


class _Variable(Register):
    """A stack slot that LLVM's mem2reg turns into a register."""

    def __init__(self, emitter: Emitter, initial: Value) -> None:
        self._emitter = emitter
        with emitter.at_entry():
            self._slot = emitter.builder.alloca(initial.type.llvm)
        super().__init__(initial)

    def _get(self) -> Value:
        loaded = self._emitter.builder.load(self._slot, typ=self._type.llvm)
        return Value(self._emitter, self._type, loaded)

    def _put(self, new: Value) -> None:
        self._emitter.builder.store(new.payload, self._slot)


class Emitter(Builder):
    """A Builder that writes one LLVM function."""

    def __init__(self, isa: InstructionSet, name: str) -> None:
        super().__init__(isa)
        self.module = ir.Module(name)
        signature = ir.FunctionType(ir.VoidType(), [ir.PointerType()])
        self.function = ir.Function(self.module, signature, name)
        self._entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self._entry_end = ir.IRBuilder(self._entry).branch(body)
        self.builder: Any = ir.IRBuilder(body)  # llvmlite's methods are untyped
        self._open = self._regions = 0
        self._parameters = 0
        self._pending: tuple[Any, ir.Value] | None = None
        self._claimed: Any = None

    def parameters(self, types: list[Type]) -> list[Value]:
        """Read the arguments from their slots."""
        slots, values = self.function.args[0], []
        for number, type_ in enumerate(types):
            slot = self.builder.gep(slots, [_I64(number)], source_etype=_I64)
            values.append(Value(self, type_, self.builder.load(slot, typ=type_.llvm)))
        self._parameters = len(types)
        return values

    def finish(self) -> ir.Module:
        """Close the function and return its module. It ends when all items are done."""
        if self._open:
            raise RuntimeError(
                f"{self.function.name}: {self._open} bodies of k.range, k.when or k.parallel "
                "were left by break or return, which only the interpreter would have obeyed"
            )
        self._wait()
        self.builder.ret_void()
        return self.module

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
            memory: Any = self.builder.alloca(element.llvm, count)
            memory.align = 64
            memory.type = ir.PointerType()  # llvmlite gives it a typed one, which LLVM has not
        return Value(self, Pointer(element), memory)

    def _register(self, initial: Value) -> Register:
        return _Variable(self, initial)

    def _tile(self, number: int) -> Value:
        return Value(self, tile, ir.Constant(ir.IntType(8), number))

    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]:
        self._check_step(step)
        first, end, by = self.index(start), self.index(stop), self.index(step)
        b = self.builder
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed("<", first.payload, end.payload), body, after)
        b.position_at_end(body)
        i = b.phi(_I64)
        i.add_incoming(first.payload, before)
        self._open += 1
        yield Value(self, s64, i)
        self._open -= 1
        following = b.add(i, by.payload, flags=["nsw"])
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, end.payload), body, after)
        b.position_at_end(after)

    def when(self, condition: Value) -> Iterator[None]:
        b = self.builder
        body, after = b.append_basic_block(), b.append_basic_block()
        b.cbranch(condition.payload, body, after)
        b.position_at_end(body)
        self._open += 1
        yield
        self._open -= 1
        b.branch(after)
        b.position_at_end(after)

    def parallel(self, items: Value) -> Iterator[Value]:
        if self._open:
            raise RuntimeError("k.parallel inside of another body: its items are counted only once")
        if self._regions >= MAX_REGIONS:
            raise RuntimeError(f"a kernel has at most {MAX_REGIONS} parallel regions")
        self._wait()
        place = REGIONS + self._regions * REGION
        self._regions += 1
        done, runs, size, first = self._counter(place), *self._cut(items.payload)
        b = self.builder
        before, head, run, take, claim, body, following, tell, after = (
            b.block, *(b.append_basic_block() for _ in range(8)),
        )  # fmt: skip
        b.branch(head)
        b.position_at_end(head)
        number, mine = b.phi(_I64), b.phi(_I64)
        number.add_incoming(_I64(0), before)
        mine.add_incoming(_I64(0), before)
        b.cbranch(b.icmp_signed("<", number, runs), run, tell)
        b.position_at_end(run)
        which = self._around(b.add(first, number), runs)
        begin = b.mul(which, size)
        left = b.sub(items.payload, begin)
        count = b.select(b.icmp_signed("<", left, size), left, size)
        taken = b.gep(self._counter(place + 1), [which], source_etype=_I32)
        b.branch(take)
        b.position_at_end(take)
        have = b.phi(_I64)
        have.add_incoming(mine, run)
        seen = b.sext(b.load_atomic(taken, "monotonic", 4, typ=_I32), _I64)
        b.cbranch(b.icmp_signed("<", seen, count), claim, following)
        b.position_at_end(claim)
        item = b.sext(b.atomic_rmw("add", taken, _I32(1), "monotonic"), _I64)
        b.cbranch(b.icmp_signed("<", item, count), body, following)
        b.position_at_end(body)
        self._open += 1
        yield Value(self, s64, b.add(begin, item))
        self._open -= 1
        have.add_incoming(b.add(have, _I64(1)), b.block)
        b.branch(take)
        b.position_at_end(following)
        number.add_incoming(b.add(number, _I64(1)), following)
        mine.add_incoming(have, following)
        b.branch(head)
        # Those who wait look at this counter, so it is changed once by each.
        b.position_at_end(tell)
        with b.if_then(b.icmp_signed(">", mine, _I64(0))):
            b.atomic_rmw("add", done, mine, "release")
        b.branch(after)
        b.position_at_end(after)
        self._pending = (done, items.payload)

    def thread(self) -> Value:
        if self._open:
            raise RuntimeError("k.thread inside of another body: a thread has one number")
        return Value(self, s64, self._number())

    def _counter(self, which: int) -> Any:
        place = self._parameters + which
        return self.builder.gep(self.function.args[0], [_I64(place)], source_etype=_I64)

    def _around(self, number: Any, count: Any) -> Any:
        """A number below 2 · count, as one below count."""
        b = self.builder
        return b.select(b.icmp_signed("<", number, count), number, b.sub(number, count))

    def _several(self) -> tuple[Any, Any, Any, Any]:
        """The number of threads; begin a block for several of them; that before, and that after."""
        b = self.builder
        threads, before = b.load(self._counter(THREADS), typ=_I64), b.block
        several, after = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", threads, _I64(1)), several, after)
        b.position_at_end(several)
        return threads, before, several, after

    def _cut(self, items: Any) -> tuple[Any, Any, Any]:
        """How many runs there are of items, the length of one, and which is this thread's own."""
        own = self._number()
        b = self.builder
        threads, before, several, after = self._several()
        most = _I64(RUNS)
        runs = b.select(b.icmp_signed("<", threads, most), threads, most)
        length = b.udiv(b.sub(b.add(items, runs), _I64(1)), runs)
        first = b.urem(own, runs)
        b.branch(after)
        b.position_at_end(after)
        found = []
        for alone, shared in ((_I64(1), runs), (items, length), (_I64(0), first)):
            found.append(b.phi(_I64))
            found[-1].add_incoming(alone, before)
            found[-1].add_incoming(shared, several)
        return found[0], found[1], found[2]

    def _number(self) -> Any:
        """The thread's number: the last on its processor, or the next that is free."""
        if self._claimed is not None:
            return self._claimed
        threads, before, _, after = self._several()
        b, numbers = self.builder, self._counter(NUMBERS)
        few, probe, again, found, arrive = (b.append_basic_block() for _ in range(5))
        b.cbranch(b.icmp_signed("<", threads, _I64(_BITS + 1)), few, arrive)
        b.position_at_end(few)
        last = self._last_number()
        wanted = _I64(0)
        if last is not None:
            wanted = b.zext(b.load_atomic(last, "monotonic", 1, typ=_I8), _I64)
        b.branch(probe)
        b.position_at_end(probe)
        number = b.phi(_I64)
        number.add_incoming(wanted, few)
        bit = b.shl(_I64(1), number)
        others = b.atomic_rmw("or", numbers, bit, "monotonic")
        b.cbranch(b.icmp_signed("==", b.and_(others, bit), _I64(0)), found, again)
        b.position_at_end(again)
        number.add_incoming(self._around(b.add(number, _I64(1)), threads), again)
        b.branch(probe)
        b.position_at_end(found)
        if last is not None:
            with b.if_then(b.icmp_signed("!=", number, wanted), likely=False):
                b.atomic_rmw("xchg", last, b.trunc(number, _I8), "monotonic")
        noted = b.block
        b.branch(after)
        b.position_at_end(arrive)
        arrived = b.atomic_rmw("add", numbers, _I64(1), "monotonic")
        b.branch(after)
        b.position_at_end(after)
        self._claimed = b.phi(_I64)
        for value, block in ((_I64(0), before), (number, noted), (arrived, arrive)):
            self._claimed.add_incoming(value, block)
        return self._claimed

    @property
    def _is_x86(self) -> bool:
        return (self.isa.architecture or host.architecture()) == "x86_64"

    def _last_number(self) -> Any:
        """Where the last number on this processor stands; None where no instruction says which
        processor it is."""
        if not self._is_x86:
            return None
        b = self.builder
        both = self._called("llvm.x86.rdtscp", ir.LiteralStructType([_I64, _I32]))
        processor = b.and_(b.extract_value(both, 1), _I32(PROCESSORS - 1))
        table = b.load(self._counter(LAST_NUMBERS), typ=ir.PointerType())
        return b.gep(table, [b.zext(processor, _I64)], source_etype=_I8)

    def _pause(self) -> None:
        """Leave the memory that is waited for to those who write it."""
        if self._is_x86:
            self._called("llvm.x86.sse2.pause", ir.VoidType())
        else:
            self.builder.fence("seq_cst")  # which takes a while, too

    def _called(self, name: str, returns: Any) -> Any:
        """Call a function without arguments."""
        kind = ir.FunctionType(returns, [])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.builder.call(function, [])

    def _wait(self) -> None:
        """Spin until the items of the region before are done by whichever threads took them."""
        if self._pending is None:
            return
        done, items = self._pending
        b = self.builder
        before, spin, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(spin)
        b.position_at_end(spin)
        spins = b.phi(_I64)
        spins.add_incoming(_I64(0), before)
        finished = b.icmp_signed(">=", b.load_atomic(done, "acquire", 8, typ=_I64), items)
        tired = b.append_basic_block()
        again = b.append_basic_block()
        b.cbranch(finished, after, tired)
        b.position_at_end(tired)
        self._pause()
        more = b.add(spins, _I64(1))
        # A thread that holds an item may have lost its core: let it have this one.
        with b.if_then(b.icmp_signed(">", more, _I64(_SPINS_BEFORE_YIELD)), likely=False):
            self._called("sched_yield", _I32)
        b.branch(again)
        b.position_at_end(again)
        spins.add_incoming(more, again)
        b.branch(spin)
        b.position_at_end(after)


def emit(
    text: Callable[..., None], types: list[Type], isa: InstructionSet, name: str, /, **static: Any
) -> ir.Module:
    """The LLVM module of a kernel text for one instruction set and its static arguments."""
    emitter = Emitter(isa, name)
    text(emitter, *emitter.parameters(types), **static)
    return emitter.finish()
