"""Machine code on disk, so that a kernel is compiled once for a machine.

The cache has two levels, each a kind of file in one folder (jit.sealed_files):

    *.ir   source → name of an object: the digest of lowbit's own files that generate code, the
           kernel, its static arguments and the instruction set
    *.o    LLVM IR → object code: the text of the IR, and all that LLVM is told besides
           (compile.Target: its version, the CPU's features, its options)

A process whose sources are known reads both and builds nothing. Where a source has changed, be it
by an upgrade or an edit, the IR is built anew, and LLVM is asked only where its text is new. A
kernel from elsewhere, whose text may depend on anything, has no entry of the first kind.

An entry that does not match its seal, or that does not hold the function wanted, is ignored and
written anew. The folder is $LOWBIT_CACHE_DIR, else $XDG_CACHE_HOME/lowbit, else ~/.cache/lowbit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import lowbit
from lowbit.isa import host
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import compile as compiler
from lowbit.jit import sealed_files

CODE_FOLDERS = ("isa", "jit", "kernels", "numerics")
"""The rooms whose files decide which IR is built: kernels, and what they import."""
_OBJECT_NAME = re.compile(rb"[0-9a-f]{40}\.o")


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
    """A hash of the files that decide which IR is built, and of what they ask the machine."""
    digest = hashlib.sha256(f"{compiler.VERSION} {sys.platform} {host.architecture()}".encode())
    root = Path(lowbit.__file__).parent
    for name in CODE_FOLDERS:
        files = (f"{at}/{file}" for at, _, files in os.walk(root / name) for file in files)
        for path in sorted(path for path in files if path.endswith(".py")):
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.digest()


def is_known(text: Callable[..., None]) -> bool:
    """Whether the digest of this package's source covers a kernel text."""
    return text.__module__.split(".")[0] == lowbit.__name__


def load(
    name: str, isa: InstructionSet, make_ir: Callable[[], str], *source: object
) -> compiler.Loaded:
    """The function `name` of the IR that `make_ir` builds: from the cache, or compiled and kept.

    `source`, by its repr, says what the IR depends on besides the name, the instruction set and
    this package's files. Without it the IR is built at each call.
    """
    with compiler.LOCK:
        known = source_entry(name, isa.name, isa.features, *source) if source else None
        if known is not None:
            object_name = sealed_files.read(known) or b""
            if _OBJECT_NAME.fullmatch(object_name):
                loaded = _loaded(folder() / object_name.decode(), name, isa)
                if loaded is not None:
                    return loaded
        ir_text = make_ir()
        path = object_entry(ir_text, isa)
        loaded = _loaded(path, name, isa)
        if loaded is None:
            code = compiler.object_code(ir_text, isa)
            sealed_files.write(path, code)
            loaded = compiler.Loaded(code, name, isa)
        if known is not None:
            sealed_files.write(known, path.name.encode())
        return loaded


def _loaded(path: Path, name: str, isa: InstructionSet) -> compiler.Loaded | None:
    """The function of an entry; None where there is no such entry, or it holds another function."""
    code = sealed_files.read(path)
    if code is not None:
        with contextlib.suppress(ValueError):
            return compiler.Loaded(code, name, isa)
    return None


def source_entry(*parts: object) -> Path:
    """The file that names the object of what `parts` (by their repr) and the source describe."""
    digest = hashlib.sha256(_source_digest())
    digest.update(repr(parts).encode())
    return folder() / f"{digest.hexdigest()[:40]}.ir"


def object_entry(ir_text: str, isa: InstructionSet) -> Path:
    """The file for the object that LLVM makes of a text for an instruction set."""
    digest = hashlib.sha256(repr(compiler.target(isa)).encode())
    digest.update(ir_text.encode())
    return folder() / f"{digest.hexdigest()[:40]}.o"
