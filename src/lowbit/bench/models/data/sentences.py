"""Real sentences that are on every machine: the prose of Python's own manual.

CPython ships the texts of its `help()` topics as `pydoc_data.topics`. They are written by
people, for people, and come with the interpreter, so nothing has to be downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

FEWEST_WORDS, MOST_WORDS = 5, 40

# The end of a sentence: a full stop after a word, then something that can begin the next.
_BOUNDARY = re.compile(r'(?<=[a-z0-9)"*]\.)\s+(?=[A-Z"(])')
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|cf|vs|resp)\.$")
# Grammar, code, tables, headings and list items are not prose.
_NOT_PROSE = re.compile(r"::|\[\d|[|{}<>=_\\`~^]|--|\.\.\.|\*\*")


def manual_sentences(count: int) -> list[str]:
    """`count` different English sentences from Python's manual, spread evenly over it.

    The same ones on every run of one Python version. RuntimeError if this Python lacks the
    texts, ValueError if they hold fewer sentences than that.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python came without pydoc_data.topics, where the demo's sentences are from; "
            "install your system's full python3 package"
        ) from error
    found = list(dict.fromkeys(extract(topics[name] for name in sorted(topics))))
    if not 0 < count <= len(found):
        raise ValueError(f"expected 1 to {len(found)} sentences, got {count}")
    return [found[index * len(found) // count] for index in range(count)]


def extract(texts: Iterable[str]) -> Iterator[str]:
    """The whole sentences of 5 to 40 words in the flowing paragraphs of `texts`, in order."""
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            lines = paragraph.splitlines()
            if any(line.startswith((" ", "\t")) for line in lines) or not lines:
                continue  # indented: code, a table, or a list
            for sentence in _split(re.sub(r"(?<=\w)-\n", "-", paragraph)):
                if _is_whole(sentence):
                    yield sentence


def _split(paragraph: str) -> Iterator[str]:
    begin = ""
    for piece in _BOUNDARY.split(re.sub(r"\s+", " ", paragraph.strip())):
        begin = f"{begin} {piece}".strip()
        if not _ABBREVIATION.search(begin):
            yield begin
            begin = ""
    if begin:
        yield begin


def _is_whole(sentence: str) -> bool:
    if not (sentence[0].isupper() and sentence.endswith(".")) or _NOT_PROSE.search(sentence):
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    letters = sum(character.isalpha() or character == " " for character in sentence)
    words = len(sentence.split())
    return FEWEST_WORDS <= words <= MOST_WORDS and letters >= 0.9 * len(sentence)
