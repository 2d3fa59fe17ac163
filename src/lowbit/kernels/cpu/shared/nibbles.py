"""From panels of nibbles to panels of bytes."""

from __future__ import annotations

from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.layout import LINE, NIBBLE_FLIP, PANEL_LINE


def unpack_nibbles(k: Builder, source: Value, target: Value, k_blocks: Value, kind: str) -> None:
    """Bring a panel's nibbles, "u4" or "s4", into bytes: `k_blocks` times 64 k (see layout.py)."""
    for line in k.range(0, k_blocks * (PANEL_LINE // LINE // 2)):
        for number, values in enumerate(unpacked((source + line * LINE).load(LINE), kind)):
            (target + (line * 2 + number) * LINE).store(values)


def unpacked(both: Value, kind: str) -> tuple[Value, Value]:
    """The bytes in a vector of nibbles, those in the low ones first."""
    low, high = both & 15, both >> 4
    return (low - NIBBLE_FLIP, high - NIBBLE_FLIP) if kind == "s4" else (low, high)
