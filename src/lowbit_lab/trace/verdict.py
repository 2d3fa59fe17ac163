"""Was the fast path taken? What the hot loop multiplies with, beside the best that this machine
has for the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit import isa
from lowbit.isa import host
from lowbit_lab.trace import replay, roles
from lowbit_lab.trace.report import Loop, Verdict

_CLOSE = 1.15  # below that, the best is no faster than what was used


@dataclass(frozen=True)
class Way:
    """Instructions by which bytes or floats are multiplied and added: their names in iced-x86's
    `Code`, and what they are called."""

    codes: tuple[str, ...]
    text: str

    @property
    def available(self) -> bool:
        """Whether this machine has them, and its system lets tiles be used."""
        wanted = {_plain(name) for code in self.codes for name in roles.code_features(code)}
        have = {_plain(name) for name in host.features()}
        return wanted <= have and not (self.tiles and host.tile_permission())

    @property
    def tiles(self) -> bool:
        return "_TMM" in self.codes[0]

    @property
    def bits(self) -> int:
        """Of a vector; 0: tiles."""
        return 0 if self.tiles else 512 if "_ZMM" in self.codes[0] else (
            256 if "_YMM" in self.codes[0] else 128
        )  # fmt: skip

    @property
    def multiply_adds(self) -> int:
        """Of one instruction on vectors."""
        known = roles.multiplier(self.mnemonic)
        assert known is not None
        return self.bits // known.bits

    @property
    def mnemonic(self) -> str:
        return self.text.split()[0]


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


_FLOATS = {
    kind: (
        Way((f"EVEX_VFMADD231{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER",), f"vfmadd231{p.lower()} zmm"),
        Way((f"VEX_VFMADD231{p}_YMM_YMM_YMMM256",), f"vfmadd231{p.lower()} ymm"),
        Way((f"VEX_VMUL{p}_YMM_YMM_YMMM256", f"VEX_VADD{p}_YMM_YMM_YMMM256"),
            f"vmul{p.lower()} ymm"),
    )
    for kind, p, b in (("float32", "PS", 32), ("float64", "PD", 64))
}  # fmt: skip
WAYS: dict[str, tuple[Way, ...]] = {
    **_FLOATS,
    "int8": (
        Way(("VEX_TDPBUSD_TMM_TMM_TMM",), "tdpbusd"),
        Way(("EVEX_VPDPBUSD_ZMM_K1Z_ZMM_ZMMM512B32",), "vpdpbusd zmm"),
        Way(("VEX_VPDPBUSD_YMM_YMM_YMMM256",), "vpdpbusd ymm"),
        Way(
            ("EVEX_VPMADDUBSW_ZMM_K1Z_ZMM_ZMMM512", "EVEX_VPMADDWD_ZMM_K1Z_ZMM_ZMMM512",
             "EVEX_VPADDD_ZMM_K1Z_ZMM_ZMMM512B32"),
            "vpmaddubsw zmm",
        ),
        Way(
            ("VEX_VPMADDUBSW_YMM_YMM_YMMM256", "VEX_VPMADDWD_YMM_YMM_YMMM256",
             "VEX_VPADDD_YMM_YMM_YMMM256"),
            "vpmaddubsw ymm",
        ),
    ),
    "bfloat16": (
        Way(("VEX_TDPBF16PS_TMM_TMM_TMM",), "tdpbf16ps"),
        Way(("EVEX_VDPBF16PS_ZMM_K1Z_ZMM_ZMMM512B32",), "vdpbf16ps zmm"),
        *_FLOATS["float32"],
    ),
}  # fmt: skip
"""By arithmetic, the fastest first."""


def judged(loop: Loop | None, expected: str, why: str) -> Verdict:
    """expected: the arithmetic that the subject asks for, "" if that is not known. RuntimeError
    if the machine's best could not be measured."""
    if loop is None:
        return Verdict(None, f"no verdict: {why}")
    sums = loop.structure.get(roles.ACCUMULATE)
    if not (loop.multiply_adds and sums) or expected not in ("", *WAYS):
        return _by_width(loop)
    used = ", ".join(loop.products)
    if expected and loop.arithmetic != expected and not _serves(loop, expected):
        return Verdict(
            False, f"no: {expected} is asked for, the products are {loop.arithmetic} ({used})"
        )
    ways = [way for way in WAYS.get(expected or loop.arithmetic, ()) if way.available]
    own = next((way for way in ways if _is(loop, way)), None)
    named = f"{used} on {loop.vector_bits}-bit vectors" if loop.vector_bits else used
    if not ways:
        return Verdict(None, f"no verdict: what is best for {loop.arithmetic} is not known")
    if own is ways[0]:
        return Verdict(True, f"yes: {named}, the best of this machine for {_asked(loop, expected)}")
    best = ways[0]
    faster = None if best.tiles or own is None else _faster(best, own)
    if faster is not None and faster < _CLOSE:
        return Verdict(True, f"yes: {named}; {best.text} is no faster on this machine")
    times = "" if faster is None else f", which multiplies {faster:.1f} times as fast"
    return Verdict(False, f"no: {named}, where this machine has {best.text}{times}")


def _asked(loop: Loop, expected: str) -> str:
    return expected or loop.arithmetic


def _serves(loop: Loop, expected: str) -> bool:
    return any(_is(loop, way) for way in WAYS.get(expected, ()))


def _is(loop: Loop, way: Way) -> bool:
    """Whether the loop multiplies in this way: by the same kind of instruction, as wide."""
    same = roles.multiplier(way.mnemonic) in map(roles.multiplier, loop.products)
    return same and (way.tiles or way.bits == loop.vector_bits)


def _faster(best: Way, own: Way) -> float:
    """How many times as many multiply-adds a second, measured."""
    taken = replay.measured({way.text: replay.peak_of(way.codes) for way in (best, own)})
    return taken[own.text] / taken[best.text] * best.multiply_adds / own.multiply_adds


def _by_width(loop: Loop) -> Verdict:
    """Of a loop that has no products to compare."""
    widest = 8 * isa.active().vector_bytes
    if not loop.vector_bits:
        return Verdict(False, f"no: the {loop.form} has no vector instructions")
    if loop.vector_bits >= widest:
        return Verdict(True, f"yes: vectors of {loop.vector_bits} bits, the widest of this machine")
    return Verdict(
        False, f"no: vectors of {loop.vector_bits} bits, where this machine has {widest}"
    )
