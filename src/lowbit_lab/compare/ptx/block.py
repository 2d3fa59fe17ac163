"""A block of threads that runs PTX.

Each register is a vector over the threads of a block. Threads that took different branches go on
by themselves, those first that are furthest behind in the text, until they meet again; at a barrier
they wait for each other. That is what a GPU may do, and one order of several.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.compare.code import Instruction
from lowbit_lab.compare.ptx import operations
from lowbit_lab.compare.ptx.memory import LOCAL, REGION_BITS, SHARED
from lowbit_lab.compare.ptx.operations import (
    COMPARE,
    COMPUTE,
    convert,
    dot_product,
    dtype_of,
    funnel,
    fused,
)

if TYPE_CHECKING:
    from lowbit_lab.compare.ptx.execute import Launch, Trace
    from lowbit_lab.run.trace import Grid

Array = NDArray[Any]

WARP = operations.WARP
_CALLED = re.compile(r"call\S*\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)")
_COUNTS_FROM = {"shl": 1, "shr": 1, "bfe": 1, "bfi": 2, "lop3": 3}
"""The operand from which on operands are plain counts."""
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas")


class NotInterpretedError(NotImplementedError):
    """The interpreter of PTX lacks an instruction."""


class Block:
    """One block of a launch, from its first instruction to its last."""

    def __init__(self, launch: Launch, index: Grid, trace: Trace | None) -> None:
        self.launch, self.trace = launch, trace
        self.code = launch.ptx.code
        x, y, z = launch.block
        self.lanes = x * y * z
        number = np.arange(self.lanes, dtype=np.uint32)
        self.special = {
            **dict(
                zip(
                    ("tid.x", "tid.y", "tid.z"),
                    (number % x, number // x % y, number // (x * y)),
                    strict=True,
                )
            ),
            **self._same("ntid", launch.block),
            **self._same("ctaid", index),
            **self._same("nctaid", launch.grid),
            "laneid": number % WARP,
            "warpid": number // WARP,
            **operations.lane_masks(self.lanes),
            "dynamic_smem_size": np.full(self.lanes, launch.dynamic_shared, np.uint32),
        }
        self.registers: dict[str, Array] = {}
        self.shared = np.zeros(max(launch.bytes_of("shared"), 8) + 8, np.uint8)
        self.local = np.zeros((self.lanes, -(-launch.bytes_of("local") // 8) * 8 + 8), np.uint8)
        self.counter = np.zeros(self.lanes, np.int64)
        # The threads that wait at a barrier of the block, and of their warp.
        self.waiting, self.warp_waiting = (np.zeros(self.lanes, bool) for _ in range(2))
        self.votes = np.zeros(self.lanes, bool)
        self.voted: tuple[str, str] | None = None
        self.active = np.ones(self.lanes, bool)

    def _same(self, name: str, dims: Grid) -> dict[str, Array]:
        return {
            f"{name}.{axis}": np.full(self.lanes, size, np.uint32)
            for axis, size in zip("xyz", dims, strict=True)
        }

    def run(self, most: int) -> bool:
        steps, end = 0, len(self.code.instructions)
        starts = set(self.code.labels.values())
        while True:
            going = (self.counter < end) & ~self.waiting & ~self.warp_waiting
            if not going.any():
                if not (self.waiting | self.warp_waiting).any():
                    return True
                self._release()
                continue
            at = int(self.counter[going].min())
            self.active = going & (self.counter == at)
            while True:
                self._step(at)
                steps += 1
                if most and steps >= most:
                    return False
                one = self.code.instructions[at]
                at += 1
                if (
                    one.kind == "control"
                    or at in starts
                    or at >= end
                    or one.opcode in ("ret", "exit")
                ):
                    break
                self.counter[self.active] = at

    def _release(self) -> None:
        """Let go those that wait for their warp, or else those that wait for the block."""
        if self.warp_waiting.any():
            self.warp_waiting[:] = False
            return
        if self.voted is not None:
            target, mode = self.voted
            self.put(target, operations.barrier(mode, self.votes, self.waiting), self.waiting)
            self.voted = None
        self.waiting[:] = False

    def _wait(self, one: Instruction, rest: list[str], active: Array) -> None:
        """bar, barrier: of a warp, of the block, or of the block with a vote (bar.red)."""
        if "warp" in rest:
            self.warp_waiting[active] = True
            return
        self.waiting[active] = True
        if "red" in rest:
            held = self.value(one.operands[-1], np.dtype(bool))
            self.votes = np.where(active, held, self.votes)
            self.voted = one.operands[0], next(m for m in rest if m in ("popc", "and", "or"))

    def _step(self, at: int) -> None:
        one, active = self.code.instructions[at], self.active
        if self.trace is not None:
            self.trace.counts[at] = self.trace.counts.get(at, 0) + 1
        if one.guard:
            held = self.registers[one.guard.lstrip("!")]
            active = active & (~held if one.guard.startswith("!") else held)
        base, *rest = one.opcode.split(".")
        self.counter[self.active] = at + 1
        try:
            if base == "bra":
                self.counter[active] = self.code.labels[one.operands[0]]
            elif base in ("ret", "exit"):
                self.counter[active] = len(self.code.instructions)
            elif base in ("bar", "barrier"):
                self._wait(one, rest, active)
            elif base == "call" or (base in ("st", "ld") and self._of_call(one)):
                raise KeyError("a call of a function that is not inlined")
            elif base == "cp" and rest[0] == "async" and one.kind == "memory":
                self._copy(at, one, active)
            elif one.kind == "memory" or base in ("ld", "st"):
                self._access(at, one, base, rest, active)
            elif base not in ("cp", "membar", "fence", "prefetch", "nanosleep"):
                self._compute(one, base, rest, active)
        except KeyError as error:
            raise self._not_interpreted(one, error) from None
        except (TypeError, ValueError, OverflowError, StopIteration) as error:
            raise self._not_interpreted(one, error) from error
        except IndexError as error:
            place = "" if one.line is None else f"line {one.line}: "
            raise type(error)(f"{place}{error}") from None

    def _not_interpreted(self, one: Instruction, error: Exception) -> NotInterpretedError:
        place = "" if one.line is None else f"line {one.line}: "
        called = [c[1] for each in self.code.instructions if (c := _CALLED.match(each.text))]
        calls = f"; the kernel calls {', '.join(dict.fromkeys(called))}" if called else ""
        text = " ".join(one.text.split())[:60]
        return NotInterpretedError(
            f"{place}the interpreter of PTX lacks {one.opcode} ({text}): {error.args[0]}{calls}"
        )

    def value(self, operand: str, kind: np.dtype[Any]) -> Array:
        """A register, number or special register as a vector of a type."""
        negative = operand.startswith("!")
        operand = operand.lstrip("!")
        if operand in self.registers:
            held = self.registers[operand]
        elif (found := operand.lstrip("%")) in self.special:
            held = self.special[found]
        elif operand in self.launch.symbols:
            held = np.full(self.lanes, self.launch.symbols[operand][1], np.uint64)
        elif operand in self.launch.addresses:
            held = np.full(self.lanes, self.launch.addresses[operand], np.uint64)
        else:
            return _number(operand, kind, self.lanes)
        if kind.kind == "b" or held.dtype.kind == "b":
            return ~held if negative else held
        width = np.dtype(f"u{kind.itemsize}")
        return (held if held.dtype == width else held.astype(width)).view(kind)

    def put(self, register: str, values: Array, active: Array) -> None:
        """Write a register in active threads."""
        if register == "_":
            return
        bits = (
            values
            if values.dtype == bool
            else np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
        )
        if not active.all():
            old = self.registers.get(register)
            if old is None or old.dtype != bits.dtype:
                old = np.zeros(self.lanes, bits.dtype) if old is None else old.astype(bits.dtype)
            bits = np.where(active, bits, old)
        self.registers[register] = bits

    def _compute(self, instruction: Instruction, base: str, rest: list[str], active: Array) -> None:
        target, *operands = instruction.operands
        types = [dtype_of(name) for name in rest if name in _KNOWN]
        if base == "mov" or base == "cvta":
            self._move(target, operands[0], types, base, rest, active)
        elif base == "cvt":
            to, given = types
            narrow = self.value(operands[0], given)
            self.put(target, convert(narrow, to, rest), active)
        elif base in ("setp", "set"):
            self._compare(target, operands, rest, types, active)
        elif base in ("shfl", "vote", "match", "redux", "activemask"):
            self._together(target, operands, base, rest, types, active)
        elif base == "dp4a":
            given = [self.value(o, np.dtype("u4")) for o in operands]
            self.put(target, dot_product(instruction.opcode, *given), active)
        elif base == "shf":
            low, high, by = (self.value(o, np.dtype("u4")) for o in operands)
            self.put(target, funnel(low, high, by, "l" in rest, "wrap" in rest), active)
        elif base in ("fma", "mad") and types[-1].kind == "f":
            self.put(target, fused(*(self.value(o, types[-1]) for o in operands)), active)
        else:
            self.put(target, self._plain(base, rest, operands, types), active)

    def _plain(
        self, base: str, rest: list[str], operands: list[str], types: list[np.dtype[Any]]
    ) -> Array:
        kind = types[-1]
        name = next(
            (
                f"{base}.{s}"
                for s in ("wide", "hi", "shiftamt")
                if s in rest and f"{base}.{s}" in COMPUTE
            ),
            base,
        )
        kinds = [kind] * len(operands)
        if name == "selp":
            kinds[-1] = np.dtype(bool)
        elif base in _COUNTS_FROM:
            first = _COUNTS_FROM[base]
            kinds[first:] = [np.dtype("u4")] * len(operands[first:])
        elif name == "mad.wide":
            kinds[-1] = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
        made = COMPUTE[name](*(self.value(o, k) for o, k in zip(operands, kinds, strict=True)))
        return (
            made.astype(kind)
            if name in ("selp", "add", "sub", "mul", "mad") and made.dtype != bool
            else made
        )

    def _move(
        self, target: str, source: str, types: list[np.dtype[Any]], base: str, rest: list[str],
        active: Array,
    ) -> None:  # fmt: skip
        kind = types[-1]
        if base == "cvta":
            number = {"shared": SHARED, "local": LOCAL}.get(
                next((s for s in rest if s in ("shared", "local")), ""), 0
            )
            values = self.value(source, np.dtype("u8"))
            window = np.uint64(number << REGION_BITS)
            self.put(target, values - window if "to" in rest else values + window, active)
        elif target.startswith("{"):
            parts = [p.strip() for p in target.strip("{}").split(",")]
            width = kind.itemsize // len(parts)
            whole = self.value(source, np.dtype(f"u{kind.itemsize}"))
            for part, column in zip(
                parts,
                np.ascontiguousarray(whole).view(f"u{width}").reshape(self.lanes, -1).T,
                strict=True,
            ):
                self.put(part, np.ascontiguousarray(column), active)
        elif source.startswith("{"):
            parts = [p.strip() for p in source.strip("{}").split(",")]
            width = np.dtype(f"u{kind.itemsize // len(parts)}")
            whole = np.stack([self.value(p, width) for p in parts], axis=1)
            self.put(
                target, np.ascontiguousarray(whole).view(f"u{kind.itemsize}").reshape(-1), active
            )
        else:
            self.put(target, self.value(source, kind), active)

    def _compare(
        self, target: str, operands: list[str], rest: list[str], types: list[np.dtype[Any]],
        active: Array,
    ) -> None:  # fmt: skip
        a, b = (self.value(o, types[-1]) for o in operands[:2])
        made = COMPARE[rest[0]](a, b)
        if len(operands) > 2:
            join = next(r for r in rest[1:] if r in ("and", "or", "xor"))
            made = COMPUTE[join](made, self.value(operands[2], np.dtype(bool)))
        first, _, second = target.partition("|")
        self.put(first, made, active)
        if second:
            self.put(second, ~made, active)

    def _together(
        self, target: str, operands: list[str], base: str, rest: list[str], types: list[Any],
        active: Array,
    ) -> None:  # fmt: skip
        """What threads of a warp do together; some have a second result, whether it held."""
        held = np.zeros(0, bool)
        if base == "activemask":
            made = operations.vote(["ballot"], np.ones(self.lanes, bool), active)
        elif base == "shfl":
            given = (self.value(o, np.dtype("u4")) for o in operands[:3])
            made, held = operations.shuffle(rest, *given)
        elif base == "vote":
            made = operations.vote(rest, self.value(operands[0], np.dtype(bool)), active)
        elif base == "match":
            made, held = operations.match(self.value(operands[0], types[-1]), active, "all" in rest)
        else:
            made = operations.reduce(rest, self.value(operands[0], types[-1]), active)
        first, _, second = target.partition("|")
        self.put(first.strip(), made, active)
        if second:
            self.put(second.strip(), held, active)

    def _of_call(self, one: Instruction) -> bool:
        """Whether a load or store is of the parameters of a call."""
        names = [o.strip("[] ").partition("+")[0] for o in one.operands if o.startswith("[")]
        return ".param" in one.opcode and any(n not in self.launch.parameters for n in names)

    def _access(self, at: int, one: Instruction, base: str, rest: list[str], active: Array) -> None:
        if base not in ("ld", "ldu", "st", "atom", "red") or (
            base in ("atom", "red") and "v2" in rest
        ):
            raise KeyError("this access is not interpreted")
        kind = next(dtype_of(name) for name in reversed(rest) if name in _KNOWN)
        size = kind.itemsize
        first, second, *_ = one.operands
        place, data = (second, first) if base in ("ld", "ldu", "atom") else (first, second)
        if "param" in rest:
            name, offset = _bracketed(place)
            held = self.launch.parameters[name][offset : offset + size]
            value = np.frombuffer(held, f"u{size}")[0]
            self.put(data, np.full(self.lanes, value, f"u{size}"), active)
            return
        addresses = self._address(place, one.space)
        if self.trace is not None:
            self.trace.note(at, addresses, active)
        parts = [p.strip() for p in data.strip("{}").split(",")]
        if base in ("atom", "red"):
            self._atomic(one, base, rest, addresses, active, kind)
            return
        for number, part in enumerate(parts):
            there = addresses + np.uint64(number * size)
            if base in ("ld", "ldu"):
                self.put(part, self._widened(self._load(there, active, size), kind, part), active)
            else:
                values = self.value(part, np.dtype(f"u{size}"))
                self._store(there, active, values)

    def _copy(self, at: int, instruction: Instruction, active: Array) -> None:
        """cp.async: from global to shared memory; what lies beyond the source's size is 0."""
        target, source, whole, *given = instruction.operands
        target, source = self._address(target, "shared"), self._address(source, "global")
        if self.trace is not None:
            self.trace.note(at, source, active)
        sizes = self.value(given[0] if given else whole, np.dtype("u4"))
        for start in range(0, int(whole, 0), 4):
            step = np.uint64(start)
            values = self._load(source + step, active & (sizes > start), 4)
            self._store(target + step, active, np.where(sizes > start, values, 0).astype(np.uint32))

    def _widened(self, values: Array, kind: np.dtype[Any], register: str) -> Array:
        """A signed load into a larger register keeps the sign."""
        return values.view(kind).astype(np.int64).view(np.uint64) if kind.kind == "i" else values

    def _address(self, place: str, space: str) -> Array:
        base, offset = _bracketed(place)
        values = self.value(base, np.dtype("u8")) + np.uint64(offset & (2**64 - 1))
        number = {"shared": SHARED, "local": LOCAL}.get(space, 0)
        if base in self.launch.symbols and not number:
            number = {"shared": SHARED, "local": LOCAL}[self.launch.symbols[base][0]]
        return values + np.uint64(number << REGION_BITS)

    def _own(self, addresses: Array, active: Array) -> tuple[int, Array]:
        """The region that these addresses lie in, and where in it."""
        numbers = (addresses[active] >> np.uint64(REGION_BITS)).astype(np.int64)
        first = int(numbers[0]) if len(numbers) else 0
        return first, (addresses & np.uint64((1 << REGION_BITS) - 1)).astype(np.int64)

    def _load(self, addresses: Array, active: Array, size: int) -> Array:
        first, offsets = self._own(addresses, active)
        if first not in (SHARED, LOCAL):
            return self.launch.memory.load(addresses, active, size)
        held, row = self._held(first, size)
        at = np.where(active, offsets // size, 0)
        return held[row, at] if first == LOCAL else held[at]

    def _store(self, addresses: Array, active: Array, values: Array) -> None:
        first, offsets = self._own(addresses, active)
        if first not in (SHARED, LOCAL):
            self.launch.memory.store(addresses, active, values)
            return
        held, row = self._held(first, values.dtype.itemsize)
        at = offsets[active] // values.dtype.itemsize
        if first == LOCAL:
            held[row[active], at] = values[active]
        else:
            held[at] = values[active]

    def _held(self, number: int, size: int) -> tuple[Array, Array]:
        if number == LOCAL:
            return self.local.view(f"u{size}"), np.arange(self.lanes)
        whole = len(self.shared) // size * size
        return self.shared[:whole].view(f"u{size}"), np.zeros(0)

    def _atomic(
        self, instruction: Instruction, base: str, rest: list[str], addresses: Array, active: Array,
        kind: np.dtype[Any],
    ) -> None:  # fmt: skip
        """One thread after the other."""
        what = next(name for name in rest if name in _ATOMICS)
        first = 2 if base == "atom" else 1
        given = [self.value(o, kind) for o in instruction.operands[first:]]
        old = np.zeros(self.lanes, kind)
        only = np.zeros(self.lanes, bool)
        for lane in np.flatnonzero(active):
            only[:] = False
            only[lane] = True
            old[lane] = self._load(addresses, only, kind.itemsize).view(kind)[lane]
            new = given[0].copy()
            if what == "cas":
                new = np.where(old == given[0], given[1], old)
            elif what != "exch":
                new = COMPUTE[what](old, given[0])
            self._store(addresses, only, np.ascontiguousarray(new).view(f"u{kind.itemsize}"))
        if base == "atom":
            self.put(instruction.operands[0], old, active)


_KNOWN = {f"{letter}{n}" for letter in "bus" for n in (8, 16, 32, 64)} | {
    "f16",
    "f32",
    "f64",
    "pred",
}


def _bracketed(place: str) -> tuple[str, int]:
    """The register or name, and the offset, of [%rd1+4]."""
    base, _, offset = place.strip("[] ").replace("+ ", "+").replace(" +", "+").partition("+")
    return base.strip(), int(offset or "0", 0)


def _number(text: str, kind: np.dtype[Any], lanes: int) -> Array:
    """A constant. KeyError for what is none."""
    if text.startswith(("0f", "0F", "0d", "0D")):
        wide = text[1] in "dD"
        value: Any = struct.unpack(">d" if wide else ">f", bytes.fromhex(text[2:]))[0]
        made = np.full(lanes, value, np.float64 if wide else np.float32)
        return (
            made
            if kind.kind == "f" and made.dtype == kind
            else made.view(f"u{made.itemsize}").view(kind)
        )
    try:
        whole = int(text.rstrip("U"), 0)
    except ValueError:
        raise KeyError(text) from None
    if kind.kind == "b":
        return np.full(lanes, bool(whole))
    bits = kind.itemsize * 8
    return np.full(lanes, whole & ((1 << bits) - 1), f"u{kind.itemsize}").view(kind)
