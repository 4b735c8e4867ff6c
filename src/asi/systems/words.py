"""Codes that are word pieces, for decoders that write words.

The originals begin as pretrained writers (BART, T5), which know words and can copy what they read. Our decoders begin
from nothing, so their tables start as the encoder's vectors of the pieces, and the pieces that the text has are
likelier from the start, by a weight that is learned.
Letters: B texts, T tokens, L codes of a docid, V codes, d decoder width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.encoder import TextTokeniser, TokenisedTexts
from asi.model import Decoder, table_of_words

Rows = NDArray[np.int64]

NO_PIECE = -1
COPYING = 5.0  # added to the logits of the text's own pieces; the decoder learns a factor


class WordCodes:
    """Which word piece of the encoder each code stands for. Code 0 stands for none: it ends a docid."""

    def __init__(self, pieces: Rows, vocabulary: int) -> None:
        self.pieces = pieces  # (V,) NO_PIECE for codes that are no words
        self.of_piece = np.zeros(vocabulary, dtype=np.int64)
        self.of_piece[pieces[pieces >= 0]] = np.flatnonzero(pieces >= 0)

    @classmethod
    def of_texts(cls, tokens: Sequence[TokenisedTexts], tokenise: TextTokeniser, others: int = 0) -> "WordCodes":
        """The pieces that stand in some text, in their order, then `others` that are no words."""
        used = np.unique(np.concatenate([own.ids[inner(own, tokenise.starts)] for own in tokens]))
        pieces = np.concatenate([[NO_PIECE], used, np.full(others, NO_PIECE)])
        return cls(pieces, tokenise.tokeniser.get_vocab_size())

    def __len__(self) -> int:
        return len(self.pieces)

    def start(self, decoder: Decoder, vectors: Tensor) -> None:
        """Set rows of the decoder's tables from the encoder's vectors of all pieces, along their main directions."""
        codes = torch.from_numpy(np.flatnonzero(self.pieces >= 0)).to(decoder.outputs.device)
        own = vectors[torch.from_numpy(self.pieces[self.pieces >= 0]).to(vectors.device)]
        rows = table_of_words(own, decoder.outputs.size(-1))
        with torch.no_grad():
            for tables in (decoder.embeddings, decoder.outputs):
                tables[:, codes, : rows.size(1)] = rows.to(tables.device, tables.dtype)

    def prior(self, tokens: TokenisedTexts, rows: Rows, decoder: Decoder) -> Tensor:
        """What speaks for each code before anything is written (B, L, V): that the text has its piece."""
        ids, _ = tokens.padded(rows)
        found = torch.zeros(len(rows), len(self.pieces))
        found.scatter_(1, torch.from_numpy(self.of_piece)[ids], COPYING)
        found[:, 0] = 0
        return found.to(decoder.outputs.device)[:, None].expand(-1, decoder.m, -1)


def inner(tokens: TokenisedTexts, starts: int) -> NDArray[np.bool_]:
    """Which of all tokens belong to the texts themselves: not the `starts` before each text, nor the one behind it."""
    inside = np.ones(len(tokens.ids), dtype=bool)
    for before in range(starts):
        inside[tokens.offsets[:-1] + before] = False
    inside[tokens.offsets[1:] - 1] = False
    return inside
