"""From panels of nibbles to panels of bytes."""

from __future__ import annotations

from lowbit.jit.builder import Builder
from lowbit.jit.value import Value
from lowbit.kernels.cpu.layout import LINE, NIBBLE_FLIP, PANEL_LINE


def unpack_nibbles(k: Builder, source: Value, target: Value, lines: Value, kind: str) -> None:
    """Bring a panel's nibbles, "u4" or "s4", into bytes: `lines` times 64 k (see layout.py)."""
    for line in k.range(0, lines * (PANEL_LINE // LINE // 2)):
        both = (source + line * LINE).load(LINE)
        low, high = both & 15, both >> 4
        for number, values in enumerate((low, high)):
            signed = values - NIBBLE_FLIP if kind == "s4" else values
            (target + (line * 2 + number) * LINE).store(signed)
