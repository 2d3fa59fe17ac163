"""Which OpenMP runtime PyTorch runs on.

A process may hold several: scikit-learn, ONNX Runtime and others bring one each, by names that tell
nothing, and one may have been put before all others by LD_PRELOAD. Two at work fight for the cores,
so the one wanted is the one that libtorch itself calls. The dynamic loader has written its address
into libtorch's table of imported functions, where it is read here: whatever was loaded first.

Sources: System V ABI, chapter 5, "Dynamic Section", "Relocation"; dlinfo(3), dladdr(3).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

# A function of the runtime that every build of PyTorch calls.
_ASKED = b"omp_get_max_threads"

_LINK_MAP = 2  # RTLD_DI_LINKMAP
_PLT_BYTES, _STRINGS, _SYMBOLS, _RELA, _RELA_BYTES, _STRING_BYTES, _PLT = 2, 5, 6, 7, 8, 10, 23
_SYMBOL = np.dtype([("name", "u4"), ("rest", "V20")])  # Elf64_Sym
_RELOCATION = np.dtype([("place", "u8"), ("kind", "u4"), ("symbol", "u4"), ("addend", "i8")])


class _LinkMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    )


class _Symbol(ctypes.Structure):
    """Dl_info."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def of_torch() -> tuple[str, int] | None:
    """The runtime's file name and the address of its GOMP_parallel; None where there is none.

    GCC's, Intel's and LLVM's runtimes all have that function. PyTorch must have been imported.
    """
    for path in _mapped("libtorch_cpu.so"):
        # Where the table tells nothing, symbols are looked for as the loader would: along what
        # libtorch depends on, nearest first.
        with contextlib.suppress(OSError, AttributeError):
            for file in (*_importing(path, _ASKED), path):
                function = ctypes.CDLL(file).GOMP_parallel
                address = ctypes.cast(function, ctypes.c_void_p).value
                if address:
                    return Path(_file_of(address)).name, address
    return None


@cache
def count_of_torch() -> int | None:
    """The address of at::get_num_threads, int (): what `torch.get_num_threads` asks."""
    for path in _mapped("libtorch_cpu.so"):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(path)._ZN2at15get_num_threadsEv, ctypes.c_void_p).value
    return None


def _mapped(name: str) -> list[str]:
    """The mapped files whose names begin with `name`."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(name))


def _file_of(address: int) -> str:
    """The loaded library that an address lies in, "" for none."""
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found))
    return (found.file or b"").decode()


def _importing(path: str, function: bytes) -> Iterator[str]:
    """The libraries from which the loaded library `path` takes a function: one, or none known."""
    link = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(ctypes.CDLL(path)._handle)
    if ctypes.CDLL(None).dlinfo(handle, _LINK_MAP, ctypes.byref(link)):
        return
    base, facts = link.contents.base, dict(_dynamic(link.contents.dynamic))

    def table(tag: int, size: int, kind: npt.DTypeLike) -> npt.NDArray[np.void]:
        start = facts[tag] if facts[tag] >= base else facts[tag] + base  # glibc has moved it
        return np.frombuffer(memoryview((ctypes.c_char * size).from_address(start)), kind)

    name = bytes(table(_STRINGS, facts[_STRING_BYTES], "u1")).find(b"\0" + function + b"\0") + 1
    for tag, size in ((_PLT, _PLT_BYTES), (_RELA, _RELA_BYTES)):
        if not facts.get(size):
            continue
        imports = table(tag, facts[size], _RELOCATION)
        imports = imports[imports["symbol"] > 0]
        last = int(imports["symbol"].max(initial=0))
        names = table(_SYMBOLS, (last + 1) * _SYMBOL.itemsize, _SYMBOL)["name"]
        for place in imports["place"][names[imports["symbol"]] == name]:
            yield _file_of(ctypes.c_size_t.from_address(base + int(place)).value)


def _dynamic(address: int) -> Iterator[tuple[int, int]]:
    """(tag, value) of a dynamic section."""
    while (entry := tuple((ctypes.c_size_t * 2).from_address(address)))[0]:
        yield entry[0], entry[1]
        address += 16
