"""What a loop's instructions allow: they are run again, with all operands in the nearest cache.

The loop's own vector instructions, on its own registers, so with its own chains of dependent sums,
take every operand from a few kilobytes; instructions that count and compute addresses become as
many plain ones. What is slower in the traced program than this is not the loop's structure: it is
operands that come from further away. Products, loads and stores also run alone.

They run in a process of their own, since code that others wrote may end a process.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from iced_x86 import (
    Code,
    Encoder,
    Instruction,
    MemoryOperand,
    OpKind,
    Register,
    RegisterExt,
)

from lowbit_lab.bench.core.remote import run_remote
from lowbit_lab.trace import roles

PRODUCTS, LOADS, STORES, TOGETHER = "products", "loads", "stores", "all together"
_SECONDS = 60.0
_SAMPLE_SECONDS, _SAMPLES = 4e-3, 9
_READ_BYTES, _WRITE_BYTES = 8 << 10, 4 << 10
_STEP = 64
_ACCUMULATORS = 12
_REFUSED = ("div", "idiv", "syscall", "cpuid", "xgetbv", "rdtsc", "ldtilecfg", "sttilecfg")
_HELPER = {1: Register.R10L, 2: Register.R10W, 4: Register.R10D, 8: Register.R10}
_PLAIN_LOADS = {
    128: Code.VEX_VMOVUPS_XMM_XMMM128,
    256: Code.VEX_VMOVUPS_YMM_YMMM256,
    512: Code.EVEX_VMOVUPS_ZMM_K1Z_ZMMM512,
}


def programs(loop: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """The loop's instructions as they are run again: each kind alone, and all. ValueError, with
    the reason, for a loop that cannot be: one that calls others, or with tiles."""
    for one in loop:
        name = roles.mnemonic(one)
        if roles.CALL in roles.roles(one):
            raise ValueError("the loop calls other functions")
        if name in _REFUSED or one.is_string_instruction or "tile" in name or _is_tile(one):
            raise ValueError(f"{name} cannot be run by itself")
    slots, free = _Slots(), _free(loop)
    found: dict[str, list[Instruction]] = {PRODUCTS: [], LOADS: [], STORES: [], TOGETHER: []}
    for one in loop[:-1] if roles.CONTROL in roles.roles(loop[-1]) else loop:
        does = set(roles.roles(one))
        if one.is_vsib:
            continue
        if not roles.is_vector(one) and roles.PREFETCH not in does:
            found[TOGETHER].append(Instruction.create_reg_mem(Code.LEA_R64_M, Register.R11, _NEXT))
            continue
        whole = slots.moved(one)
        found[TOGETHER].append(whole)
        if {roles.LOAD, roles.BROADCAST} & does:
            found[LOADS].append(_load_of(whole, does))
        if roles.WRITE_BACK in does:
            found[STORES].append(whole)
        if {roles.PRODUCTS, roles.ACCUMULATE} & does and roles.WRITE_BACK not in does:
            found[PRODUCTS].append(_without_memory(whole, free))
    return {name: made for name, made in found.items() if made}


_NEXT = MemoryOperand(Register.R11, displ=1, displ_size=1)


def _is_tile(instruction: Instruction) -> bool:
    return any(
        instruction.op_kind(n) == OpKind.REGISTER and RegisterExt.is_tmm(instruction.op_register(n))
        for n in range(instruction.op_count)
    )


class _Slots:
    """Places in the memory that operands are taken from and put to, in turn."""

    def __init__(self) -> None:
        self._read = self._written = 0

    def moved(self, instruction: Instruction) -> Instruction:
        """An instruction whose operand in memory lies in the next slot, and that leaves alone the
        registers by which the loop is run."""
        made = instruction.copy()
        _, writes = roles.accesses(instruction)
        for number in range(made.op_count):
            kind = made.op_kind(number)
            if kind == OpKind.REGISTER and RegisterExt.is_gpr(made.op_register(number)):
                made.set_op_register(number, _HELPER[RegisterExt.size(made.op_register(number))])
            elif kind == OpKind.MEMORY:
                made.memory_base, made.memory_index = Register.RDI, Register.NONE
                made.segment_prefix = Register.NONE
                made.memory_index_scale, made.memory_displ_size = 1, 8
                made.memory_displacement = self._next(writes)
        return made

    def _next(self, writes: bool) -> int:
        if writes:
            self._written = (self._written + _STEP) % _WRITE_BYTES
            return _READ_BYTES + self._written
        self._read = (self._read + _STEP) % _READ_BYTES
        return self._read


def _load_of(one: Instruction, does: set[str]) -> Instruction:
    """The load alone, of an instruction that also multiplies or adds."""
    if not {roles.PRODUCTS, roles.ACCUMULATE, roles.ARITHMETIC, roles.CONVERT} & does:
        return one
    place = MemoryOperand(Register.RDI, displ=int(one.memory_displacement), displ_size=8)
    wide = roles.vector_bits(one)
    target = next(
        one.op_register(n) for n in range(one.op_count)
        if one.op_kind(n) == OpKind.REGISTER and RegisterExt.is_vector_register(one.op_register(n))
    )  # fmt: skip
    code = _PLAIN_LOADS.get(wide, _PLAIN_LOADS[128])
    if wide < 512 and RegisterExt.number(target) > 15:
        target = {128: Register.XMM0, 256: Register.YMM0}[max(128, wide)]
    return Instruction.create_reg_mem(code, target, place)


def _free(loop: Sequence[Instruction]) -> int:
    """The number of a vector register that nothing in the loop writes; those from 16 on only where
    all vectors are such that can name them."""
    written = {RegisterExt.number(one.op0_register) for one in loop if roles.is_vector(one)}
    wide = all(roles.vector_bits(one) in (0, 512) for one in loop)
    numbers = [*range(15, -1, -1), *(range(16, 32) if wide else ())]
    return next((number for number in numbers if number not in written), 15)


def _without_memory(instruction: Instruction, free: int) -> Instruction:
    """With a register in place of what is loaded."""
    made = instruction.copy()
    for number in range(made.op_count):
        if made.op_kind(number) == OpKind.MEMORY:
            made.is_broadcast = False
            made.set_op_kind(number, OpKind.REGISTER)
            base = {512: Register.ZMM0, 256: Register.YMM0}.get(roles.vector_bits(instruction), 0)
            made.set_op_register(number, _register(base or Register.XMM0, free))
    return made


def _register(base: int, number: int) -> Any:
    return base + number


def peak_of(codes: Sequence[str]) -> list[Instruction]:
    """Products alone, as many at once as their latency needs: instructions by their names in
    iced-x86's `Code`, each working on what the one before it left, the last adding."""
    made = []
    for number in range(_ACCUMULATORS):
        for name in codes:
            wide = 512 if "ZMM" in name else 256 if "YMM" in name else 128
            base = {512: Register.ZMM0, 256: Register.YMM0, 128: Register.XMM0}[wide]
            own, between, first, second = (_register(base, n) for n in (number, 13, 14, 15))
            if len(codes) == 1:
                registers = own, first, second
            elif name == codes[-1]:
                registers = own, own, between
            else:
                registers = between, first if name == codes[0] else between, second
            made.append(Instruction.create_reg_reg_reg(getattr(Code, name), *registers))
    return made


