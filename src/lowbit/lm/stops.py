"""Strings that end a text, also where they come in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class Stops:
    """Looks for strings in a text that comes piece by piece. The one that ends first counts,
    however the text is cut. ValueError: a string is empty."""

    def __init__(self, strings: str | Iterable[str]) -> None:
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in self._strings:
            raise ValueError("a stop string is empty")
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """What can be shown of the text up to here, and whether it ends with that: a stop string
        follows, which is not shown."""
        text = self._held + piece
        found = [(at + len(one), at) for one in self._strings if (at := text.find(one)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        kept = next((at for at in range(len(text)) if self._may_begin(text, at)), len(text))
        self._held = text[kept:]
        return text[:kept], False

    def _may_begin(self, text: str, at: int) -> bool:
        return any(len(text) - at < len(one) and one.startswith(text[at:]) for one in self._strings)

    def rest(self) -> str:
        """What was not shown, as a stop string might have begun with it; nothing follows."""
        held, self._held = self._held, ""
        return held
