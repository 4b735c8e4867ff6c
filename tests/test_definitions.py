"""Every system of the comparison is what its paper defines: docids, score or loss, and constraint, checked by hand.

On a corpus of three documents that have training queries and one that is new. No system is trained here.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from toy import log_likelihood, write_lines

from asi.batches import Batch
from asi.checkpoint import save_folder
from asi.config import Config
from asi.datasets import open_dataset
from asi.encoder import TokenisedTexts
from asi.features import Features, encode
from asi.model import Decoder, Encoded
from asi.planning import REHEARSED_RUN, rehearsed_parts
from asi.run import Silence
from asi.systems.decoders import Shape, begin_as_dense, begin_with_vectors
from asi.systems.dense import BiEncoder, DenseObjective, Vectors, pooled_by
from asi.systems.genret import POSITIONS, GenRetDecoder, GenRetObjective, part_at
from asi.systems.identifiers import END, numbers_within
from asi.systems.learned import BucketRetriever
from asi.systems.ngrams import Ngrams, document_scores, weight_of
from asi.systems.table import BY_NAME, ROWS
from asi.systems.workplace import Terms, Training, Workplace

DOCUMENTS = [
    {"_id": "north/red", "title": "red house", "text": "a house stands. the house is red."},
    {"_id": "north/blue", "title": "the blue bird thing", "text": "a bird is blue."},
    {"_id": "west/white", "title": "white stone", "text": "a stone stands in the west."},
    {"_id": "east/black", "title": "black horse", "text": "a horse is black."},  # new: only test_unseen asks for it
]
PSEUDO = ["find house", "where is bird", "stone", "horse"]


@pytest.fixture
def workplace(encoder_folder, tmp_path):
    data = tmp_path / "tiny"
    (data / "qrels").mkdir(parents=True)
    write_lines(data / "corpus.jsonl", DOCUMENTS)
    write_lines(data / "queries.jsonl", [{"_id": str(i), "text": query} for i, query in enumerate(PSEUDO)])
    for split, rows in (("train", range(3)), ("test_unseen", [3])):
        pairs = "".join(f"{i}\t{DOCUMENTS[i]['_id']}\t1\n" for i in rows)
        (data / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + pairs)
    out = tmp_path / "out"
    out.mkdir()
    save_folder(out / "generator", lambda beside: None, {"parameters": 7, "minutes": 2.0, "steps": 3, "pairs": 9})
    terms = Terms(0.01, str(encoder_folder), max_length=16)
    made = Workplace(open_dataset(str(data)), out, terms, torch.device("cpu"), Silence())
    made.pseudo_queries = [[query] for query in PSEUDO]
    return made


def settings_of(name):
    return BY_NAME[name].build.keywords["settings"]


def in_words(made, row):
    """A docid in words, as far as its codes are words."""
    return [int(made.words.pieces[code]) for code in made.codes[row] if code != END]


def pieces(workplace, text):
    tokens = workplace.tokenise([text]).ids.tolist()
    return tokens[1:-1]


# Sparse ---------------------------------------------------------------------------------------------------------------


def bm25(workplace, build):
    """Lucene's formula for "house" in the first document: 3 of its 9 words, 33 words in all four, in one document."""
    [hits] = build(workplace).retriever.search(["house"], 4)
    lengths = [9, 8, 8, 6]
    idf = np.log(1 + (4 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 3 / (3 + 1.5 * (1 - 0.75 + 0.75 * lengths[0] / np.mean(lengths)))
    assert [hit.key for hit in hits] == ["north/red"]
    assert hits[0].score == pytest.approx(expected, abs=1e-5)


def doct5query(workplace, build):
    """The documents' words and those of their pseudo queries: "find" is in no document."""
    built = build(workplace)
    assert [[hit.key for hit in hits] for hits in built.retriever.search(["find", "where"], 4)] == [
        ["north/red"],
        ["north/blue"],
    ]
    assert (built.parameters, built.training) == (7, Training(2.0, 3, 9))


# Dense: an adapter starts as the identity, so losses follow from what the encoder gives -------------------------------


def dense_loss(name, pooled, hard):
    """The loss of a batch of three pairs; `pooled` are queries and documents (3, D), `hard` the negatives or None."""
    torch.manual_seed(0)
    settings = settings_of(name)
    model = BiEncoder(pooled[0].size(1), settings)

    class Pairs:
        def negatives(self, batch):
            return torch.from_numpy(batch.documents[None, :] != batch.queries[:, None])

    objective = DenseObjective(model, None, None, [(1.0, Pairs())], settings, None if hard is None else np.arange(3, 6))
    encoded = [model.query(pooled[0]), model.document(pooled[1])]
    vectors = Vectors(*encoded, encoded[0][:, :0] if hard is None else model.document(hard))
    [loss] = objective.batch_losses(vectors, Batch(np.arange(3), np.arange(3), 0)).values()
    return loss.item(), settings, model


def cosines(a, b):
    return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T


def softmax_loss(logits):
    return torch.nn.functional.cross_entropy(logits, torch.arange(3)).item()


def some_vectors():
    torch.manual_seed(3)
    return torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)


def repbert(workplace, build):
    """Mean of the states, one tower, a product, and a margin of 1 over all pairs of the batch, divided by its size."""
    queries, documents, _ = some_vectors()
    loss, settings, model = dense_loss("repbert", (queries, documents), None)
    scores = 8**0.5 * cosines(queries, documents)  # vectors of length sqrt(8), the product divided by sqrt(8)
    margins = [max(0.0, 1 - (scores[i, i] - scores[i, j]).item()) for i in range(3) for j in range(3) if i != j]
    assert loss == pytest.approx(sum(margins) / 9, abs=1e-5)
    assert (settings.pooling, model.document is model.query) == ("mean", True)


def sentence_t5(workplace, build):
    """Mean, a linear layer, cosine at temperature .01, in-batch softmax with a hard negative for each query."""
    queries, documents, hard = some_vectors()
    loss, settings, model = dense_loss("sentence-t5", (queries, documents), hard)
    assert loss == pytest.approx(softmax_loss(cosines(queries, torch.cat([documents, hard])) / 0.01), rel=1e-4)
    assert settings.pooling == "mean"
    assert model.query.top is not None
    assert not model.query.tanh


def gtr(workplace, build):
    """Sentence-T5 that begins with pseudo queries."""
    assert settings_of("gtr") == replace(settings_of("sentence-t5"), pseudo_queries=True)


def dpr(workplace, build):
    """[CLS], two towers, a product, softmax with BM25's hard negatives."""
    queries, documents, hard = some_vectors()
    loss, settings, model = dense_loss("dpr", (queries, documents), hard)
    assert loss == pytest.approx(softmax_loss(8**0.5 * cosines(queries, torch.cat([documents, hard]))), rel=1e-4)
    assert model.document is not model.query
    states = np.arange(5 * 4, dtype=np.float32).reshape(5, 4)
    tokens = TokenisedTexts(np.zeros(5, np.int32), np.array([0, 2, 5]), 0)
    first = pooled_by(settings, Features(tokens, np.zeros((2, 4), np.float32), states))
    assert first.tolist() == states[[0, 2]].tolist()


def simcse(workplace, build):
    """[CLS], a layer with a tanh that is kept, cosine at temperature .05, in-batch softmax."""
    queries, documents, _ = some_vectors()
    loss, settings, _ = dense_loss("simcse", (queries, documents), None)
    through = [torch.tanh(torch.nn.functional.normalize(x, dim=-1) * 8**0.5) for x in (queries, documents)]
    assert loss == pytest.approx(softmax_loss(cosines(*through) / 0.05), rel=1e-4)
    assert settings.pooling == "cls"


def simcse_docid(workplace, build):
    """Docids by the cosine with the mean of their documents' vectors; their documents in the order of the corpus."""

    class Dense:
        vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [-1, 0]], np.float32)

        def query_vectors(self, queries):
            return np.array([[0, 1]], np.float32)

    dense = Dense()
    dense.workplace = workplace
    retriever = BucketRetriever(dense, np.array([[5, 5], [7, 1], [5, 5], [2, 2]]))
    assert retriever.docids(["?"], 3) == [[(7, 1), (5, 5), (2, 2)]]
    mean = np.array([1.6, 0.8])  # of the first and the third, but for a factor
    keys = [document["_id"] for document in DOCUMENTS]
    [hits] = retriever.search(["?"], 3)
    assert [hit.key for hit in hits] == [keys[1], keys[0], keys[2]]
    assert hits[1].score == pytest.approx(mean[1] / np.linalg.norm(mean), abs=1e-6)


