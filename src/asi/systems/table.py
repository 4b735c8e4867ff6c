"""The table of systems: what `asi systems` shows and `asi compare` runs. A system is a row here, plus what is really
different about it in the file of its mechanism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from asi.config import DOCIDS_IN_EVERY_STEP, PAPER_OBJECTIVE, VARIANTS, preset, with_overrides
from asi.errors import ConfigError
from asi.systems import identifiers
from asi.systems.dense import DenseSettings, build_dense
from asi.systems.genret import build_genret
from asi.systems.learned import build_asi, build_searched, build_simcse_docid
from asi.systems.lexical import build_bm25
from asi.systems.ngrams import build_ngrams
from asi.systems.sequences import SequenceSettings, Stage, build_sequences
from asi.systems.settings import Plain, plain
from asi.systems.workplace import Built, Workplace

SAME_ENCODER = "the comparison's encoder, frozen"
AS_OURS = "a trained residual layer on its vectors of one length, with ASI's dropout and weight decay"
PSEUDO_QUERIES_OF = "doct5query"  # which has nothing to train but their generator
A_DECODER = (
    "a small decoder that begins as the encoder's vector of a text and reads it at every position, in place of a "
    "pretrained one"
)
A_WRITER = (
    "a small decoder that begins with the encoder's word vectors, can copy and reads the text's vector at every "
    "position, in place of a pretrained one"
)


@dataclass(frozen=True)
class System:
    name: str
    mechanism: str
    paper: str
    differs: str  # from the original, in one line
    takes_new: bool  # finds documents that come after the training, without being trained again
    build: Callable[[Workplace], Built]
    trains: bool = True  # anything of its own
    after: tuple[str, ...] = ()  # systems whose run or pseudo queries it uses: if compared too, they come first
    revision: int = 0  # counted up when its mechanism finds other answers with the same settings

    @property
    def settings(self) -> Plain:
        """All that its row says about how it is built, and the rows of the systems that it builds on."""
        build = {"build": plain(self.build)} | ({"revision": self.revision} if self.revision else {})
        return build | {"after": {name: BY_NAME[name].settings for name in self.after}}


def dense(name: str, paper: str, differs: str, settings: DenseSettings) -> System:
    build = partial(build_dense, name=name, settings=settings)
    after = (PSEUDO_QUERIES_OF,) if settings.pseudo_queries else ()
    return System(
        name, "dense, exact search", paper, f"{SAME_ENCODER}, with {AS_OURS}; {differs}", True, build, after=after
    )


def sequence(
    name: str, paper: str, differs: str, takes_new: bool, settings: SequenceSettings, decoder: str = A_DECODER
) -> System:
    build = partial(build_sequences, name=name, settings=settings)
    reads_pseudo = any("pseudo" in stage.sources for stage in settings.stages)
    named_by_pseudo = settings.identifiers is identifiers.descriptions
    return System(
        name,
        "generative, docids made before",
        paper,
        f"{SAME_ENCODER}, and {decoder}; {differs}",
        takes_new,
        build,
        after=(PSEUDO_QUERIES_OF,) if reads_pseudo or named_by_pseudo else (),
        revision=1,
    )


def asi(name: str, differs: str, overrides: Sequence[str] = (), base: str = "small") -> System:
    build = partial(build_asi, name=name, config=with_overrides(preset(base), overrides))
    return System(name, "learned docids and ranking", "this project's paper", differs, True, build)


def by_docids(name: str, of: str) -> System:
    return System(
        name, "learned docids and ranking", "this project's paper",
        f"the run of {of}, filled up by the docids' codes, not by the nearest buckets: docids choose what is ranked",
        True, partial(build_searched, of=of, settings={"centre_share": 0.0}), trains=False, after=(of,),
    )  # fmt: skip


def at_once(*sources: str) -> tuple[Stage, ...]:
    return (Stage(1.0, sources),)


SIMCSE = DenseSettings(pooling="cls", top="tanh")
SPANS = "2 random spans of 16 words"
SHORTER = (
    f"5 pseudo queries and {SPANS}, no task from docid to docid, stages of .3, .4 and .3 of the time, equal docids in "
    "the corpus's order"
)
# The paper's docids, losses and search; what it does not speak of is ours.
AS_IN_THE_PAPER = (
    *PAPER_OBJECTIVE, *DOCIDS_IN_EVERY_STEP, "model.token_width=0", "index.known_queries=false", "search.mode=beam",
)  # fmt: skip
ULTRON = (Stage(0.3, ("documents", "spans", "terms")), Stage(0.7, ("pseudo",)), Stage(1.0, ("queries",)))

ROWS = (
    asi(
        "asi",
        "docids of 2 codes out of 1024; ours are the terms match, balance and vector, the constrained beam that looks "
        "ahead and is filled up with the nearest buckets to 2% of the corpus, and ranking by vectors, tokens and known "
        "queries",
    ),
    System(
        "asi-beam", "learned docids and ranking", "this project's paper",
        "the run of asi, searched as in the paper: the buckets of 10 generated docids and no others", True,
        partial(build_searched, of="asi", settings={"mode": "beam"}), trains=False, after=("asi",),
    ),
    by_docids("asi-by-docids", "asi"),
    System(
        "asi-exact", "ranking without docids", "this project's paper",
        "the run of asi, its ranking over the whole corpus: what the docids cost", True,
        partial(build_searched, of="asi", settings={"candidates": 10**9}), trains=False, after=("asi",),
    ),
    asi(
        "asi-paper",
        "the paper's three losses, docids of 4 codes out of 256 and plain beam; the vectors that rank have our "
        "softmax; the encoder is frozen, straight-through ramped in, docids frozen at 90%",
        AS_IN_THE_PAPER,
    ),
    System(
        "bm25", "sparse", "Robertson and Zaragoza 2009", "k1 = 1.5, b = .75, no stemming", True,
        partial(build_bm25, expanded=False), trains=False,
    ),
    System(
        "doct5query", "sparse, expanded", "Nogueira and Lin 2019",
        "5 queries a document by our own generator, trained on the pairs, in place of T5", True,
        partial(build_bm25, expanded=True),
    ),
    dense(
        "repbert", "Zhan et al. 2020",
        "encoded apart, no token types; the product is divided by the root of the width",
        DenseSettings(cosine=False, loss="margin"),
    ),
    dense(
        "sentence-t5", "Ni et al. 2021", "no T5 unless one is given as the encoder",
        DenseSettings(top="linear", temperature=0.01, hard_negatives=True),
    ),
    dense(
        "dpr", "Karpukhin et al. 2020",
        "[CLS] of an encoder that was made for means (the mean with T5, which has none); the product is divided by the "
        "root of the width",
        DenseSettings(pooling="cls", towers=2, cosine=False, hard_negatives=True),
    ),
    dense(
        "simcse", "Gao et al. 2021", "pairs alone; [CLS] of an encoder that was made for means (the mean with T5)",
        SIMCSE,
    ),
    dense(
        "gtr", "Ni et al. 2022", "half of the time on pseudo queries, in place of web question-answering",
        DenseSettings(top="linear", temperature=0.01, hard_negatives=True, pseudo_queries=True),
    ),
    System(
        "simcse-docid", "dense over ASI's docids", "this project's paper",
        "the docids of asi; its SimCSE is that of this table", True,
        partial(build_simcse_docid, asi="asi", dense="simcse", settings=SIMCSE), trains=False,
        after=("asi", "simcse"),
    ),
    sequence(
        "dsi-atomic", "Tay et al. 2022", "each document once beside all queries, not 32 to one", False,
        SequenceSettings(identifiers.atomic, at_once("beginnings", "queries")),
    ),
    sequence(
        "dsi-semantic", "Tay et al. 2022",
        "new documents walk down the tree of clusters; those of a leaf are numbered along its main direction; each "
        "document once beside all queries", True,
        SequenceSettings(
            partial(identifiers.semantic, k=10, leaf=100, shared=True), at_once("beginnings", "queries"),
            constrained=False,
        ),
    ),
    sequence(
        "dsi-qg", "Zhuang et al. 2022",
        "5 pseudo queries a document instead of 10, and the real queries too; a digit is a token", False,
        SequenceSettings(identifiers.numbers, at_once("pseudo", "queries"), constrained=False),
    ),
    sequence(
        "nci", "Wang et al. 2022",
        f"the prefix gates the state, in place of a second decoder; no R-Drop; {SPANS}, 5 pseudo queries; a leaf is "
        "numbered along its main direction; no penalty for length but the mean", True,
        SequenceSettings(
            partial(identifiers.semantic, k=30, leaf=30, shared=False),
            at_once("documents", "spans", "pseudo", "queries"), prefix_aware=True, beams=100,
        ),
    ),
    sequence(
        "dynamicretriever", "Zhou et al. 2022",
        f"OverDense: begins as dense retrieval with the encoder; {SPANS}; no task from docid to terms", False,
        SequenceSettings(
            identifiers.atomic, (Stage(0.5, ("documents", "spans", "terms")), Stage(1.0, ("queries",))),
            starts_from_vectors=True,
        ),
    ),
    sequence(
        "ultron-url", "Zhou et al. 2022",
        f"title and key stand for title and address, the text where these say nothing, 24 pieces at most; beam 20; "
        f"{SHORTER}", True,
        SequenceSettings(identifiers.addresses, ULTRON), A_WRITER,
    ),
    sequence(
        "ultron-pq", "Zhou et al. 2022",
        f"fewer than 24 parts if 24 do not divide the width, fewer than 256 centres for a small corpus; {SHORTER}",
        True,
        SequenceSettings(identifiers.quantised, ULTRON, beams=100),
    ),
    sequence("ultron-atomic", "Zhou et al. 2022", SHORTER, False, SequenceSettings(identifiers.atomic, ULTRON)),
    sequence(
        "se-dsi", "Tang et al. 2023",
        f"the nearest of 5 descriptions by our own generator, the text where there is none, 24 pieces at most; {SPANS} "
        "for lead and chosen sentences", True,
        SequenceSettings(identifiers.descriptions, at_once("documents", "spans", "queries")), A_WRITER,
    ),
    System(
        "seal", "generative, n-grams", "Bevilacqua et al. 2022",
        f"{SAME_ENCODER}, and {A_WRITER}; windows of 8 pieces, sorted, in place of the "
        "FM-index; no titles, no second scoring with single pieces, all n-grams choose candidates; 4 n-grams to learn "
        "for a text, no label smoothing", True,
        partial(build_ngrams, name="seal", kinds=("body",)), revision=1,
    ),
    System(
        "minder", "generative, n-grams", "Li et al. 2023", "as seal, with titles; pseudo queries by our own generator",
        True, partial(build_ngrams, name="minder", kinds=("title", "body", "pseudo")), after=(PSEUDO_QUERIES_OF,),
        revision=1,
    ),
    sequence(
        "gere", "Chen et al. 2022",
        "title, of 24 pieces at most, and number of one of 8 sentences are one sequence; the sentence that shares most "
        "words with a query is its evidence; the best ranks the document", True,
        SequenceSettings(
            identifiers.titles_and_sentences, at_once("queries"), pick=identifiers.sentence_rows, beams=60
        ), A_WRITER,
    ),
    System(
        "genret", "learned docids, generative", "Sun et al. 2023",
        f"{SAME_ENCODER}, and {A_DECODER}; 3 codes out of the root of twice the documents (16 to 512); cosines with a "
        "temperature in the contrast, clusters of any size; the reconstruction teaches the codebook alone; no dropout; "
        "beam 20", True,
        partial(build_genret, name="genret"), after=(PSEUDO_QUERIES_OF,), revision=1,
    ),
    *(
        asi(f"asi-{name}", "asi-paper with this change", (*AS_IN_THE_PAPER, *VARIANTS[name]))
        for name in ("share", "no-contrastive", "no-reverse", "no-reparameterization")
    ),
    asi(
        "asi-random-docids",
        "asi with docids that mean nothing and are nearly unique: documents are found by the nearest vectors, and so "
        "are docids, because the beam looks ahead to these; what random docids do is seen in asi-random-by-docids",
        VARIANTS["random-docids"],
    ),
    by_docids("asi-random-by-docids", "asi-random-docids"),
    asi("asi-docids", "32 codes and nothing else: no decoder, no vectors, one-pass search", base="docids"),
)  # fmt: skip
BY_NAME = {system.name: system for system in ROWS}


def chosen_systems(names: str) -> list[System]:
    """The systems of a list of names, or `all`, in the order of the table."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        return list(ROWS)
    if unknown := [name for name in wanted if name not in BY_NAME]:
        raise ConfigError(f"unknown system {unknown[0]!r}; systems are {', '.join(BY_NAME)}")
    if not wanted:
        raise ConfigError("no system is named; --systems takes names with commas between them, or all")
    return [system for system in ROWS if system.name in wanted]
