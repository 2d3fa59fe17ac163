"""Files whose types their names tell: those of the Python installation, and of a folder."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

SIZE = 1024  # bytes of a file's beginning, and of its end
BLOCK = 4096  # bytes of each in which white space is passed over
PADDING = 256
FEWEST = 8  # bytes; with less than that magika does not ask its network
EACH = 150  # files of one type at most

TYPES = {
    ".py": "python", ".pyc": "pythonbytecode", ".md": "markdown", ".rst": "rst",
    ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".c": "c",
    ".cpp": "cpp", ".so": "elf", ".sh": "shell", ".html": "html", ".css": "css", ".svg": "svg",
    ".xml": "xml", ".png": "png", ".gif": "gif", ".gz": "gzip", ".zip": "zip", ".whl": "zip",
    ".npy": "npy", ".npz": "npz", ".ttf": "ttf", ".js": "javascript", ".jpg": "jpeg",
    ".pem": "pem", ".csv": "csv", ".ini": "ini", ".f90": "fortran", ".tcl": "tcl", ".exe": "pebin",
}  # fmt: skip
"""By suffix, what magika calls the type. Not .txt and .h, which are of several types."""


def typed_files(*folders: Path) -> list[tuple[Path, str]]:
    """Files below the folders with their types, in a random order that is always the same; at most
    150 of each type, so that Python's own sources are not nearly all."""
    by_type: dict[str, list[Path]] = {}
    for path in itertools.chain.from_iterable(map(_regular, folders)):
        by_type.setdefault(TYPES[path.suffix], []).append(path)
    random = np.random.default_rng(0)
    found = [
        (paths[i], label)
        for label, paths in sorted(by_type.items())
        for i in random.permutation(len(paths))[:EACH]
    ]
    return [found[i] for i in random.permutation(len(found))]


def installation() -> tuple[Path, ...]:
    """Where Python's standard library and the packages beside it are."""
    paths = sysconfig.get_paths()
    return tuple(Path(path) for path in dict.fromkeys((paths["stdlib"], paths["purelib"])))


def _regular(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES and path.is_file() and path.stat().st_size >= FEWEST:
            yield path


def features(path: Path) -> npt.NDArray[np.int32]:
    """What magika's network reads of a file: int32 [2048], bytes of its beginning and its end
    without white space before and behind; 256 where it is shorter."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        begin = file.read(BLOCK).lstrip()[:SIZE]
        file.seek(max(0, size - BLOCK))
        end = file.read(BLOCK).rstrip()[-SIZE:]
    both = np.full(2 * SIZE, PADDING, np.int32)
    both[: len(begin)] = np.frombuffer(begin, np.uint8)
    both[2 * SIZE - len(end) :] = np.frombuffer(end, np.uint8)
    return both
