"""What this machine is, and the few things that only one operating system has.

What the sets of x86-64 need comes from CPUID, all other features and the CPU's name from LLVM,
whose library is slow to load, cache sizes from Linux's sysfs, the permission to use AMX tiles from
Linux's arch_prctl. Everything here degrades: what cannot be learned is left out or has a default.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.registry.locks import Deferred

if TYPE_CHECKING:
    import llvmlite.binding as llvm
else:
    llvm = Deferred("llvmlite.binding")

# Used where the operating system does not tell; smaller than any server core of today has.
_DEFAULT_CACHES = {"L1d": 32 << 10, "L2": 256 << 10, "L3": 2 << 20}

_ARCH_PRCTL = 158  # Linux on x86-64
_REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM, Linux 5.16
_TILE_DATA = 18  # the XSAVE component that holds the tiles

# What Linux on AArch64 calls features that LLVM does not report for a host, and LLVM's own names.
_LINUX_AARCH64 = {"asimddp": "dotprod", "i8mm": "i8mm"}


# Functions of (leaf, sub-leaf, four dwords to write) and of nothing, by the System V convention.
_CPUID = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")

# Bits by CPUID's leaf, sub-leaf and register. Source: Intel, Software Developer's Manual, 2A.
_BITS = {
    (1, 0, "ecx"): {"fma": 12, "sse4.2": 20, "popcnt": 23, "avx": 28},
    (7, 0, "ebx"): {
        "bmi": 3, "avx2": 5, "bmi2": 8, "avx512f": 16, "avx512dq": 17, "avx512cd": 28,
        "avx512bw": 30, "avx512vl": 31,
    },
    (7, 0, "ecx"): {"avx512vbmi": 1, "avx512vnni": 11},
    (7, 0, "edx"): {"amx-bf16": 22, "amx-tile": 24, "amx-int8": 25},
    (7, 1, "eax"): {"avxvnni": 4, "avx512bf16": 5},
}  # fmt: skip
_REGISTERS = ("eax", "ebx", "ecx", "edx")
# What the system must save of a feature's registers: bits of XCR0.
_STATE = {"avx512": 0xE6, "avx": 0x6, "fma": 0x6, "amx": 0x60000}


def is_linux_x86() -> bool:
    """Whether lowbit itself asks CPUID and places code in memory; elsewhere LLVM does."""
    return sys.platform == "linux" and architecture() == "x86_64"


@cache
def process() -> ctypes.CDLL:
    """All libraries that are loaded, the C library among them."""
    return ctypes.CDLL(None, use_errno=True)


def executable(size: int, code: Callable[[int, int], bytes], writable: int = 0) -> int:
    """The address of memory for as long as the process lives: `size` bytes that may be read and
    run, and on pages behind them `writable` bytes of zeros. `code` makes the bytes for the address
    of either.

    OSError: the system gives no such memory.
    """
    libc = process()
    libc.mmap.restype = ctypes.c_void_p
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    private, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    length, start = ctypes.c_size_t(whole + writable), ctypes.c_long(0)
    place = libc.mmap(None, length, access, private, -1, start)
    if place != ctypes.c_void_p(-1).value:
        ctypes.memmove(place, code(place, place + whole), size)
        access = mmap.PROT_READ | mmap.PROT_EXEC
        if libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(whole), access) == 0:
            return int(place)
    reason = os.strerror(ctypes.get_errno())
    raise OSError(f"the system gives no memory for machine code of {size} bytes: {reason}")


@cache
def _cpuid() -> Callable[[int, int], dict[str, int]]:
    """CPUID as a function of leaf and sub-leaf."""
    ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(
        executable(len(_CPUID), lambda *_: _CPUID)
    )

    def answer(leaf: int, sub_leaf: int) -> dict[str, int]:
        words = (ctypes.c_uint32 * 4)()
        ask(leaf, sub_leaf, words)
        return dict(zip(_REGISTERS, words, strict=True))

    return answer


@cache
def _from_cpuid() -> dict[str, bool]:
    """Whether there are the features that the sets of x86-64 need; {} where LLVM is to say it."""
    if not is_linux_x86():
        return {}
    try:
        cpuid, state = _cpuid(), 0
        if cpuid(1, 0)["ecx"] >> 27 & 1:  # OSXSAVE
            ask = executable(len(_XGETBV), lambda *_: _XGETBV)
            state = ctypes.CFUNCTYPE(ctypes.c_uint64)(ask)()
    except OSError:
        return {}
    leaves = {0: cpuid(0, 0)["eax"]}
    leaves[7] = cpuid(7, 0)["eax"] if leaves[0] >= 7 else -1
    known: dict[str, bool] = {}
    for (leaf, sub_leaf, register), bits in _BITS.items():
        there = leaf <= leaves[0] and (leaf < 7 or sub_leaf <= leaves[7])
        word = cpuid(leaf, sub_leaf)[register] if there else 0
        for name, bit in bits.items():
            saved = next((mask for of, mask in _STATE.items() if name.startswith(of)), 0)
            known[name] = bool(word >> bit & 1) and state & saved == saved
    return known


def has(feature: str) -> bool:
    """Whether the CPU has what LLVM calls so, and the operating system lets it be used."""
    known = _from_cpuid().get(feature)
    return feature in features() if known is None else known


@cache
def features() -> frozenset[str]:
    """LLVM's names of the features that the CPU has and the operating system lets be used."""
    try:
        known = {name for name, has in llvm.get_host_cpu_features().items() if has}
    except RuntimeError:  # LLVM does not know this host
        known = set()
    listed = _cpuinfo("Features").split()
    return frozenset(known | {name for word, name in _LINUX_AARCH64.items() if word in listed})


