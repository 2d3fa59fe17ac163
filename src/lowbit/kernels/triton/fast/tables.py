"""Tables of configurations that were measured on one kind of GPU, for products where the rule of a
kernel is not the best.

Some come with lowbit, in the folder `tables`; `lowbit bench tune` writes others into the cache's
folder, which are looked at first. An entry is for one size of a weight and for the rows of x up to
a power of two; it serves fewer rows where they are cut into as many tiles.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lowbit.jit.cache import folder
from lowbit.kernels.triton.fast.launch import Config, Gpu, forget_choices
from lowbit.registry.files import write_text

MOST_ROWS = 4096
"""Of x, that a table knows."""
OWN = Path(__file__).parent / "tables"
_LOG = logging.getLogger(__name__)

C = TypeVar("C", bound=Config)


class Key(NamedTuple):
    """What an entry is for: a kernel, the kind of its operands, and sizes."""

    kernel: str
    kind: str
    M: int
    N: int
    K: int


Entries = dict[Key, dict[str, Any]]
"""By key: `config`, its fields by name, or None where the rule was the best; `gain`, how many times
as fast as the rule it was."""


def path_of(gpu: Gpu, own: bool = False) -> Path:
    """The file for a kind of GPU; own: of lowbit's, not of the user's."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return (OWN if own else folder() / "gpu") / f"{name}.json"


def read(path: Path) -> tuple[dict[str, Any], Entries]:
    """What a file says of its GPU, and its entries; nothing where there is no such file, or where
    it is damaged, which is logged."""
    try:
        about = json.loads(path.read_text())
        entries = {Key(*map(one.pop, Key._fields)): one for one in about.pop("entries")}
        for one in entries.values():
            one["config"], one["gain"] = one["config"] and dict(one["config"]), float(one["gain"])
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _LOG.warning("the table %s is not used: %s", path, error)
        return {}, {}
    return about, entries


def write(path: Path, about: Mapping[str, Any], entries: Entries) -> None:
    """Put a whole new file in place of one."""
    lines = (json.dumps({**key._asdict(), **one}) for key, one in sorted(entries.items()))
    text = json.dumps({**about, "entries": []}, indent=1).removesuffix("]\n}")
    write_text(path, text + "\n  " + ",\n  ".join(lines) + "\n ]\n}\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """While this process has a table for itself: others that want to write it wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _known(gpu: Gpu, places: tuple[Path, ...]) -> dict[Key, tuple[dict[str, Any], Path]]:
    found = dict[Key, tuple[dict[str, Any], Path]]()
    for path in places:
        found |= {key: (one, path) for key, one in read(path)[1].items()}
    return found


class Trial:
    """A configuration on trial, None for that of the rules; and, by key, what was asked for within
    it: the rule's configuration, and facts of the call."""

    def __init__(self, config: Config | None) -> None:
        self.config = config
        self.asked: dict[Key, tuple[Config, Sequence[Any]]] = {}


_trial: Trial | None = None


@contextmanager
def trying(config: Config | None) -> Iterator[Trial]:
    """Within it, no table is looked at, and products that have a configuration of this kind are cut
    by this one. For one thread, which tunes."""
    global _trial
    before, _trial = _trial, Trial(config)
    forget_choices()
    try:
        yield _trial
    finally:
        _trial = before
        forget_choices()


def measured(
    gpu: Gpu,
    kernel: str,
    kind: str,
    sizes: tuple[int, int, int],
    rule: C,
    facts: Sequence[Any] = (),
) -> tuple[C, str]:
    """The configuration for sizes (M, N, K) that a table has, else the rule's; and where it comes
    from, in words. facts: of the call, which its `refusal` asks for."""
    M, N, K = sizes
    rows = 1 << (M - 1).bit_length()
    key = Key(kernel, kind, rows, N, K)
    if _trial is not None:
        _trial.asked[key] = rule, facts
        tried: Any = _trial.config
        return (tried, "on trial") if type(tried) is type(rule) else (rule, "")
    if not gpu.name or rows > MOST_ROWS:
        return rule, ""
    places = path_of(gpu, own=True), path_of(gpu)
    entry, path = _known(gpu, places).get(key, (None, None))
    if entry is None:
        return rule, "by the rule; no table has these sizes"
    where = "lowbit's table" if path == places[0] else str(path)
    if entry["config"] is None:
        return rule, f"by the rule, the fastest in {where}"
    try:
        found = replace(rule, **entry["config"])
        refusal = found.refusal(*facts)
    except TypeError as error:
        found, refusal = rule, str(error)
    columns = getattr(found, "columns", rows)
    if -(-M // columns) != -(-rows // columns):
        refusal = refusal or f"what {where} has for {rows} rows cuts x otherwise"
    if refusal:
        return rule, f"by the rule; {refusal}"
    return found, f"{entry['gain']:.2f} times as fast as the rule when measured, by {where}"
