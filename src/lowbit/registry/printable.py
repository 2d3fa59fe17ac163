"""Text of strangers, as a terminal may get it."""

from __future__ import annotations

import re

# Characters that steer a terminal, but for ends of lines and tabs.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """A name or a message in which every character that does not print is escaped, but for ends of
    lines: steering ones, and those that turn the order of letters or take no place."""
    return "".join(
        letter if letter == "\n" or letter.isprintable() else _escaped(letter) for letter in text
    )


def without_steering(text: str) -> str:
    """A text of any script, in which characters that steer a terminal are escaped."""
    return _STEERING.sub(lambda match: _escaped(match[0]), text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
