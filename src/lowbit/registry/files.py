"""Files that appear whole or not at all, whatever ends the program or the machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

_LONGEST_STEM = 100  # bytes of the target's name in that of the unfinished file


# Of disks that are full or fail, and of devices and pipes where a file has to be.
OF_WRITING = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EINVAL, errno.ESPIPE, errno.EPIPE
)  # fmt: skip


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is written within it goes to `path`: an OSError of writing says so."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in OF_WRITING:
            error.filename = os.fspath(path)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in UTF-8, whole or not at all, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file, to write and read, which takes the name `path` when the block ends without an
    error.

    It is in its place for good then: file and folder are synced. A file that was there before is
    as it was until that moment; its mode is kept, and its owner where that is allowed. Through a
    symbolic link the link's target is replaced. What writers that were killed have left of the
    same target is removed.

    OSError, which names the file, if it cannot be done, or if `path` is there and no regular file.
    """
    target = os.path.realpath(os.fsdecode(path))
    before = _regular(target)
    folder, name = os.path.split(target)
    stem = os.fsencode(name)[:_LONGEST_STEM].decode(errors="replace")
    _remove_orphans(folder, stem)
    with naming_file(path), contextlib.ExitStack() as stack:
        # In the same folder, since only within one file system is replacing a file atomic.
        unfinished, file = _locked_file(folder, stem, before)
        stack.enter_context(file)
        try:
            if before is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
    _sync_folder(folder)


def _regular(target: str) -> os.stat_result | None:
    """What is known of the regular file `target`; None if nothing is there."""
    try:
        found = os.lstat(target)  # a link that is still one leads back to itself
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, so it cannot be replaced", target)
    return found


def _locked_file(folder: str, stem: str, before: os.stat_result | None) -> tuple[str, BinaryIO]:
    """A new file of a new name, and a lock on it that goes when its writer does."""
    mode = 0o666 if before is None else stat.S_IMODE(before.st_mode)
    while True:
        path = os.path.join(folder, f".{stem}.{os.urandom(8).hex()}.unfinished")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = open(os.open(path, flags, mode | stat.S_IWUSR), "w+b")  # noqa: SIM115
        with contextlib.suppress(OSError):  # no locks in this file system: then orphans stay
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # taken for an orphan before it was locked


def _remove_orphans(folder: str, stem: str) -> None:
    """Remove unfinished files of this target that nobody holds the lock of."""
    pattern = re.compile(re.escape(f".{stem}.") + r"[0-9a-f]{16}\.unfinished")
    try:
        names = os.listdir(folder)
    except PermissionError:  # a folder may be written and not be read
        return
    for name in filter(pattern.fullmatch, names):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def _sync_folder(folder: str) -> None:
    """Make the new name last, where the folder can be opened and its file system can do it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
