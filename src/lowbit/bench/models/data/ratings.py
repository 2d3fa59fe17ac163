"""Words whose sentiment ten people rated: the lexicon in the package vaderSentiment
(Hutto & Gilbert 2014)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowbit.registry.extras import folder_of


def rated_words() -> tuple[list[str], npt.NDArray[np.float64]]:
    """The lexicon's words of letters, and their mean ratings from −4 to 4, in a random order that
    is always the same. ModuleNotFoundError if the package is not installed."""
    path = folder_of("the rated words", "vaderSentiment") / "vader_lexicon.txt"
    # word, mean, deviation, list of ratings.
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines() if line]
    found = {row[0]: float(row[1]) for row in rows if row[0].isalpha() and row[0].isascii()}
    words = sorted(found)
    order = np.random.default_rng(0).permutation(len(words))
    return [words[i] for i in order], np.array([found[words[i]] for i in order])
