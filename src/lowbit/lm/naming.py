"""Errors in a file name the file, and show nothing of it that a terminal obeys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.registry.printable import printable

# What reading a damaged file may raise: a number where a text or a list should be, a 0, a name that
# is not there, objects in objects without an end.
_OF_DAMAGE = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Where a file or a folder is read: errors say which.

    ValueError: it is damaged. NotImplementedError, MemoryError: with the path before the message.
    """
    try:
        yield
    except OSError:
        raise
    except NotImplementedError as error:
        raise NotImplementedError(_named(path, error)) from error
    except MemoryError as error:
        raise MemoryError(_named(path, error)) from error
    except ValueError as error:
        raise ValueError(_named(path, error)) from error
    except _OF_DAMAGE as error:
        what = f"sizes, factors or names in it are none: {type(error).__name__}: {error}"
        raise ValueError(_named(path, what)) from error


def _named(path: str | os.PathLike[str], error: Exception | str) -> str:
    message, name = printable(str(error)), printable(os.fspath(path))
    return message if name in message else f"{name}: {message}"