# Docids that are made before ------------------------------------------------------------------------------------------


def only_existing_docids(workplace, build, documents):
    """The system as it is built, untrained: it writes the docids of these documents and no others, by likelihood; where
    docids differ in length, by that of a code on average, the one that ends a docid among them."""
    workplace.train = lambda name, objective, codes=None: Training()
    retriever = build(workplace).retriever
    rows, scores = retriever.generate(["red house"], 10)
    written = np.isfinite(scores[0])
    assert (rows[0][written] >= 0).all()
    assert sorted(rows[0][written].tolist()) == list(range(retriever.count))
    [hits] = retriever.search(["red house"], 10)
    assert {hit.key for hit in hits} == {DOCUMENTS[i]["_id"] for i in documents}
    decoder, made = retriever.decoder, retriever.identifiers
    tokens = workplace.tokenise(["red house"])
    prior = made.words.prior(tokens, np.arange(1), decoder) if made.words else None
    for row, score in zip(rows[0][written], scores[0][written], strict=True):
        codes = torch.from_numpy(np.unique(made.codes, axis=0)[row][None])
        with torch.no_grad():
            log_probs = decoder(workplace.encode(tokens), codes, prior)
        count = min(int((codes != END).sum()) + 1, codes.size(1)) if made.ends else 1
        assert log_likelihood(log_probs, codes[0].tolist(), ends=made.ends) / count == pytest.approx(score, abs=1e-3)


