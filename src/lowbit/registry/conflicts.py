"""Installed packages that do not work together."""

from __future__ import annotations

import re
import sys
import traceback
from importlib import metadata
from pathlib import Path

_ABSENT = (
    re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'"),
    re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'"),
)


def conflict(error: BaseException) -> str | None:
    """Which package uses a name that another, of this version, lacks, and what to install; None if
    that is not what an error is about.

    Libraries remove names with a new minor version, and packages that are older put no bound on it:
    so the bound is the minor version that is installed.
    """
    found = next((one for pattern in _ABSENT if (one := pattern.search(str(error)))), None)
    if found is None:
        return None
    module, name = found["module"], found["name"]
    library = module.partition(".")[0]
    if library not in sys.modules or hasattr(sys.modules.get(module), name):
        return None
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    packages = [one for file in reversed(files) if (one := _package(file)) and one != library]
    user, used = _version(packages[0]) if packages else None, _version(library)
    if user is None or used is None:
        return None
    before = ".".join(used[1].split(".")[:2])
    return (
        f"{' '.join(user)} uses {module}.{name}, which {' '.join(used)} does not have; it works "
        f"with older versions: pip install '{used[0]}<{before}'"
    )


def _package(file: str) -> str | None:
    """The package, as a folder of sys.path, that holds a file."""
    path = Path(file)
    folders = [folder for folder in sys.path if folder and path.is_relative_to(folder)]
    if not folders:
        return None
    parts = path.relative_to(max(folders, key=len)).parts
    return parts[0] if len(parts) > 1 else None


def _version(package: str) -> tuple[str, str] | None:
    """Under which name a package is installed, and its version."""
    names = metadata.packages_distributions().get(package)
    return (names[0], metadata.version(names[0])) if names else None
