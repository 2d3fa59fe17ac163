"""Tokens that may come next: those that followed the last ones where they came before.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.lm.arguments import whole

MOST = 7  # proposals: with the token before them a chunk of 8 rows
_LENGTH = 3  # tokens that are looked up; with 2, more proposals are wrong
# To check proposals takes longer than a step, up to three times as long: so many more of them have
# to be accepted. A balance of gains and costs below a cost ends the proposals until it has grown.
# It counts tokens, not seconds: the same text is made each time.
_COST, _START, _FULL, _GROWTH = 2.0, 4.0, 12.0, 1 / 64


class PromptLookup:
    """Proposals for a sequence, as long as enough of them are accepted.

    most: how many at once, at most 7; 0: none. proposed, accepted: how many there were.
    ValueError: most is out of its range. TypeError: it is no whole number."""

    def __init__(self, most: int) -> None:
        self._most = whole("speculate", most, most=MOST)
        self._cost = min(_COST, self._most / 2)
        self.proposed, self.accepted, self._balance = 0, 0, _START
        self._seen, self._behind = _LENGTH, dict[tuple[int, ...], int]()

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """What may follow `ids`, which have grown since the last call: `most` tokens or fewer."""
        most = min(most, self._most)
        if most <= 0:
            return []
        for at in range(self._seen, len(ids)):
            self._behind[tuple(ids[at - _LENGTH : at])] = at
        grown, self._seen = len(ids) - self._seen, max(self._seen, len(ids))
        self._balance = min(self._balance + grown * _GROWTH, _FULL)
        if self._balance < self._cost:
            return []
        at = self._behind.get(tuple(ids[-_LENGTH:]), len(ids))
        again = ids[at : at + most]  # what ends here is taken to go round
        return [again[i % len(again)] for i in range(most)] if again else []

    def count(self, proposed: int, accepted: int) -> None:
        """Tell how many of the proposals were right."""
        self.proposed += proposed
        self.accepted += accepted
        self._balance += accepted - self._cost if proposed else 0