def sources_of(name):
    return [stage.sources for stage in settings_of(name).stages]


def is_atomic(workplace, name):
    """One code of its own for each document that is there when it is trained, in one step."""
    made = settings_of(name).identifiers(workplace)
    assert sorted(made.codes.tolist()) == [[0], [1], [2]]
    assert (made.V, made.ends, made.documents.tolist()) == (3, False, [0, 1, 2])


def dsi_atomic(workplace, build):
    is_atomic(workplace, "dsi-atomic")
    assert sources_of("dsi-atomic") == [("beginnings", "queries")]
    assert workplace.reading(["beginnings"]).features.tokens.lengths.max() <= 32
    only_existing_docids(workplace, build, [0, 1, 2])


def dsi_semantic(workplace, build):
    """Clusters of 10, leaves of 100: here one leaf with a number each. Any digits may be written; digits are shared."""
    settings = settings_of("dsi-semantic")
    made = settings.identifiers(workplace)
    assert settings.identifiers.keywords == {"k": 10, "leaf": 100, "shared": True}
    assert sorted(made.codes[:3].tolist()) == [[1], [2], [3]]  # in an order in which neighbours are alike
    assert made.codes[3].tolist() == [4]  # the new one has the next number
    assert sources_of("dsi-semantic") == [("beginnings", "queries")]
    assert not settings.constrained


def dsi_qg(workplace, build):
    """The digits of a number that means nothing, from pseudo queries, no document text; any digits may be written."""
    made = settings_of("dsi-qg").identifiers(workplace)
    assert sorted(made.codes.tolist()) == [[1], [2], [3]]
    assert sources_of("dsi-qg") == [("pseudo", "queries")]
    assert not settings_of("dsi-qg").constrained


