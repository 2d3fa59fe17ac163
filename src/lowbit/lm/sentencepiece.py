"""SentencePiece's byte-pair encoding: pieces with scores, of which the best pair is merged first.

Source: Kudo and Richardson 2018, "SentencePiece" (arXiv:1808.06226).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

SPACE = "▁"
"""What stands for a space in pieces."""

# A word with the spaces before it. Where no piece has a space behind another character, merges
# never cross from one word to the next.
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_MOST_KEPT, _LONGEST_KEPT = 1 << 16, 64


class SentencePiece:
    """A vocabulary that turns text without added tokens into ids.

    ids: by piece; scores: by id, the highest is merged first. A character that is no piece becomes
    its bytes, as the pieces <0x00> to <0xFF>, or `unknown`, or nothing if that is None.
    """

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None = None
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._bytes = [ids.get(f"<0x{byte:02X}>", unknown) for byte in range(256)]
        self._cut = not any(SPACE in piece.lstrip(SPACE) for piece in ids)
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text; a space of it is taken as `SPACE`."""
        text = text.replace(" ", SPACE)
        words = _WORDS.findall(text) if self._cut else [text]
        return [id for word in words for id in self._word(word)]

    def _word(self, word: str) -> list[int]:
        found = self._kept.get(word)
        if found is None:
            found = self._merged(word)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            if len(word) <= _LONGEST_KEPT:
                self._kept[word] = found
        return found

    def _merged(self, word: str) -> list[int]:
        """Pieces begin where `ends` is not 0, and end there; the leftmost of the best pairs merges
        first."""
        length = len(word)
        ends = list(range(1, length + 1))
        before = list(range(-1, length))
        pairs: list[tuple[float, int, int]] = []

        def propose(left: int) -> None:
            if left >= 0 and ends[left] < length:
                end = ends[ends[left]]
                id = self._ids.get(word[left:end])
                if id is not None:
                    heappush(pairs, (-self._scores[id], left, end))

        for left in range(length):
            propose(left)
        while pairs:
            _, left, end = heappop(pairs)
            middle = ends[left]
            if middle in (0, length) or ends[middle] != end:
                continue  # one of the two has merged with another meanwhile
            ends[left], ends[middle] = end, 0
            if end < length:
                before[end] = left
            propose(before[left])
            propose(left)
        starts = [start for start in range(length) if ends[start]]
        return [id for start in starts for id in self._piece(word[start : ends[start]])]

    def _piece(self, piece: str) -> list[int]:
        id = self._ids.get(piece)
        if id is not None:
            return [id]
        held = (self._bytes[byte] for byte in piece.encode("utf-8", "replace"))
        return [id for id in held if id is not None]
