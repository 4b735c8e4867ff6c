"""Docids that are made before training, each way of the literature as a function.

A docid is a row of codes; where docids differ in length, 0 ends a docid and fills it up, and the codes begin at 1.
Only documents that a system knows get one, unless it can give one to new documents without being trained again.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asi.encoder import TextTokeniser
from asi.ranking import unit
from asi.records import Document
from asi.systems.words import WordCodes
from asi.systems.workplace import Source, Workplace, require_faiss
from asi.texts import words

Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]

END = 0
LONGEST = 24  # word pieces of a docid in words
SENTENCES = 8  # of a document, that have a docid of their own
KMEANS_ROUNDS = 20
MOST_OF_AN_ADDRESS = 10  # documents


class Identifiers(NamedTuple):
    codes: Rows  # (R, L)
    documents: Rows  # (R,) the document that each is an identifier of
    V: int
    shared: bool  # a code means the same at every position
    ends: bool = True  # code 0 ends a docid; if not, all docids have the same length and 0 is a code as others
    words: WordCodes | None = None  # where codes are word pieces

    @property
    def bytes_each(self) -> int:
        return self.codes.shape[1] * (1 if self.V <= 256 else 2)

    def first_rows(self, count: int) -> Rows:
        """The row of the first identifier of each of so many documents (count,); -1 for those that have none."""
        rows = np.full(count, -1)
        rows[self.documents[::-1]] = np.arange(len(self.documents))[::-1]
        return rows


def padded(sequences: Sequence[Sequence[int]]) -> Rows:
    width = max(1, *map(len, sequences))
    codes = np.full((len(sequences), width), END, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        codes[row, : len(sequence)] = sequence
    return codes


def atomic(workplace: Workplace) -> Identifiers:
    """One code for each known document, in random order."""
    known = workplace.known
    codes = np.random.default_rng(workplace.terms.seed).permutation(len(known))
    return Identifiers(codes[:, None], known, len(known), shared=True, ends=False)


def numbers(workplace: Workplace) -> Identifiers:
    """The digits of an arbitrary number (DSI's naive strings)."""
    known = workplace.known
    order = np.random.default_rng(workplace.terms.seed).permutation(len(known))
    return Identifiers(padded([[int(digit) + 1 for digit in str(number)] for number in order]), known, 11, shared=True)


def semantic(workplace: Workplace, k: int, leaf: int, *, shared: bool) -> Identifiers:
    """The path in a tree of k-means clusters, then the number within the leaf, in digits of base k.

    The tree is grown on the known documents; new ones walk down to the nearest centres and get the next numbers.
    """
    vectors = unit_vectors(workplace)
    is_known = np.zeros(len(vectors), dtype=bool)
    is_known[workplace.known] = True
    paths: list[list[int]] = [[] for _ in vectors]
    grow(vectors, is_known, np.arange(len(vectors)), paths, k, leaf, workplace.terms.seed)
    codes = padded([[digit + 1 for digit in path] for path in paths])
    return Identifiers(codes, np.arange(len(vectors)), k + 1, shared)


def grow(
    vectors: Vectors, is_known: NDArray[np.bool_], rows: Rows, paths: list[list[int]], k: int, leaf: int, seed: int
) -> None:
    """Write the paths of the documents `rows` from here on."""
    known, new = rows[is_known[rows]], rows[~is_known[rows]]
    clusters = cluster(vectors[known], vectors[rows], k, seed) if len(known) > leaf else None
    if clusters is None or len(np.unique(clusters)) < 2:  # small enough, or all alike
        for number, row in enumerate([*along_main_direction(vectors, known).tolist(), *new.tolist()]):
            is_alone = number == 0 and len(known) < 2  # whatever comes later, a known document's docid stays
            paths[row] += [] if is_alone else digits(number, k)
        return
    for number in np.unique(clusters).tolist():
        own = rows[clusters == number]
        for row in own.tolist():
            paths[row].append(number)
        grow(vectors, is_known, own, paths, k, leaf, seed)


def along_main_direction(vectors: Vectors, rows: Rows) -> Rows:
    """The documents of a leaf in an order in which neighbours are alike: a number is easier to learn than a random
    one."""
    if len(rows) < 3:
        return rows
    own = vectors[rows] - vectors[rows].mean(axis=0)
    direction = np.linalg.svd(own, full_matrices=False)[2][0]
    return rows[np.argsort(own @ (direction * np.sign(direction[np.abs(direction).argmax()])), kind="stable")]


def cluster(fitted: Vectors, asked: Vectors, k: int, seed: int) -> Rows:
    """The nearest of k centres for each asked vector; the centres are those of the fitted ones."""
    centres = cluster_centres(fitted, k, seed)
    distances = (centres**2).sum(axis=1) - 2 * asked @ centres.T
    nearest: Rows = distances.argmin(axis=1)
    return nearest


def cluster_centres(vectors: Vectors, k: int, seed: int) -> Vectors:
    """k-means: at most k centres (k, D)."""
    require_faiss()
    import faiss

    means: Any = faiss.Kmeans(
        vectors.shape[1], min(k, len(vectors)), niter=KMEANS_ROUNDS, seed=seed,
        min_points_per_centroid=1, max_points_per_centroid=len(vectors),
    )  # fmt: skip
    means.train(np.ascontiguousarray(vectors, dtype=np.float32))
    centres: Vectors = means.centroids
    return centres


def digits(number: int, base: int) -> list[int]:
    """
    >>> digits(0, 10), digits(203, 10), digits(29, 30)
    ([0], [2, 0, 3], [29])
    """
    found = [number % base]
    while number >= base:
        number //= base
        found.append(number % base)
    return found[::-1]


def quantised(workplace: Workplace, parts: int = 24) -> Identifiers:
    """Product quantisation of the encoder's vectors: one code for each part of the vector (Ultron-PQ)."""
    require_faiss()
    import faiss

    vectors = unit_vectors(workplace)
    parts = max(n for n in range(1, parts + 1) if vectors.shape[1] % n == 0)
    bits = max(1, min(8, int(np.log2(max(2, len(workplace.known) // 4)))))
    quantiser: Any = faiss.ProductQuantizer(vectors.shape[1], parts, bits)
    quantiser.cp.min_points_per_centroid = 1
    quantiser.train(vectors[workplace.known])
    packed = quantiser.compute_codes(vectors)
    codes = packed if bits == 8 else unpacked(packed, parts, bits)
    return Identifiers(codes.astype(np.int64), np.arange(len(vectors)), 2**bits, shared=False, ends=False)


def unpacked(packed: NDArray[np.uint8], parts: int, bits: int) -> Rows:
    """Codes of fewer than eight bits, which faiss packs without gaps, lowest bits first."""
    flat = np.unpackbits(packed, axis=1, bitorder="little")[:, : parts * bits]
    weights = 1 << np.arange(bits)
    found: Rows = (flat.reshape(len(packed), parts, bits) * weights).sum(axis=2)
    return found


def in_words(texts: Sequence[str], tokenise: TextTokeniser, others: int = 0) -> tuple[list[list[int]], WordCodes]:
    """Texts as codes of their first word pieces; `others` codes behind the words' are left free."""
    tokens = tokenise(texts)
    pieces = WordCodes.of_texts([tokens], tokenise, others)
    starts, ends = tokens.offsets[:-1] + tokenise.starts, tokens.offsets[1:] - 1
    codes = pieces.of_piece[tokens.ids]
    return [codes[start:end][:LONGEST].tolist() for start, end in zip(starts, ends, strict=True)], pieces


def as_identifiers(texts: Sequence[str], tokenise: TextTokeniser) -> Identifiers:
    """A text for each document, in words."""
    sequences, pieces = in_words(texts, tokenise)
    return Identifiers(padded(sequences), np.arange(len(texts)), len(pieces), shared=True, words=pieces)


def addresses(workplace: Workplace) -> Identifiers:
    """A docid in words for each document (Ultron-URL); not the address where it says nothing, because many share it."""
    documents = workplace.texts.documents
    texts = [address_of(document) for document in documents]
    shared = Counter(texts[row] for row in workplace.known)
    own = [
        text if shared[text] <= MOST_OF_AN_ADDRESS else document.content
        for text, document in zip(texts, documents, strict=True)
    ]
    return as_identifiers(own, workplace.tokenise)


def address_of(document: Document) -> str:
    """A title of more than two words and the first part of the key (of a URL the host), else the key's parts from the
    last to the first.

    A key that is no address, but a number or a checksum, says nothing: then the title alone, or the text.

    >>> address_of(Document("git/commit-message", "Some text", "Commit"))
    'message commit git'
    >>> address_of(Document("HP:0100785", "Some text", "Insomnia"))
    'Insomnia'
    >>> address_of(Document("https://www.example.org/trees/old-oak.html", "Some text", "How old oaks grow"))
    'How old oaks grow example'
    """
    key = re.sub(r"^\w+://(www\.)?", "", document.key)
    is_address = re.search(r"[/.]", key) is not None
    address = re.findall(r"[^\W\d_]+", key) if is_address else []
    title = re.sub(r"\d", "", document.title)
    parts = [title, *address[:1]] if len(title.split()) > 2 or len(address) < 2 else address[::-1]
    return " ".join(parts).strip() or document.content


def descriptions(workplace: Workplace) -> Identifiers:
    """The pseudo query that is nearest to the document, in words (SE-DSI); its text if it has none."""
    contents = [document.content for document in workplace.texts.documents]
    lists = [own or [text] for own, text in zip(workplace.pseudo_queries, contents, strict=True)]
    owners = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
    texts = [text for own in lists for text in own]
    pooled = workplace.features(texts).pooled
    assert pooled is not None, "the encoder is wholly frozen"
    similarity = np.einsum("nd,nd->n", unit(pooled), unit_vectors(workplace)[owners])
    order = np.lexsort((-similarity, owners))
    nearest = order[np.searchsorted(owners[order], np.arange(len(lists)))]
    return as_identifiers([texts[i] for i in nearest], workplace.tokenise)


def numbers_within(docids: Rows, rows: Sequence[int] | Rows) -> Rows:
    """For every document its number among those of `rows` with the same docid, in their order; 0 for the others."""
    numbers = np.zeros(len(docids), dtype=np.int64)
    seen: dict[tuple[int, ...], int] = {}
    for row in np.asarray(rows).tolist():
        docid = tuple(docids[row].tolist())
        numbers[row] = seen.get(docid, 0)
        seen[docid] = numbers[row] + 1
    return numbers


def sentences_of(text: str) -> list[str]:
    """
    >>> sentences_of("One thing. Another; and more!  ")
    ['One thing.', 'Another; and more!']
    """
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part][:SENTENCES] or [""]


def titles_and_sentences(workplace: Workplace) -> Identifiers:
    """The title in words, then the number of one of the document's sentences (GERE): several for each document."""
    documents = workplace.texts.documents
    titles = [document.title or sentences_of(document.text)[0] for document in documents]
    in_titles, pieces = in_words(titles, workplace.tokenise, SENTENCES)
    counts = [len(sentences_of(document.text)) for document in documents]
    first = len(pieces) - SENTENCES
    sequences = [[*in_titles[row], first + number] for row, count in enumerate(counts) for number in range(count)]
    owners = np.repeat(np.arange(len(documents)), counts)
    return Identifiers(padded(sequences), owners, len(pieces), shared=True, words=pieces)


def sentence_rows(workplace: Workplace, made: Identifiers, source: Source) -> NDArray[np.int64]:
    """For each pair the docid of that sentence of the document which shares most words with the text."""
    first = np.searchsorted(made.documents, np.arange(len(workplace.keys)))
    found = np.empty(len(source.pairs), dtype=np.int64)
    for i, (text, document) in enumerate(source.pairs.tolist()):
        asked = set(words(source.texts[text]))
        sentences = sentences_of(workplace.texts.documents[document].text)
        shared = [len(asked & set(words(sentence))) for sentence in sentences]
        found[i] = first[document] + int(np.argmax(shared))
    return found


def unit_vectors(workplace: Workplace) -> Vectors:
    pooled = workplace.documents.pooled
    assert pooled is not None, "the encoder is wholly frozen"
    return unit(pooled)