def nci(workplace, build):
    """Clusters of 30, leaves of 30, codes that differ by position, a prefix-aware decoder, only docids that exist."""
    settings = settings_of("nci")
    assert settings.identifiers.keywords == {"k": 30, "leaf": 30, "shared": False}
    assert sorted(settings.identifiers(workplace).codes.tolist()) == [[1], [2], [3], [4]]
    assert settings.prefix_aware
    only_existing_docids(workplace, build, range(4))
    assert sources_of("nci") == [("documents", "spans", "pseudo", "queries")]


def dynamicretriever(workplace, build):
    """Atomic docids whose rows begin as dense vectors: at the start it is dense retrieval."""
    is_atomic(workplace, "dynamicretriever")
    assert settings_of("dynamicretriever").starts_from_vectors
    torch.manual_seed(0)
    vectors = torch.randn(40, 32)
    decoder = Decoder(32, Shape(1, 40, shared_tokens=True))
    codes = np.random.default_rng(0).permutation(40)
    begin_as_dense(decoder, vectors.numpy(), codes)
    asked = torch.randn(5, 32)
    query = Encoded(asked, torch.randn(5, 4, 32), torch.ones(5, 4, dtype=torch.bool), asked)
    log_probs = decoder(query, torch.zeros(5, 1, dtype=torch.long))[:, 0, codes]  # (5, 40), in the order of vectors
    expected = cosines(asked - asked.mean(1, keepdim=True), vectors - vectors.mean(1, keepdim=True)) / 0.05
    for own, wanted in zip(log_probs, expected, strict=True):
        assert np.corrcoef(own.detach(), wanted)[0, 1] > 0.99


def is_ultron(workplace, build, name, documents):
    """Three stages: texts, pseudo queries, queries; only docids that exist."""
    only_existing_docids(workplace, build, documents)
    assert sources_of(name) == [("documents", "spans", "terms"), ("pseudo",), ("queries",)]
    assert all(a.until < b.until for a, b in pairwise(settings_of(name).stages))


def ultron_url(workplace, build):
    """A title of more than two words and the site; else the address from its end."""
    is_ultron(workplace, build, "ultron-url", range(4))
    made = settings_of("ultron-url").identifiers(workplace)
    assert in_words(made, 0) == pieces(workplace, "red north")
    assert in_words(made, 1) == pieces(workplace, "the blue bird thing north")


def ultron_pq(workplace, build):
    """One code for each of 24 parts of the vector (here 16: 24 do not divide 32), the nearest centre of the part."""
    is_ultron(workplace, build, "ultron-pq", range(4))
    made = settings_of("ultron-pq").identifiers(workplace)
    assert made.codes.shape == (4, 16)
    assert not made.ends
    assert not made.shared


def ultron_atomic(workplace, build):
    is_ultron(workplace, build, "ultron-atomic", [0, 1, 2])
    is_atomic(workplace, "ultron-atomic")


def se_dsi(workplace, build):
    """A pseudo query as the docid, new documents have one too."""
    made = settings_of("se-dsi").identifiers(workplace)
    assert [in_words(made, row) for row in range(4)] == [pieces(workplace, text) for text in PSEUDO]
    only_existing_docids(workplace, build, range(4))
    texts = [document.content for document in workplace.texts.documents]
    workplace.pseudo_queries = [["zzz", text, "lamp"] for text in texts]  # of several the one that is nearest
    made = settings_of("se-dsi").identifiers(workplace)
    assert [in_words(made, row) for row in range(4)] == [pieces(workplace, text) for text in texts]


def gere(workplace, build):
    """The title, then one of the document's sentences: the one that shares most words with the query is learned."""
    settings = settings_of("gere")
    made = settings.identifiers(workplace)
    assert made.documents.tolist() == [0, 0, 1, 2, 3]  # the first document has two sentences
    assert in_words(made, 0)[:-1] == in_words(made, 1)[:-1] == pieces(workplace, "red house")
    assert made.codes[1].max() - made.codes[0].max() == 1  # the number of the sentence
    source = workplace.source("queries")._replace(texts=["the house is red"], pairs=np.array([[0, 0]]))
    assert settings.pick(workplace, made, source).tolist() == [1]
    only_existing_docids(workplace, build, range(4))


