"""How far someone is in the course, in a small file of JSON.

The folder is $LOWBIT_STATE_DIR, else $XDG_STATE_HOME/lowbit, else where the platform keeps a
user's data. The file is replaced as a whole by renaming, so that a reader never sees half of it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.weights.tensor_file import replacing

_VERSION = 1


@dataclass(frozen=True)
class Standing:
    """What is known of one exercise. file: where it was last. tries: how often it was checked.
    hints: how many were shown."""

    file: str | None = None
    tries: int = 0
    solved: bool = False
    hints: int = 0

    def __str__(self) -> str:
        if self.solved:
            return "done"
        if self.tries:
            return "tried"
        return "not yet"


def folder() -> Path:
    """Where the file is. RuntimeError for a user who has no home and no variable that says."""
    chosen = os.environ.get("LOWBIT_STATE_DIR")
    if chosen:
        return Path(chosen)
    # A relative path is to be ignored (XDG Base Directory Specification).
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "lowbit"
    try:
        home = Path.home()
    except RuntimeError:
        raise RuntimeError(
            "there is no home folder to keep the progress in; set LOWBIT_STATE_DIR to another one"
        ) from None
    return home / _HOMES.get(sys.platform, ".local/state") / "lowbit"


_HOMES = {"darwin": "Library/Application Support", "win32": "AppData/Local"}


class Progress:
    """The file, read and written. `warn` is told, in one line, when it is damaged or cannot be
    written; the course goes on without it."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.path = folder() / "learn.json"

    def read(self) -> dict[str, Standing]:
        """The exercises that something is known of, by the name of their operation."""
        try:
            text = self.path.read_text(encoding="utf-8")
            return _parsed(json.loads(text))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"the progress cannot be read: {self.path}: {error.strerror}")
            return {}
        except ValueError as error:
            self._set_aside(str(error))
            return {}

    def update(self, name: str, change: Callable[[Standing], Standing]) -> Standing:
        """Change what is known of one exercise, and return it as it is now."""
        known = self.read()
        now = change(known.get(name, Standing()))
        exercises = {n: asdict(e) for n, e in {**known, name: now}.items()}
        text = json.dumps({"version": _VERSION, "exercises": exercises}, indent=2) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                file.write(text.encode())
        except OSError as error:
            self._warn(f"the progress cannot be kept: {self.path}: {error.strerror}")
        return now

    def _set_aside(self, reason: str) -> None:
        names = (self.path.with_name(f"learn.damaged-{n}.json") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            self.path.rename(aside)
        except OSError as error:
            self._warn(f"the progress in {self.path} is damaged ({reason}): {error.strerror}")
        else:
            self._warn(f"the progress was damaged ({reason}) and starts afresh; it is now {aside}")


_FIELDS: Mapping[str, tuple[type, ...]] = {
    "file": (str, type(None)),
    "tries": (int,),
    "solved": (bool,),
    "hints": (int,),
}


def _parsed(data: Any) -> dict[str, Standing]:
    """ValueError, with what is wrong, if it is not what `update` writes."""
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    exercises = data.get("exercises")
    if not isinstance(exercises, dict):
        raise ValueError("it has no exercises")
    for name, values in exercises.items():
        types = (
            {key: type(value) for key, value in values.items()} if isinstance(values, dict) else {}
        )
        if types.keys() != _FIELDS.keys() or any(types[n] not in _FIELDS[n] for n in types):
            raise ValueError(f"{name} is {values!r}")
    return {name: Standing(**values) for name, values in exercises.items()}
