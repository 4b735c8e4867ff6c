"""What an n-gram system may write: all windows over the texts of a corpus.

Every text is cut into its windows of up to LENGTH word pieces; sorted, they are a suffix array that is cut off at that
length, and a prefix tree over them lets a beam write only what stands somewhere in the corpus.
Letters: W windows, L window length.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asi.beam import PrefixTree
from asi.encoder import TokenisedTexts
from asi.errors import ConfigError
from asi.systems.identifiers import END
from asi.systems.words import WordCodes, inner

Rows = NDArray[np.integer[Any]]

LENGTH = 8  # word pieces of an n-gram, at most
MOST_WINDOWS = 2**25  # about 6 GB with their tree


class TextView(NamedTuple):
    """One kind of text of every document, as all windows over its word pieces."""

    tokens: TokenisedTexts  # of the view's texts
    owners: Rows  # (texts,) the document of each text
    marker: int  # the code that stands before every window
    windows: Rows  # (W, L) sorted, marker first
    documents: Rows  # (W,) the document that each window stands in
    places: Rows  # (W,) the token that each begins with
    tree: PrefixTree
    starts: list[Rows]  # per depth: where the windows with each prefix begin

    @property
    def bytes(self) -> int:
        """Of what can't be computed from the rest: each window's pieces, two bytes each, and its document, four."""
        return len(self.windows) * (2 * LENGTH + 4)

    @classmethod
    def of(cls, tokens: TokenisedTexts, owners: Rows, marker: int, words: WordCodes, starts: int = 1) -> "TextView":
        """Every text has one token behind it that is none of its own, and `starts` before it."""
        places, owner_of_window = windows_of(tokens, starts)
        if len(places) > MOST_WINDOWS:
            raise ConfigError(f"{len(places):,} word pieces are more than n-grams are kept of; leave this system out")
        windows = np.full((len(places), LENGTH + 1), marker, dtype=np.int32)
        windows[:, 1:] = np.where(places >= 0, words.of_piece[tokens.ids[np.maximum(places, 0)]], END)
        order = np.lexsort(windows.T[::-1])
        windows = windows[order]
        firsts, is_new = [], np.zeros(len(windows), dtype=bool)
        is_new[:1] = True
        for depth in range(windows.shape[1]):
            is_new[1:] |= windows[1:, depth] != windows[:-1, depth]
            firsts.append(np.append(np.flatnonzero(is_new), len(windows)))
        tree = PrefixTree(windows, len(words))
        documents = owners[owner_of_window][order].astype(np.int32)
        return cls(tokens, owners, marker, windows, documents, places[order, 0], tree, firsts)


def windows_of(tokens: TokenisedTexts, starts: int) -> tuple[Rows, Rows]:
    """Places of the pieces of every window (W, LENGTH), -1 behind the text's end, and the text of each window."""
    first = np.flatnonzero(inner(tokens, starts))
    texts = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens.lengths)[first]
    places = first.astype(np.int32)[:, None] + np.arange(LENGTH, dtype=np.int32)
    return np.where(places < tokens.offsets[texts + 1][:, None] - 1, places, np.int32(-1)), texts
