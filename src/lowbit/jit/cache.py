"""Object code on disk, so that a kernel is compiled once for a machine.

An entry is named by a hash of everything that it depends on: the source of the package's code
generating files, LLVM's version and target, the instruction set's features, the kernel and its
static arguments; a kernel from elsewhere, whose text may depend on anything, by its LLVM IR. It
holds a digest of its own content; an entry that does not match is ignored and written anew. Entries
appear by renaming, so processes may race.

The folder is $LOWBIT_CACHE_DIR, else $XDG_CACHE_HOME/lowbit, else ~/.cache/lowbit. A folder that
cannot be written means no cache, not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

import lowbit
from lowbit.jit import compile as compiler

_MAGIC = b"lowbit object 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_CODE_FOLDERS = ("isa", "jit", "kernels")


def folder() -> Path:
    """Where the entries are."""
    chosen = os.environ.get("LOWBIT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lowbit"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "lowbit"  # which cannot be written


@cache
def _source_digest() -> bytes:
    """A hash of the files that decide which code is generated."""
    digest = hashlib.sha256(f"{compiler.VERSION} {llvm.get_process_triple()}".encode())
    root = Path(lowbit.__file__).parent
    for name in _CODE_FOLDERS:
        for path in sorted((root / name).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


def is_known(text: Callable[..., None]) -> bool:
    """Whether the digest of this package's source covers a kernel text."""
    return text.__module__.split(".")[0] == lowbit.__name__


def entry(*parts: object) -> Path:
    """The file for what `parts` (by their repr) and this package's source describe."""
    digest = hashlib.sha256(_source_digest())
    digest.update(repr(parts).encode())
    return folder() / f"{digest.hexdigest()[:40]}.o"


def read(path: Path) -> bytes | None:
    """The object code in an entry; None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST_BYTES
    if (
        not data.startswith(_MAGIC)
        or hashlib.sha256(data[start:]).digest() != data[len(_MAGIC) : start]
    ):
        return None
    return data[start:]


def write(path: Path, code: bytes) -> None:
    """Keep object code; silently not, where the folder cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(_MAGIC + hashlib.sha256(code).digest() + code)
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
