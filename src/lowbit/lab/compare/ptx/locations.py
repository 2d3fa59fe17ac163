"""Where the instructions of PTX come from."""

from __future__ import annotations

import re
from collections.abc import Container

_PLACE = r"(\d+)\s+(\d+)\s+(\d+)"
_STATEMENT = re.compile(rf"\.loc\s+{_PLACE}(?:.*inlined_at\s+{_PLACE})?")
_BEGIN, _END, _LOCATION = "// begin inline asm", "// end inline asm", ".loc"


def settled(ptx: str) -> str:
    """The PTX with one location for each block of inline assembly.

    LLVM gives each line of such a block a location of its own, counted on from the statement's line
    as if the block stood in the file, and says nothing behind it if the next instruction belongs to
    the statement, too. The first is the statement's.
    """
    kept: list[str] = []
    inside = located = False
    for row in ptx.splitlines():
        text = row.strip()
        if text in (_BEGIN, _END):
            inside, located = text == _BEGIN, False
        elif inside and text.startswith(_LOCATION):
            if located:
                continue
            located = True
        kept.append(row)
    return "\n".join(kept) + "\n"


class Lines:
    """The line of the kernel's own files while its locations are read.

    now: None before the first, 0 for what a compiler says of no line.
    """

    def __init__(self, own: Container[int]) -> None:
        self.now: int | None = None
        self._own = own
        self._callers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def enter(self, statement: str) -> None:
        """Go to the location of a statement `.loc`: its line, or of what is inlined from another
        file the line of the call. None where the call is one of several."""
        found = _STATEMENT.match(statement)
        if found is None:
            return
        numbers = [int(number) for number in found.groups() if number]
        place, caller = tuple(numbers[:3]), tuple(numbers[3:])
        if caller:
            self._callers.setdefault(place, set()).add(caller)
        if place[1] == 0:
            self.now = 0
            return
        lines = self._lines({place} if not caller or place[0] in self._own else {caller})
        if self.now not in lines:
            self.now = lines.pop() if len(lines) == 1 else None

    def _lines(self, places: set[tuple[int, ...]]) -> set[int]:
        """The lines of the own files that lead to these places."""
        found, seen = set[int](), set[tuple[int, ...]]()
        while places:
            place = places.pop()
            if place[0] in self._own:
                found.add(place[1])
            elif place not in seen:
                places |= self._callers.get(place, set())
            seen.add(place)
        return found