# N-grams --------------------------------------------------------------------------------------------------------------


def is_seal(kinds, name):
    """log odds of the n-gram with the query against without, squared; a covered piece counts a fifth."""
    assert BY_NAME[name].build.keywords["kinds"] == kinds
    alone, with_query = (3 + 5) / (100 + 5), 0.5
    expected = np.log(with_query * (1 - alone) / (alone * (1 - with_query))) ** 2
    assert weight_of(np.log([0.5]), np.array([3.0]), 100) == pytest.approx([expected])
    ngrams = Ngrams(np.array([4.0, 1.0]), np.array([[8, 9], [9, 0]]), [np.array([1, 2]), np.array([2])])
    documents, scores = document_scores(ngrams)
    assert documents.tolist() == [1, 2]
    assert scores == pytest.approx([4, 4 + 0.2])


def seal(workplace, build):
    is_seal(("body",), "seal")


def minder(workplace, build):
    """A document's scores in all views add up, and each view may write only what stands in it."""
    is_seal(("title", "body", "pseudo"), "minder")
    workplace.train = lambda name, objective, codes=None: Training()
    retriever = build(workplace).retriever
    views = [
        Ngrams(np.array([4.0]), np.array([[8, 0]]), [np.array([1, 2])]),
        Ngrams(np.array([1.0]), np.array([[9, 0]]), [np.array([2])]),
    ]
    assert [(hit.key, hit.score) for hit in retriever.ranked(views, 3)] == [("west/white", 5.0), ("north/blue", 4.0)]
    [find] = retriever.words.of_piece[pieces(workplace, "find")].tolist()
    assert [find in view.windows for view in retriever.views] == [False, False, True]


# Learned docids -------------------------------------------------------------------------------------------------------


def genret(workplace, build):
    """Three codes, one part of the training for each, and a number that tells equal docids apart."""
    decoder = GenRetDecoder(32, 4)
    assert decoder.m == POSITIONS + 1 == 4
    assert [part_at(progress).position for progress in (0, 0.11, 0.21, 0.31)] == [0, 1, 2, 3]
    at = [part_at(step / REHEARSED_RUN) for step in range(REHEARSED_RUN)]
    changes = {step for step in range(1, REHEARSED_RUN) if at[step] != at[step - 1]}
    assert len(changes) == 6
    assert changes <= {part[0] for part in rehearsed_parts()}  # what happens once is not timed as an ordinary step
    reading = workplace.reading(["queries"])
    objective = GenRetObjective(decoder, workplace, reading, 2)
    objective.fix(0, np.arange(4), apart=False)  # a document's code is the codebook's row with the largest product
    with torch.no_grad():
        states = decoder.states(encode(workplace.encoder, workplace.documents, np.arange(4)), torch.zeros(4, 4).long())
        assert torch.equal(decoder.codes[:, 0], (decoder.norm(states[:, 0]) @ decoder.outputs[0].T).argmax(1))
    with torch.no_grad():  # told apart: without what documents of one prefix have in common
        objective.fix(1, np.arange(4), apart=True)
        states = decoder.states(encode(workplace.encoder, workplace.documents, np.arange(4)), decoder.codes)
        logits = decoder.at(states, 1)
        for prefix in decoder.codes[:, 0].unique():
            own = decoder.codes[:, 0] == prefix
            rest = logits[own] - logits[own].mean(0) + logits.mean(0)
            assert torch.equal(decoder.codes[own, 1], rest.argmax(1))
    decoder.codes[:, 0] = torch.tensor([5, 6, 5, 5])  # a batch of two has documents that begin alike, if there are any
    drawn = [objective.batches(1).at(step).documents.tolist() for step in range(20)]
    assert {tuple(sorted(documents)) for documents in drawn} == {(0, 2), (0, 1), (1, 2)}
    assert all(documents[0] == 1 for documents in drawn if 1 in documents)  # 1 is alone, and filled up with others
    decoder.fixed = 1
    decoder.log_probs(torch.ones(1, 1, 256), decoder.output_tables(), 0, None).sum().backward()
    assert decoder.outputs.grad is None or not decoder.outputs.grad.any()  # a finished codebook learns no more
    vectors = torch.randn(40, 32)
    states = begin_with_vectors(decoder, vectors.numpy())
    text = Encoded(vectors, torch.randn(40, 4, 32), torch.ones(40, 4, dtype=torch.bool), vectors)
    at_start = decoder.states(text, torch.zeros(40, 4, dtype=torch.long))
    for position in range(4):  # a text begins as its vector at every position, beside the code before
        own = at_start[:, position] - at_start[:, position].mean(0)
        assert torch.allclose(own, states - states.mean(0), atol=1e-4)
    codes = np.array([[1, 1, 1], [1, 1, 1], [2, 1, 1], [1, 1, 1]])
    assert numbers_within(codes, np.arange(4)).tolist() == [0, 1, 0, 2]


