"""Small files in a private folder, each sealed by a digest of its name and content.

A file that was damaged, cut short, or put in the place of another does not match its seal and is
not read. Files appear by renaming, so processes may race for one. What the files of lowbit's cache
hold is run, so nobody but the user (and root) may be able to write it: a folder for which that does
not hold is not used, with a warning. A folder that cannot be written is read; one that does not
exist and cannot be made means no files, not an error.

A file's time of modification says when it was last used, to within REFRESH_SECONDS: file systems
that are mounted without times of access say nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
import warnings
from functools import cache
from pathlib import Path

_MAGIC = b"lowbit cache 3\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES

_DAY = 24 * 60 * 60
REFRESH_SECONDS = 30 * _DAY  # a file in use is marked as such this often
UNUSED_SECONDS = 180 * _DAY  # a file that nobody used for so long is removed
PART_SECONDS = 10 * 60  # writing a file takes milliseconds: an older part has no writer any more
# Ours; `tmp` and eight characters are parts of lowbit before its cache had two levels.
_PART = re.compile(r"\.part$|^tmp[a-z0-9_]{8}$")
_ENTRY = re.compile(r"^[0-9a-f]{40}\.(o|ir)$")


def read(path: Path) -> bytes | None:
    """A file's content; None if there is no such file, or it is damaged or not trustworthy."""
    try:
        if not _is_private(path.parent):
            return None
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = b"" if _other_writers(status) else file.read()
    except OSError:
        return None
    content = data[_HEADER_BYTES:]
    if data != _sealed(path, content):
        return None
    if time.time() - status.st_mtime > REFRESH_SECONDS:
        with contextlib.suppress(OSError):
            os.utime(path)
    return content


def write(path: Path, content: bytes) -> None:
    """Keep content under a path; silently not, where the folder cannot be written."""
    with contextlib.suppress(OSError):
        folder = path.parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            return
        _remove_unused_once(folder)
        import tempfile  # with six modules besides: processes that write nothing do without

        descriptor, part = tempfile.mkstemp(suffix=".part", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_sealed(path, content))
            os.replace(part, path)
        except OSError:
            os.unlink(part)
            raise


def remove_unused(folder: Path) -> None:
    """Remove entries that nobody used for UNUSED_SECONDS, and parts that killed processes left.

    Files of other names stay. A process that wanted a removed entry makes it again.
    """
    now = time.time()
    with os.scandir(folder) as files:
        for file in files:
            if _PART.search(file.name):
                allowed = PART_SECONDS
            elif _ENTRY.search(file.name):
                allowed = UNUSED_SECONDS
            else:
                continue
            with contextlib.suppress(OSError):
                if now - file.stat(follow_symlinks=False).st_mtime > allowed:
                    os.unlink(file.path)


@cache
def _remove_unused_once(folder: Path) -> None:
    """Once in a process that writes: it has just compiled, which takes longer than looking."""
    remove_unused(folder)


def _sealed(path: Path, content: bytes) -> bytes:
    """What a file holds. Its digest covers its name, so that none serves in place of another."""
    return _MAGIC + hashlib.sha256(path.name.encode() + content).digest() + content


def _is_private(folder: Path) -> bool:
    """Whether only the user may write to a folder; warns, once, if not. OSError: there is none."""
    others = _other_writers(folder.stat())
    if others:
        _warn(str(folder), others)
    return not others


def _other_writers(status: os.stat_result) -> str:
    """Who else may write a file or folder, "" for nobody: root may anyway."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"the user {status.st_uid}, to whom it belongs"
    return "others than its owner" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@cache
def _warn(folder: str, others: str) -> None:
    warnings.warn(
        f"the cache of compiled kernels in {folder} is not used, since {others} may write to it: "
        f"use `chmod go-w`, or name a folder of your own in LOWBIT_CACHE_DIR",
        RuntimeWarning,
        stacklevel=2,
    )
