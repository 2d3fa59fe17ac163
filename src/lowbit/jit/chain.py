"""The machine code that runs one step after another: a kernel whose steps are its arguments.

Its slots, as jit.emit has them, are: the number of steps; where to write the clock at the beginning
and after each, or 0; for each step the kernel's address and where its own slots begin, counted from
the first of all; and those slots, each step's followed by its counters. So a network enters machine
code as one product does (jit.entry), its threads go from step to step by themselves, and none
begins a step before all items of the one before are done, since kernels end so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowbit.isa import get
from lowbit.jit.builder import counters
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded
from lowbit.jit.entry import bound
from lowbit.jit.threads import Shared

_NAME = "lowbit_steps"
_HEAD = 2  # words before the table of steps

_IR = f"""
declare i64 @llvm.readcyclecounter()

define void @{_NAME}(ptr %slots) {{
  %count = load i64, ptr %slots
  %stamps_at = getelementptr i64, ptr %slots, i64 1
  %stamps = load ptr, ptr %stamps_at
  %timed = icmp ne ptr %stamps, null
  br i1 %timed, label %clock, label %next
clock:
  %start = call i64 @llvm.readcyclecounter()
  %first = cmpxchg ptr %stamps, i64 0, i64 %start monotonic monotonic
  br label %next
next:
  %i = phi i64 [ 0, %0 ], [ 0, %clock ], [ %following, %done ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %step, label %end
step:
  %entry = shl i64 %i, 1
  %kernel_word = add i64 %entry, {_HEAD}
  %slots_word = add i64 %entry, {_HEAD + 1}
  %kernel_at = getelementptr i64, ptr %slots, i64 %kernel_word
  %begin_at = getelementptr i64, ptr %slots, i64 %slots_word
  %kernel = load ptr, ptr %kernel_at
  %begin = load i64, ptr %begin_at
  %arguments = getelementptr i64, ptr %slots, i64 %begin
  call void %kernel(ptr %arguments)
  br i1 %timed, label %stamp, label %done
stamp:
  %now = call i64 @llvm.readcyclecounter()
  %place = add i64 %i, 1
  %stamp_at = getelementptr i64, ptr %stamps, i64 %place
  store i64 %now, ptr %stamp_at
  br label %done
done:
  %following = add i64 %i, 1
  br label %next
end:
  ret void
}}
"""


Word = int | tuple[str, int]


@dataclass(frozen=True)
class Launch:
    """A kernel's address, and a word for each of its parameters: a number, or an argument that a
    call gives, by its name and a distance in bytes."""

    kernel: int
    words: Sequence[Word]


def chain(
    launches: Sequence[Launch], arguments: Sequence[str], threads: int, kept: Any
) -> Callable[..., None]:
    """A function of `arguments`, addresses or arrays in this order, that runs all of the launches.

    The last argument, beside those, is where clocks are written, int64 [1 + launches], all 0, or
    None.
    kept: lives as long as the function.
    """
    table: list[int] = []
    slots: list[Word] = []
    begin = _HEAD + 2 * len(launches)
    for one in launches:
        table += one.kernel, begin + len(slots)
        slots += *one.words, *counters(threads)
    words: list[Word] = [len(launches), ("stamps", 0), *table, *slots]
    # A word that a call fills has its own parameter; one argument may fill several.
    wanted = [*arguments, "stamps"]
    filled = {
        place: (wanted.index(word[0]), word[1])
        for place, word in enumerate(words)
        if isinstance(word, tuple)
    }
    names = [str(place) for place in range(len(words))]
    fixed: dict[str, Any] = {
        str(place): word for place, word in enumerate(words) if place not in filled
    }
    call = bound(_driver(), threads, names, [str(place) for place in filled], fixed | {"": kept})
    if threads > 1:
        call = Shared(call)
    order = tuple(filled.values())
    return lambda *given: call(*[_further(given[i], distance) for i, distance in order])


def _further(given: Any, distance: int) -> Any:
    """An argument, or the address of what lies some bytes behind its beginning."""
    if not distance:
        return given
    return (given if isinstance(given, int) else given.ctypes.data) + distance


@cache
def _driver() -> Loaded:
    return load(_NAME, get("generic"), lambda: _IR)