def config_of(name):
    return BY_NAME[name].build.keywords["config"]


def changed(name):
    """The settings in which a variant differs from what it is a variant of, by section."""
    own, whole = config_of(name), config_of("asi-paper") if name != "asi" else Config()
    return {
        f"{section}.{key}": value
        for section in ("model", "loss", "train", "index", "search")
        for key, value in vars(getattr(own, section)).items()
        if value != getattr(getattr(whole, section), key)
    }


ASI = {
    "asi": {},
    "asi-share": {"model.shared_tokens": True},
    "asi-no-contrastive": {"loss.contrastive": 0.0},
    "asi-no-reverse": {"loss.reverse": 0.0},
    "asi-no-reparameterization": {"loss.straight_through": False},
}


def asi_variant(name):
    def check(workplace, build):
        assert changed(name) == ASI[name]

    return check


def asi_random_docids(workplace, build):
    assert config_of("asi-random-docids").model.docids == "random"


def asi_docids(workplace, build):
    config = config_of("asi-docids")
    assert (config.model.m, config.model.V, config.index.vectors, config.loss.generation) == (32, 256, False, 0)


def asi_paper(workplace, build):
    config = config_of("asi-paper")
    ours = [getattr(config.loss, name) for name in ("match", "one_pass", "balance")]
    assert (config.model.m, config.model.V, config.search.mode, ours) == (4, 256, "beam", [0, 0, 0])


def asi_beam(workplace, build):
    assert build.keywords == {"of": "asi", "settings": {"mode": "beam"}}


def asi_by_docids(workplace, build):
    assert build.keywords == {"of": "asi", "settings": {"centre_share": 0.0}}


def asi_random_by_docids(workplace, build):
    assert build.keywords == {"of": "asi-random-docids", "settings": {"centre_share": 0.0}}


def asi_exact(workplace, build):
    assert build.keywords["settings"]["candidates"] > len(workplace.keys)


DEFINED = {
    check.__name__.replace("_", "-"): check
    for check in (
        bm25, doct5query, repbert, sentence_t5, dpr, simcse, gtr, simcse_docid, dsi_atomic, dsi_semantic, dsi_qg, nci,
        dynamicretriever, ultron_url, ultron_pq, ultron_atomic, se_dsi, seal, minder, gere, genret,
        asi_random_docids, asi_docids, asi_paper, asi_beam, asi_by_docids, asi_random_by_docids, asi_exact,
    )
} | {name: asi_variant(name) for name in ASI}  # fmt: skip


def test_every_system_has_a_definition():
    assert set(DEFINED) == {system.name for system in ROWS}


@pytest.mark.parametrize("name", DEFINED)
def test_system_is_what_its_paper_defines(name, workplace):
    DEFINED[name](workplace, BY_NAME[name].build)