def _cpuinfo(field: str) -> str:
    """The first value of a field of /proc/cpuinfo, "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")


@cache
def architecture() -> str:
    """LLVM's name of what this process runs on, such as "x86_64"."""
    name = os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]
    name = {"arm64": "aarch64", "amd64": "x86_64"}.get(name.lower(), name)
    return name if sys.maxsize >> 32 else f"{name} of 32 bits"


@cache
def cpu_name() -> str:
    """LLVM's name of the CPU, such as "znver4" or "emeraldrapids"."""
    return llvm.get_host_cpu_name()


def model_name() -> str:
    """The name that the operating system gives the CPU, or the architecture."""
    return _cpuinfo("model name") or architecture()


@cache
def vendor() -> str:
    """Of an x86 CPU, as CPUID has it, such as "GenuineIntel"; else ""."""
    return _cpuinfo("vendor_id")


@cache
def caches() -> dict[str, int]:
    """Bytes of the first core's L1d, L2 and L3 (shared ones whole)."""
    sizes = dict(_DEFAULT_CACHES)
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = (index / "level").read_text().strip()
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes["L1d" if level == "1" else f"L{level}"] = int(size[:-1]) << 10
    return sizes


@cache
def read_ahead() -> int:
    """Bytes ahead of which a stream from memory is best fetched by hand; 0: the machine does it.

    Intel's cores follow a stream only to the end of its page of 4 KiB: fetching 2 KiB ahead made an
    Emerald Rapids core read 20 to 30 % more. A Zen 4 core lost 3 to 13 % by it.
    """
    return 2048 if vendor() == "GenuineIntel" else 0


def claims_lines(size: int) -> bool:
    """Whether lines of so many bytes that will be written are best fetched by hand before.

    An Emerald Rapids core then filled 4 MB 1.2 to 1.5 times as fast: 16 lines can be on their way
    to its nearest cache, and stores, which are made in order, fetch too few. A Zen 4 core made
    products 1.03 to 1.06 times as fast whose output is larger than its second-level cache, and
    others no faster.
    """
    return vendor() == "GenuineIntel" or size > caches()["L2"]


@cache
def tile_permission() -> str:
    """Ask the operating system once for the use of AMX tiles: "" if granted, else the reason."""
    if not is_linux_x86():
        return "AMX tiles are asked for through Linux on x86-64, which this is not"
    if process().syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return f"Linux refused the use of tiles (arch_prctl, errno {ctypes.get_errno()})"
