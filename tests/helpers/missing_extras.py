"""A pytest plugin: a file that imports what an extra would have installed is skipped without it.

So no test file has to say what it needs; lowbit's own table of extras does.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from lowbit.registry.extras import EXTRA_OF


def missing_module(error: BaseException | None) -> str:
    """The optional module for lack of which an import failed; "" where that is not the cause."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in EXTRA_OF:
            return "" if is_installed(name) else name
        error = error.__cause__ or error.__context__
    return ""


def is_installed(name: str) -> bool:
    """Whether a module can be found. It may be here, and itself lack something: that is a fault."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class File(pytest.Module):
    """A test file."""

    def _getobj(self) -> ModuleType:
        try:
            return super()._getobj()
        except BaseException as error:
            self.forget_half_of_it()
            name = missing_module(error)
            if name:
                pytest.skip(f"{name} is not installed", allow_module_level=True)
            raise

    def forget_half_of_it(self) -> None:
        """Files that import from this one would find only what stands before the failure."""
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == str(self.path):
                del sys.modules[name]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return File.from_parent(parent, path=module_path)
