"""Object code on disk, so that a kernel is compiled once for a machine.

An entry is named by a hash of everything that it depends on: the source of the package's code
generating files, LLVM's version and target, the instruction set's features, the kernel and its
static arguments; a kernel from elsewhere, whose text may depend on anything, by its LLVM IR. It
holds a digest of its name and content. One that does not match, or that does not hold the function
wanted, is ignored and written anew. Entries appear by renaming, so processes may race.

The folder is $LOWBIT_CACHE_DIR, else $XDG_CACHE_HOME/lowbit, else ~/.cache/lowbit. What it holds is
run, so nobody but the user (and root) may be able to write it: a folder for which that does not
hold is not used, with a warning. One that cannot be written means no cache, not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import lowbit
from lowbit.isa import host
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import compile as compiler

_MAGIC = b"lowbit object 2\n"
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
    digest = hashlib.sha256(f"{compiler.VERSION} {sys.platform} {host.architecture()}".encode())
    root = Path(lowbit.__file__).parent
    for name in _CODE_FOLDERS:
        files = (f"{at}/{file}" for at, _, files in os.walk(root / name) for file in files)
        for path in sorted(path for path in files if path.endswith(".py")):
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.digest()


def is_known(text: Callable[..., None]) -> bool:
    """Whether the digest of this package's source covers a kernel text."""
    return text.__module__.split(".")[0] == lowbit.__name__


def load(
    name: str, isa: InstructionSet, make_ir: Callable[[], str], *parts: object
) -> compiler.Loaded:
    """The function `name`, from the cache, or compiled from its LLVM IR and kept there.

    `parts`, by their repr, say what the IR depends on besides the name, the set and the source.
    """
    with compiler.LOCK:
        path = entry(name, isa.name, isa.features, *parts)
        code = read(path)
        if code is not None:
            with contextlib.suppress(ValueError):  # it holds another function
                return compiler.Loaded(code, name, isa)
        code = compiler.object_code(make_ir(), isa)
        write(path, code)
        return compiler.Loaded(code, name, isa)


def entry(*parts: object) -> Path:
    """The file for what `parts` (by their repr) and this package's source describe."""
    digest = hashlib.sha256(_source_digest())
    digest.update(repr(parts).encode())
    return folder() / f"{digest.hexdigest()[:40]}.o"


def read(path: Path) -> bytes | None:
    """The object code in an entry; None if there is none, or it is damaged or not trustworthy."""
    try:
        if not _is_private(path.parent):
            return None
        with path.open("rb") as file:
            data = file.read() if not _writers(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    code = data[len(_MAGIC) + _DIGEST_BYTES :]
    return code if data == _sealed(path, code) else None


def write(path: Path, code: bytes) -> None:
    """Keep object code; silently not, where the folder cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(path.parent):
            return
        import tempfile  # with six modules besides, which a program that is found does without

        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(_sealed(path, code))
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise


def _sealed(path: Path, code: bytes) -> bytes:
    """The content of an entry; its digest covers its name, so none serves in place of another."""
    return _MAGIC + hashlib.sha256(path.name.encode() + code).digest() + code


def _is_private(place: Path) -> bool:
    """Whether only the user may write to a folder; warns, once, if not. OSError: there is none."""
    others = _writers(place.stat())
    if others:
        _warn(str(place), others)
    return not others


def _writers(status: os.stat_result) -> str:
    """Who else may write a file or folder, "" for nobody: root may anyway."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"the user {status.st_uid}, to whom it belongs"
    return "others than its owner" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@cache
def _warn(place: str, others: str) -> None:
    warnings.warn(
        f"the cache of compiled kernels in {place} is not used, since {others} may write to it: "
        f"use `chmod go-w`, or name a folder of your own in LOWBIT_CACHE_DIR",
        RuntimeWarning,
        stacklevel=2,
    )
