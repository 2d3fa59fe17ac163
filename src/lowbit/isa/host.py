"""What this machine is, and the few things that only one operating system has.

CPU name and features come from LLVM, cache sizes and the huge-page switch from Linux's sysfs, the
permission to use AMX tiles from Linux's arch_prctl. Everything here degrades: what cannot be
learned is left out or has a default, and says so.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

# Used where the operating system does not tell; smaller than any server core of today has.
_DEFAULT_CACHES = {"L1d": 32 << 10, "L2": 256 << 10, "L3": 2 << 20}

_ARCH_PRCTL = 158  # Linux on x86-64
_REQUEST_PERMISSION = 0x1023  # ARCH_REQ_XCOMP_PERM, Linux 5.16
_TILE_DATA = 18  # the XSAVE component that holds the tiles

# What Linux on AArch64 calls features that LLVM does not report for a host, and LLVM's own names.
_LINUX_AARCH64 = {"asimddp": "dotprod", "i8mm": "i8mm"}


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
def triple() -> str:
    """LLVM's name of what this process runs on, such as "x86_64-unknown-linux-gnu"."""
    return llvm.get_process_triple().replace("arm64", "aarch64", 1)  # Apple's name for it


@cache
def cpu_name() -> str:
    """LLVM's name of the CPU, such as "znver4" or "emeraldrapids"."""
    return llvm.get_host_cpu_name()


def model_name() -> str:
    """The name that the operating system gives the CPU, or the architecture."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


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
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "AMX tiles are asked for through Linux on x86-64, which this is not"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return f"Linux refused the use of tiles (arch_prctl, errno {ctypes.get_errno()})"
