"""What each instruction of a loop does for a product: its roles, and what it multiplies.

The names of instructions are those of Intel's and AMD's manuals; which instruction set one belongs
to is told by iced-x86, not here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from iced_x86 import (
    Code,
    CpuidFeature,
    FlowControl,
    FormatMnemonicOptions,
    Formatter,
    FormatterSyntax,
    Instruction,
    InstructionInfoFactory,
    OpAccess,
    OpKind,
    RegisterExt,
)

LOAD, BROADCAST, PRODUCTS, ACCUMULATE, WRITE_BACK = (
    "load", "broadcast", "products", "accumulate", "write-back",
)  # fmt: skip
PREFETCH, CONVERT, SHUFFLE, ARITHMETIC, CONTROL, ADDRESS, CALL, WAIT, OTHER = (
    "prefetch", "convert", "shuffle", "arithmetic", "control", "addresses", "call", "wait", "other",
)  # fmt: skip
ROLES = (
    BROADCAST, LOAD, PRODUCTS, ACCUMULATE, CONVERT, SHUFFLE, ARITHMETIC, WRITE_BACK, PREFETCH,
    ADDRESS, CONTROL, CALL, WAIT, OTHER,
)  # fmt: skip

_formatter = Formatter(FormatterSyntax.INTEL)
_formatter.digit_separator = ""
_formatter.space_after_operand_separator = True
_information = InstructionInfoFactory()
_FEATURES = {getattr(CpuidFeature, n): n for n in dir(CpuidFeature) if not n.startswith("_")}


@dataclass(frozen=True)
class Multiplier:
    """Instructions that multiply: bits of an element of their operands, the arithmetic, and
    whether they add to what was there. tile: multiply-adds of a matrix register's instruction."""

    pattern: str
    arithmetic: str
    bits: int
    adds: bool
    tile: int = 0


# The first that fits. A tile has 16 rows of 64 bytes; with fewer the instruction does less.
MULTIPLIERS = (
    Multiplier(r"tdpb(uu|us|su|ss)d", "int8", 8, True, 16 * 16 * 64),
    Multiplier(r"tdpbf16ps", "bfloat16", 16, True, 16 * 16 * 32),
    Multiplier(r"tdpfp16ps", "float16", 16, True, 16 * 16 * 32),
    Multiplier(r"vpdpb[us][us]ds?", "int8", 8, True),
    Multiplier(r"vpdpw[us][us]ds?", "int16", 16, True),
    Multiplier(r"vdpbf16ps", "bfloat16", 16, True),
    Multiplier(r"v?pmaddubsw", "int8", 8, False),
    Multiplier(r"v?pmaddwd", "int16", 16, False),
    Multiplier(r"v?pmull?[lu]?d", "int32", 32, False),
    Multiplier(r"v?pmullw|v?pmulh\w*", "int16", 16, False),
    Multiplier(r"vfn?m(add|sub|addsub|subadd)\d*ps", "float32", 32, True),
    Multiplier(r"vfn?m(add|sub|addsub|subadd)\d*pd", "float64", 64, True),
    Multiplier(r"vfn?m(add|sub|addsub|subadd)\d*ph", "float16", 16, True),
    Multiplier(r"vfn?m(add|sub)\d*s[sd]", "scalar", 0, True),
    Multiplier(r"v?mulps", "float32", 32, False),
    Multiplier(r"v?mulpd", "float64", 64, False),
    Multiplier(r"v?muls[sd]|imul|mulx?", "scalar", 0, False),
)

_BROADCASTS = re.compile(r"v?p?(broadcast\w+|movddup)")
_CONVERTS = re.compile(r"v?(cvt\w+|pmov[sz]x\w+|pmov(?!msk)\w+|packs\w+|packus\w+)|vround\w*")
_PACKS = re.compile(r"v?pack[us]s\w+")
_SHUFFLES = re.compile(
    r"v?p?(shuf\w*|perm\w*|unpck\w*|punpck\w*|align\w*|insert\w*|insr\w*|extract\w*|extr\w*|"
    r"blend\w*|movlhps|movhlps|movshdup|movsldup|compress\w*|expand\w*|gather\w*|sll?dq)|pinsr\w"
)
_ADDS = re.compile(r"v?(add|sub)p[sdh]|v?p(add|sub)[bwdq]|v?adds[sd]|v?phadd\w+")
_MOVES = re.compile(
    r"v?mov(ap|up|dq|nt|lp|hp|ss|sd|d$|q$)\w*|v?lddqu|tileload\w*|tilestore\w*|kmov\w"
)


@cache
def multiplier(mnemonic: str) -> Multiplier | None:
    """What an instruction multiplies; None: nothing."""
    return next((one for one in MULTIPLIERS if re.fullmatch(one.pattern, mnemonic)), None)


def mnemonic(instruction: Instruction) -> str:
    """Such as "vpdpbusd"."""
    return _formatter.format_mnemonic(instruction, FormatMnemonicOptions.NO_PREFIXES)


def text(instruction: Instruction) -> str:
    """In Intel's syntax."""
    return _formatter.format(instruction)


def vector_bits(instruction: Instruction) -> int:
    """Width of its widest vector register; 0 if it has none."""
    widths = [0]
    for number in range(instruction.op_count):
        if instruction.op_kind(number) == OpKind.REGISTER:
            register = instruction.op_register(number)
            if RegisterExt.is_vector_register(register):
                widths.append(8 * RegisterExt.size(register))
    return max(widths)


