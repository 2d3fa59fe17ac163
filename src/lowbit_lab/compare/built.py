"""What a compiler made of a kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowbit_lab.compare.code import Code

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Typed:
    """A variable with the type that a compiler inferred, and the line of its first assignment.
    why, where: what made it so wide, and on which line, if that is known."""

    name: str
    type: str
    line: int | None
    why: str = ""
    where: int | None = None


@dataclass(frozen=True)
class Built:
    """A variant as its compiler made it.

    lines, first_line, file: the text. types: of its variables. made_by: the compilers. ptx, entry:
    for a GPU, with the name of the kernel; threads: of a block; shared: bytes of dynamic shared
    memory; most_registers: that the kernel allows itself. code: for a CPU. stages: texts on the
    way, by name. widest: elements of the largest tensor that the threads of a block share; None
    where the text says what each thread does. missing: what could not be had.
    """

    lines: Sequence[str]
    first_line: int
    file: str
    types: tuple[Typed, ...] = ()
    made_by: str = ""
    ptx: str | None = None
    entry: str | None = None
    threads: int = 0
    shared: int = 0
    most_registers: int | None = None
    code: Code | None = None
    stages: Mapping[str, str] | None = None
    widest: int | None = None
    missing: tuple[str, ...] = ()


def plain(text: str) -> str:
    """Without a terminal's escape codes."""
    return _ESCAPE.sub("", text)
