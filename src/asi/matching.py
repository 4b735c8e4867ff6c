"""Ranking by tokens: only few documents are ranked, so each can be looked at more closely than by one vector.

A text keeps its rarest tokens, each as a short unit vector: the encoder's token state, projected. The match of a query
with a document is the mean, over the query's tokens, of the similarity with the document's nearest token; rare tokens
count more, and what else a token counts is learned.
Letters: B texts, T kept tokens, D encoder width, d token width, n documents.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.encoder import TokenisedTexts
from asi.features import TOKENS_PER_BATCH, Features, on_device
from asi.model import Asi, Encoded, TokenMatcher

LEAST_RARITY = 1e-3  # a query of words that all documents have is still a query
QUERY_TOKENS = 32
TEXTS_AT_ONCE = 32
STARTING_TEXTS = 512  # whose token states say where the projection starts
BYTE = 127


class KeptTokens(NamedTuple):
    places: NDArray[np.int64]  # (B, T) in the text; 0 where it has no more tokens
    rarity: NDArray[np.float32]  # (B, T); 0 where it has no more tokens


def rarity_of(tokens: TokenisedTexts, vocabulary: int) -> NDArray[np.float32]:
    """log(N / number of texts with the token) for every token of the vocabulary."""
    owners = np.repeat(np.arange(len(tokens)), tokens.lengths)
    different = np.unique(owners * vocabulary + tokens.ids)
    counts = np.bincount(different % vocabulary, minlength=vocabulary)
    rarity: NDArray[np.float32] = np.log((len(tokens) + 1) / (counts + 1)).astype(np.float32)
    return rarity


def kept_tokens(tokens: TokenisedTexts, rows: NDArray[np.int64], rarity: NDArray[np.float32], count: int) -> KeptTokens:
    """The `count` rarest tokens of each text, rarest first, and among equals the first."""
    places, mask = tokens.places(rows)
    found = np.where(mask, np.maximum(rarity[tokens.ids[places]], LEAST_RARITY), 0)
    found = np.pad(found, ((0, 0), (0, max(0, count - found.shape[1]))))
    order = np.argsort(-found, axis=1, kind="stable")[:, :count]
    kept = np.take_along_axis(found, order, axis=1).astype(np.float32)
    return KeptTokens(np.where(kept > 0, order, 0), kept)


def matched_tokens(model: Asi, documents: TokenisedTexts) -> NDArray[np.bool_] | None:
    """Which of all tokens their documents keep: once states are final, nothing looks at those of the others.

    None if nothing is matched, or if states are not final, so that all of them may be looked at.
    """
    if model.matcher is None or not model.encoder.is_frozen:
        return None
    found = np.zeros(len(documents.ids), dtype=bool)
    for rows in documents.batches(TOKENS_PER_BATCH):
        kept = kept_tokens(documents, rows, model.matcher.known_rarity, model.matcher.kept)
        found[(documents.offsets[rows][:, None] + kept.places)[kept.rarity > 0]] = True
    return found


def kept_states(
    model: Asi, features: Features, rows: NDArray[np.int64], kept: KeptTokens, encoded: Encoded | None
) -> Tensor:
    """The encoder's states (B, T, D) of the kept tokens: those that are stored if they are final, else `encoded`'s."""
    if features.states is not None and model.encoder.is_frozen:
        return on_device(model, features.states[features.tokens.offsets[rows][:, None] + kept.places])
    assert encoded is not None, "token states that are not stored come from an encoding"
    places = torch.from_numpy(kept.places).to(encoded.states.device)
    return encoded.states.gather(1, places[:, :, None].expand(-1, -1, encoded.states.size(2)))


def document_tokens(
    matcher: TokenMatcher, model: Asi, features: Features, rows: NDArray[np.int64], encoded: Encoded | None
) -> Tensor:
    """Unit vectors (B, T, d) of the documents' kept tokens, 0 where there are no more."""
    kept = kept_tokens(features.tokens, rows, matcher.known_rarity, matcher.kept)
    return matcher(kept_states(model, features, rows, kept, encoded), torch.from_numpy(kept.rarity))


def query_tokens(
    matcher: TokenMatcher,
    model: Asi,
    features: Features,
    rows: NDArray[np.int64],
    encoded: Encoded | None,
    count: int = QUERY_TOKENS,
) -> Tensor:
    """Vectors (B, T, d) of the queries' kept tokens, each as long as what it counts."""
    kept = kept_tokens(features.tokens, rows, matcher.known_rarity, count)
    states, rarity = kept_states(model, features, rows, kept, encoded), torch.from_numpy(kept.rarity)
    return matcher(states, rarity) * matcher.shares(states, rarity)[:, :, None]


def start_matcher(model: Asi, tokens: TokenisedTexts, known: NDArray[np.int64]) -> None:
    """Let the matcher start from these documents: rarities, and the directions in which the token states of the `known`
    ones differ, those that training pairs lead to."""
    if model.matcher is None:
        return
    model.matcher.set_rarity(rarity_of(tokens, model.encoder.shape.vocabulary))
    rows = known[np.unique(np.linspace(0, len(known) - 1, STARTING_TEXTS).astype(np.int64))]
    found = []
    with torch.inference_mode():
        for own in np.array_split(rows, -(-len(rows) // TEXTS_AT_ONCE)):
            ids, mask = (part.to(model.device) for part in tokens.padded(own))
            found.append(model.encoder(ids, mask)[mask].float())
    states = torch.nn.functional.normalize(torch.cat(found), dim=-1)
    model.matcher.set_directions(torch.linalg.svd(states, full_matrices=False).Vh)


def to_bytes(tokens: Tensor) -> NDArray[np.int8]:
    """Token vectors (B, T, d) as a row of bytes each."""
    rounded: NDArray[np.int8] = (tokens.float() * BYTE).round().to(torch.int8).flatten(1).cpu().numpy()
    return rounded


def match(query: Tensor, documents: NDArray[np.int8], kept: int) -> NDArray[np.float32]:
    """How well each document (n, T * d) matches the query (T, d)."""
    rows = torch.from_numpy(documents).to(query.device, query.dtype).view(-1, query.size(1))  # (n T, d)
    similar = (rows @ query.T).view(len(documents), kept, len(query)).amax(1).sum(1) / BYTE
    found: NDArray[np.float32] = similar.float().cpu().numpy()
    return found
