"""The compiling backend: a kernel text becomes a module of LLVM IR.

The function it becomes has the signature `void kernel(int64_t *slots, int64_t *area, int64_t
thread, int64_t region)`: a slot of 8 bytes for each parameter, in order; what the threads of the
call share (jit.area), the thread's number, and that of the first region. As many threads as the
area says, or fewer, may enter at the same time: each takes items until none is left, and waits
behind each region until every item is done. So the result does not depend on how many threads came,
and one that comes too late finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Type, s32, s64
from lowbit.isa.value import Register, Value
from lowbit.jit.area import DONE, LINE, TAKEN, THREADS
from lowbit.jit.builder import MAX_REGIONS, RUNS
from lowbit.jit.function import Function

_SPINS_BEFORE_YIELD = 1 << 8  # some 5 to 15 microseconds
_REGION_BIT = 32  # of what counts items, where the region's number begins


class Emitter(Function):
    """A Builder that writes a kernel's function."""

    def __init__(self, isa: InstructionSet, name: str) -> None:
        super().__init__(isa, name, [Pointer(s64), Pointer(s64), s64, s64])
        self._regions = 0
        self._pending: _Region | None = None

    def parameters(self, types: list[Type]) -> list[Value]:
        """Read the arguments from their slots."""
        slots = Value(self, Pointer(s64), self.function.args[0])
        return [self._loaded(slots + number, type_) for number, type_ in enumerate(types)]

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
        region = self._pending = self._region(items)
        self._regions += 1
        for number in self.range(0, region.runs):
            which = self._around(region.first + number, region.runs)
            begin, count = region.run(which)
            taken, done, have = region.at(which, TAKEN), region.at(which, DONE), self._counter()
            for leave in self.loop():
                seen = self.load_atomic(taken, "monotonic")
                item = maximum(seen - region.word, self.index(0))  # none of this region is taken
                leave(count < item + 1)
                for _ in self.when(self.replace(taken, seen, region.word + item + 1, "monotonic")):
                    yield begin + item
                    have.value = have.value + 1
            # Those who wait look at this number, so it is changed once by each.
            for _ in self.when(have.value > 0):
                for leave in self.loop():
                    seen = self.load_atomic(done, "monotonic")
                    all_ = maximum(seen, region.word) + have.value
                    leave(self.replace(done, seen, all_, "release"))

    def thread(self) -> Value:
        return Value(self, s64, self.function.args[2])

    def _counter(self, first: Value | int = 0) -> Register:
        return self.register(self.index(first))

    def _around(self, number: Value, count: Value) -> Value:
        """A number below 2 · count, as one below count."""
        return select(number < count, number, number - count)

    def _region(self, items: Value) -> _Region:
        """Items, cut into runs, of which one is this thread's own."""
        shared, own, first = (
            Value(self, one, payload) for one, payload in
            zip((Pointer(s64), s64, s64), self.function.args[1:], strict=True)
        )  # fmt: skip
        threads = (shared + THREADS).load()
        runs, length, mine = self._counter(1), self._counter(items), self._counter()
        for _ in self.when(threads > 1):
            runs.value = minimum(threads, self.index(RUNS))
            length.value, mine.value = (items + runs.value - 1) // runs.value, own % runs.value
        word = (first + self._regions) << _REGION_BIT
        return _Region(shared, word, items, runs.value, length.value, mine.value)

    def _wait(self) -> None:
        """Spin until the items of the region before are done by whichever threads took them."""
        if self._pending is None:
            return
        region, self._pending, spins = self._pending, None, self._counter()
        for which in self.range(0, region.runs):
            _, count = region.run(which)
            for leave in self.loop():
                seen = self.load_atomic(region.at(which, DONE), "acquire")
                leave((count < 1) | (region.word + count < seen + 1))
                self.pause()
                spins.value = spins.value + 1
                # A thread that holds an item may have lost its core: let it have this one.
                for _ in self.when(spins.value > _SPINS_BEFORE_YIELD):
                    self.call("sched_yield", returns=s32)


@dataclass(frozen=True)
class _Region:
    """What threads share; what counts the region's items begins with, see jit.area; the items, how
    many runs they are cut into, the length of one, and which is this thread's own."""

    shared: Value
    word: Value
    items: Value
    runs: Value
    length: Value
    first: Value

    def run(self, which: Value) -> tuple[Value, Value]:
        """The first item of a run, and how many it has; 0 or less of none."""
        begin = which * self.length
        return begin, minimum(self.items - begin, self.length)

    def at(self, run: Value, word: int) -> Value:
        """Where a word of a run's line is."""
        return self.shared + ((run + 1) * LINE + word)


def emit(
    text: Callable[..., None], types: list[Type], isa: InstructionSet, name: str, /, **static: Any
) -> ir.Module:
    """The LLVM module of a kernel text for one instruction set and its static arguments."""
    emitter = Emitter(isa, name)
    text(emitter, *emitter.parameters(types), **static)
    return emitter.finish()
