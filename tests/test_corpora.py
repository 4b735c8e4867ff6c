import hashlib
import subprocess
import sys

import pytest

from asi import corpora
from asi.corpora import BUILTIN, SPLITS, BuiltinCorpus, build, normalised
from asi.errors import DataError
from asi.records import Document, Qrel, Query

BUILT: dict[str, BuiltinCorpus] = {}  # a corpus takes seconds to build


@pytest.fixture(params=BUILTIN)
def corpus(request) -> BuiltinCorpus:
    if request.param not in BUILT:
        BUILT[request.param] = BUILTIN[request.param]()
    return BUILT[request.param]


def test_size(corpus):
    documents = list(corpus.documents())
    assert len(documents) > 5_000
    assert len({document.key for document in documents}) == len(documents)
    assert all(document.key and document.title and document.text.strip() for document in documents)
    assert corpus.splits == SPLITS
    for split, least in {"train": 5_000, "dev": 100, "test": 250, "test_unseen": 200}.items():
        queries, qrels = corpus.judged(split)
        assert len(queries) >= least
        assert {qrel.query for qrel in qrels} == {query.key for query in queries}
        assert {qrel.document for qrel in qrels} <= {document.key for document in documents}


def test_no_held_out_query_is_trained_on_and_no_split_shares_a_query(corpus):
    texts = {split: {normalised(query.text) for query in corpus.judged(split)[0]} for split in SPLITS}
    for split in SPLITS:
        for other in SPLITS:
            assert split == other or not texts[split] & texts[other]


def test_only_unseen_documents_have_no_training_query(corpus):
    judged = {split: {qrel.document for qrel in corpus.judged(split)[1]} for split in SPLITS}
    assert judged["test"] | judged["dev"] <= judged["train"]
    assert not judged["test_unseen"] & judged["train"]


def test_no_document_is_tested_on_twice_in_a_split(corpus):
    for split in SPLITS[1:]:
        documents = [qrel.document for qrel in corpus.judged(split)[1]]
        assert len(set(documents)) == len(documents)


def test_same_corpus_in_another_process(corpus):
    """Another process has other hashes, so an order that comes from a set would show."""
    code = f"import hashlib, asi.corpora as c; print(hashlib.sha256(repr(c.{corpus.name}()).encode()).hexdigest())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hashlib.sha256(repr(corpus).encode()).hexdigest()


def test_titles_are_trained_on_and_never_tested():
    source = [(Document(f"d{i}", "text", title=f"Title {i}"), [f"title, {i}!", f"query {i}"]) for i in range(400)]
    with_titles, without = (build("toy", source, train_titles=choice).pairs for choice in (True, False))
    seen = [key for text, key in with_titles["train"] if text.startswith("Title")]
    assert 340 < len(seen) < 380  # all but the unseen tenth
    assert {key for _, key in with_titles["test"]} < set(seen)
    assert all(text.startswith("query") for split in SPLITS[1:] for text, _ in with_titles[split])
    assert 340 < len(without["train"]) < 380  # what says the same as the title is no query
    assert not without["test"] + without["test_unseen"]  # documents with one query are not tested on


def test_hpo_terms():
    obo = """format-version: 1.2

[Term]
id: HP:1
name: Nosebleed
def: "Blood from the \\"nose\\"." [PMID:1]
synonym: "Epistaxis" EXACT []

[Term]
id: HP:2
name: No definition

[Term]
id: HP:3
name: Old
def: "Old." []
is_obsolete: true
"""
    expected = [(Document("HP:1", 'Blood from the "nose".', "Nosebleed"), ["Epistaxis"])]
    assert list(corpora.hpo_terms(obo.splitlines())) == expected


LIBRARY = '''
if True:
    def join(first, *others, sep="/"):
        """Put the parts together. It is easy."""
        def local(): pass
        return mergeParts(first, others).strip_all("secret")
else:
    def join(): pass
class Box(dict):
    """A box.

    Holds many small things.
        - not prose
    """
    def _hidden(self): pass
    def _explained(self):
        "Look into the box."
    async def open(self, key): await self.lid(key=key)
def _private(): pass
'''


def test_library_objects(tmp_path):
    for name in ("pack/__init__.py", "test/skipped.py", "site-packages/skipped.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(LIBRARY)
    assert list(corpora.library_objects(tmp_path)) == [
        (
            Document(
                "pack.join",
                "join(first, *others, sep='/') join local first others sep strip all merge parts",
                "pack.join",
            ),
            ["Put the parts together."],
        ),
        (Document("pack.Box", "class Box(dict) box dict hidden explained open key lid", "pack.Box"), []),
        (Document("pack.Box._explained", "_explained() explained", "pack.Box._explained"), ["Look into the box."]),
        (Document("pack.Box.open", "open(key) open key lid", "pack.Box.open"), []),
    ]


def test_judged_merges_queries_of_the_same_text():
    made = BuiltinCorpus("toy", [], {"train": [("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")]})
    assert made.judged("train") == (
        [Query("train-0", "a"), Query("train-1", "b")],
        [Qrel("train-0", "1"), Qrel("train-1", "1"), Qrel("train-0", "2")],
    )
    with pytest.raises(DataError, match="toy has no split 'tset'; its splits are train, dev, test, test_unseen"):
        made.judged("tset")
