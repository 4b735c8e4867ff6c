"""How many tokens of a text are read where nobody said: few where that holds most documents whole, else more."""

from collections.abc import Sequence

from asi.config import SHORT_TEXT
from asi.encoder import find_encoder, load_tokeniser, longest_text
from asi.records import Document

LONG_TEXT = 256  # tokens
CUT = 0.2  # share of the documents that may be longer than SHORT_TEXT; if more are, LONG_TEXT is read
SAMPLE = 10_000  # documents that are looked at, from all parts of the corpus


def suited_length(encoder: str, documents: Sequence[Document]) -> int:
    """What the default of `model.max_length` means for these documents and this encoder."""
    source = find_encoder(encoder)
    room = longest_text(source)
    if room <= SHORT_TEXT:
        return room
    sample = [document.content for document in documents[:: max(1, -(-len(documents) // SAMPLE))]]
    lengths = load_tokeniser(source, SHORT_TEXT + 1)(sample).lengths
    return SHORT_TEXT if (lengths > SHORT_TEXT).sum() <= CUT * len(sample) else min(LONG_TEXT, room)