def is_vector(instruction: Instruction) -> bool:
    """Whether it works on vector, mask or matrix registers."""
    return vector_bits(instruction) > 0 or any(
        instruction.op_kind(n) == OpKind.REGISTER and RegisterExt.is_tmm(instruction.op_register(n))
        for n in range(instruction.op_count)
    )


def features(instruction: Instruction) -> tuple[str, ...]:
    """The CPU features that it needs, by iced-x86's names."""
    return tuple(_FEATURES[number] for number in instruction.cpuid_features())


def code_features(name: str) -> tuple[str, ...]:
    """The same of an encoding by its name in iced-x86's `Code`."""
    made = Instruction()
    made.code = getattr(Code, name)
    return features(made)


def accesses(instruction: Instruction) -> tuple[bool, bool]:
    """Whether it reads and writes data in memory; a prefetch does neither."""
    reads = writes = False
    for used in _information.info(instruction).used_memory():
        reads |= used.access in (OpAccess.READ, OpAccess.COND_READ, OpAccess.READ_WRITE)
        writes |= used.access in (OpAccess.WRITE, OpAccess.COND_WRITE, OpAccess.READ_WRITE)
    return reads, writes


def roles(instruction: Instruction) -> tuple[str, ...]:
    """What it does; one that multiplies what it loads has several roles."""
    name = mnemonic(instruction)
    if instruction.flow_control != FlowControl.NEXT:
        is_call = instruction.flow_control in (FlowControl.CALL, FlowControl.INDIRECT_CALL)
        return (CALL,) if is_call else (CONTROL,)
    if name.startswith("prefetch"):
        return (PREFETCH,)
    if name in ("pause", "tpause", "umwait"):
        return (WAIT,)
    reads, writes = accesses(instruction)
    found = []
    if _BROADCASTS.fullmatch(name) or (reads and instruction.is_broadcast):
        found.append(BROADCAST)
    elif reads and not instruction.is_stack_instruction:
        found.append(LOAD)
    found += _computes(instruction, name, writes)
    if writes and not instruction.is_stack_instruction:
        found.append(WRITE_BACK)
    return tuple(found) or (OTHER,)


def _computes(instruction: Instruction, name: str, writes: bool) -> list[str]:
    found = multiplier(name)
    if found is not None and (is_vector(instruction) or name not in ("imul", "mul", "mulx")):
        return [PRODUCTS, ACCUMULATE] if found.adds else [PRODUCTS]
    if not is_vector(instruction) and not name.startswith("tile"):
        if name.startswith(("cmp", "test")):
            return [CONTROL]
        return [] if writes and name == "mov" else [ADDRESS]
    for pattern, role in (
        (_BROADCASTS, ""), (_MOVES, ""), (_PACKS, CONVERT), (_CONVERTS, CONVERT),
        (_SHUFFLES, SHUFFLE), (_ADDS, ACCUMULATE),
    ):  # fmt: skip
        if pattern.fullmatch(name):
            return [role] if role else []
    return [ARITHMETIC]


def multiply_adds(loop: Sequence[Instruction]) -> tuple[int, str, tuple[str, ...]]:
    """Multiply-adds of one round, the arithmetic of most of them, and the instructions.

    Where pairs of bytes are multiplied first, the sums of their pairs that follow multiply by one
    only to add, so they do not count.
    """
    found: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    names = Counter(mnemonic(one) for one in loop)
    bytes_first = any(name.endswith("pmaddubsw") for name in names)
    for one in loop:
        what = multiplier(mnemonic(one))
        if what is None or not {PRODUCTS} & set(roles(one)):
            continue
        if bytes_first and mnemonic(one).endswith("pmaddwd"):
            continue
        lanes = what.tile or (vector_bits(one) // what.bits if what.bits else 1)
        kinds[_kind(one, what)] += lanes
        found[mnemonic(one)] += lanes
    if not found:
        return 0, "", ()
    return sum(found.values()), kinds.most_common(1)[0][0], tuple(n for n, _ in found.most_common())


def _kind(instruction: Instruction, what: Multiplier) -> str:
    if what.bits or what.tile:
        return what.arithmetic
    return "float32" if mnemonic(instruction).endswith("ss") else "float64"


def accumulators(loop: Iterable[Instruction]) -> int:
    """How many registers the loop adds to, products or other sums."""
    return len(
        {
            one.op0_register
            for one in loop
            if is_vector(one) and ACCUMULATE in roles(one) and one.op0_kind == OpKind.REGISTER
        }
    )


def sets_of(loop: Iterable[Instruction]) -> tuple[str, ...]:
    """Instruction sets of the vector instructions, the rarest last."""
    seen = Counter(name for one in loop if is_vector(one) for name in features(one))
    return tuple(name for name, _ in seen.most_common())


def mix(loop: Iterable[Instruction]) -> dict[str, int]:
    """How many of each instruction, the most frequent first."""
    return dict(Counter(map(mnemonic, loop)).most_common())


def structure(loop: Iterable[Instruction]) -> dict[str, int]:
    """How many instructions of each role, in the order of the data."""
    seen = Counter(role for one in loop for role in roles(one))
    return {role: seen[role] for role in ROLES if seen[role]}
