"""The compiling backend: a kernel text becomes a module of LLVM IR.

The function it becomes has the signature `void kernel(int64_t *slots)`: one 8-byte slot for each
parameter, in order, followed by `builder.counters`. As many threads as these say, or fewer, may
enter with the same slots at the same time: each takes items from counters until none is left, and
waits behind each region until every item is done. So the result does not depend on how many threads
came, and one that comes too late finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Type, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import (
    LAST_NUMBERS,
    MAX_REGIONS,
    NUMBERS,
    PROCESSORS,
    REGION,
    REGIONS,
    RUNS,
    THREADS,
)
from lowbit.jit.function import Function

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_CYCLES_AND_PROCESSOR = ir.FunctionType(ir.LiteralStructType([_I64, _I32]), [])
_SPINS_BEFORE_YIELD = 1 << 8  # some 5 to 15 microseconds
_BITS = 64  # of threads that have a number; beyond, they are numbered as they come


class Emitter(Function):
    """A Builder that writes a kernel's function."""

    def __init__(self, isa: InstructionSet, name: str) -> None:
        super().__init__(isa, name, [Pointer(s64)])
        self._regions = 0
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
        self._check_bodies()
        self._wait()
        self.builder.ret_void()
        return self.module

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

    def _last_number(self) -> Any:
        """Where the last number on this processor stands; None where no instruction says which
        processor it is."""
        if not self.is_x86:
            return None
        b = self.builder
        both = self._call("llvm.x86.rdtscp", _CYCLES_AND_PROCESSOR)
        processor = b.and_(b.extract_value(both, 1), _I32(PROCESSORS - 1))
        table = b.load(self._counter(LAST_NUMBERS), typ=ir.PointerType())
        return b.gep(table, [b.zext(processor, _I64)], source_etype=_I8)

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
        self.pause()
        more = b.add(spins, _I64(1))
        # A thread that holds an item may have lost its core: let it have this one.
        with b.if_then(b.icmp_signed(">", more, _I64(_SPINS_BEFORE_YIELD)), likely=False):
            self._call("sched_yield", ir.FunctionType(_I32, []))
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