def measured(wanted: Mapping[str, Sequence[Instruction]]) -> dict[str, float]:
    """Seconds of one round of each, in a process of its own. RuntimeError if that ends."""
    codes = list(map(_encoded, wanted.values()))
    found = run_remote(_seconds_of_each, codes, seconds=_SECONDS * len(codes))
    return dict(zip(wanted, found, strict=True))


def _seconds_of_each(codes: Sequence[bytes]) -> list[float]:
    return list(map(_seconds, codes))


def _encoded(loop: Sequence[Instruction]) -> bytes:
    """A function of a memory address and a number of rounds."""
    encoder = Encoder(64)
    at = 0
    wide = any(roles.vector_bits(one) == 512 or one.has_op_mask for one in loop)
    masks = range(1, 8) if wide else ()
    for number in masks:
        mask = _register(Register.K0, number)
        at += encoder.encode(
            Instruction.create_reg_reg_reg(Code.VEX_KXNORW_KR_KR_KR, mask, mask, mask), at
        )
    head = at
    for one in loop:
        at += encoder.encode(one, at)
    at += encoder.encode(Instruction.create_reg(Code.DEC_RM64, Register.RSI), at)
    at += encoder.encode(Instruction.create_branch(Code.JNE_REL32_64, head), at)
    if any(roles.vector_bits(one) >= 256 for one in loop):
        at += encoder.encode(Instruction.create(Code.VEX_VZEROUPPER), at)
    encoder.encode(Instruction.create(Code.RETNQ), at)
    return bytes(encoder.take_buffer())


def _seconds(code: bytes) -> float:
    """Of one round: the best of several samples of the time that this process runs."""
    with mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as area:
        area.write(code)
        place = ctypes.c_char.from_buffer(area)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(ctypes.addressof(place))
        memory = np.ones((_READ_BYTES + _WRITE_BYTES + 2 * _STEP) // 4, np.float32)
        start = -(-memory.ctypes.data // _STEP) * _STEP
        rounds, ran = 100, 0.0
        while (ran := _ran(function, start, rounds)) < _SAMPLE_SECONDS:
            rounds = int(min(10 * rounds, 1 + 1.2 * rounds * _SAMPLE_SECONDS / max(ran, 1e-6)))
        best = min(_ran(function, start, rounds) for _ in range(_SAMPLES))
        del place, function
    return best / rounds


def _ran(function: Callable[[int, int], None], start: int, rounds: int) -> float:
    before = time.process_time()
    function(start, rounds)
    return time.process_time() - before
