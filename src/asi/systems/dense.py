"""Dense bi-encoders: query and document become one vector each, and exact search (faiss) finds the nearest.

One mechanism; the systems differ in pooling, towers, the layer on top, similarity, loss and negatives. The encoder is
frozen as for all systems, so what is trained is a residual layer on the pooled vector, one for each tower.
Letters: B batch, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from asi.batches import DOCUMENT, QUERY, Batch, TrainingPairs
from asi.config import LossConfig, TrainConfig
from asi.features import Features
from asi.losses import in_batch_softmax
from asi.model import Adapter
from asi.objective import feature_dropout
from asi.records import Hit
from asi.systems.lexical import bm25_negatives
from asi.systems.workplace import Built, Workplace, parameters_of, require_faiss
from asi.training import ParameterGroup, StagedObjective, residual_group

BATCH = 1024
LEARNING_RATE = 2e-3
HIDDEN = 1024  # width of the residual layer, as in ASI
TEXTS_AT_ONCE = 4096
PRETRAINED = 0.5  # share of the run on pseudo queries, for systems that begin with them


@dataclass(frozen=True)
class DenseSettings:
    pooling: str = "mean"  # or "cls"
    towers: int = 1
    top: str = "none"  # what stands on the vector: none, linear, or tanh (a linear layer and a tanh)
    cosine: bool = True
    temperature: float = 0.05
    loss: str = "softmax"  # or "margin", over all relevant documents of the batch
    hard_negatives: bool = False  # a document that BM25 takes for relevant, for each query
    pseudo_queries: bool = False  # the first part of the run learns from pseudo queries


class Tower(nn.Module):
    def __init__(self, width: int, settings: DenseSettings) -> None:
        super().__init__()
        self.adapter = Adapter(width, HIDDEN)
        self.top = nn.Linear(width, width) if settings.top != "none" else None
        if self.top is not None:  # residual, as the adapter: its decay draws it back to what it was
            nn.init.zeros_(self.top.weight)
            nn.init.zeros_(self.top.bias)
        self.tanh = settings.top == "tanh"
        self.scale = 1.0 if settings.cosine else width**-0.25  # a product of two vectors is divided by the root of D
        self.cosine = settings.cosine

    def forward(self, pooled: Tensor) -> Tensor:
        x = self.adapter(pooled)
        if self.top is not None:
            x = x + self.top(x)
        if self.tanh:
            x = torch.tanh(x)
        return F.normalize(x, dim=-1) if self.cosine else x * self.scale


class BiEncoder(nn.Module):
    def __init__(self, width: int, settings: DenseSettings) -> None:
        super().__init__()
        self.query = Tower(width, settings)
        self.second = Tower(width, settings) if settings.towers == 2 else None

    @property
    def document(self) -> Tower:
        return self.second if self.second is not None else self.query


class Vectors(NamedTuple):
    queries: Tensor  # (B, D)
    documents: Tensor  # (B, D)
    hard: Tensor  # (B, D) or (B, 0)


class DenseObjective(StagedObjective):
    """In-batch softmax or margin, with a hard negative for each query if the system has them."""

    def __init__(
        self,
        model: BiEncoder,
        queries: NDArray[np.float32],
        documents: NDArray[np.float32],
        stages: Sequence[tuple[float, TrainingPairs]],
        settings: DenseSettings,
        hard: NDArray[np.int64] | None,
    ) -> None:
        super().__init__(stages)
        self.model = model
        self.queries = queries
        self.documents = documents
        self.settings = settings
        self.hard = hard  # (queries,) rows of documents

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        decay, pairs = TrainConfig().adapter_decay, self.stages[-1][1]
        return {"towers": residual_group(list(self.model.parameters()), LEARNING_RATE, decay, pairs)}

    def pooled(self, texts: NDArray[np.float32], rows: NDArray[np.int64], kind: int, batch: Batch) -> Tensor:
        """The encoder's vectors, with the dropout that ASI's have."""
        vectors = torch.from_numpy(texts[rows]).to(next(self.model.parameters()).device)
        return feature_dropout(vectors, rows, kind, batch.step, LossConfig().vector_dropout)

    def represent(self, batch: Batch) -> tuple[Vectors, None]:
        queries = self.model.query(self.pooled(self.queries, batch.queries, QUERY, batch))
        documents = self.model.document(self.pooled(self.documents, batch.documents, DOCUMENT, batch))
        hard = queries.new_zeros(len(queries), 0)
        if self.hard is not None:
            hard = self.model.document(self.pooled(self.documents, self.hard[batch.queries], DOCUMENT, batch))
        return Vectors(queries, documents, hard), None

    def batch_losses(self, representations: Vectors, batch: Batch) -> dict[str, Tensor]:
        queries, documents, hard = representations
        negatives = self.pairs.negatives(batch).to(queries.device)
        if self.settings.loss == "margin":
            return {"margin": multi_label_margin(queries @ documents.T, ~negatives)}
        temperature = self.settings.temperature if self.settings.cosine else 1.0
        if hard.size(1):
            documents = torch.cat([documents, hard])
            negatives = torch.cat([negatives, self.hard_negatives(batch).to(queries.device)], dim=1)
        return {"softmax": in_batch_softmax(queries @ documents.T / temperature, negatives)}

    def hard_negatives(self, batch: Batch) -> Tensor:
        """(B, B): true where query j's hard negative is no answer to query i."""
        assert self.hard is not None
        return self.pairs.negatives(Batch(batch.queries, self.hard[batch.queries], batch.step))


def multi_label_margin(scores: Tensor, relevant: Tensor) -> Tensor:
    """RepBERT's loss: max(0, 1 - (relevant - other)), summed over all such pairs of a row, over the row's length."""
    B = scores.size(1)
    labels = torch.full_like(scores, -1, dtype=torch.long)
    order = relevant.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    count = relevant.sum(1, keepdim=True)
    places = torch.arange(B, device=scores.device)[None, :]
    labels[places < count] = order[places.expand_as(order) < count]
    return F.multilabel_margin_loss(scores, labels)


class DenseRetriever:
    """Exact inner-product search with faiss."""

    def __init__(self, workplace: Workplace, model: BiEncoder, settings: DenseSettings) -> None:
        import faiss

        self.workplace = workplace
        self.model = model.eval()
        self.settings = settings
        self.vectors = embedded(model.document, pooled_by(settings, workplace.documents), workplace.device)
        self.index: Any = faiss.IndexFlatIP(self.vectors.shape[1])
        self.index.add(self.vectors)

    def query_vectors(self, queries: Sequence[str]) -> NDArray[np.float32]:
        encoded = self.workplace.encode(self.workplace.tokenise(queries))
        pooled = encoded.states[:, 0] if self.settings.pooling == "cls" else encoded.pooled
        with torch.inference_mode():
            vectors: NDArray[np.float32] = self.model.query(pooled).float().cpu().numpy()
        return vectors

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        scores, rows = self.index.search(self.query_vectors(queries), min(k, len(self.workplace.keys)))
        return [
            [Hit(self.workplace.keys[row], score) for row, score in zip(own, values, strict=True)]
            for own, values in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def pooled_by(settings: DenseSettings, features: Features) -> NDArray[np.float32]:
    """One vector for each text: the mean of its token states, or the state of its first token."""
    assert features.pooled is not None
    assert features.states is not None
    if settings.pooling == "mean":
        return features.pooled
    first: NDArray[np.float32] = features.states[features.tokens.offsets[:-1]].astype(np.float32)
    return first


def embedded(tower: nn.Module, pooled: NDArray[np.float32], device: torch.device) -> NDArray[np.float32]:
    with torch.inference_mode():
        parts = [
            tower(torch.from_numpy(np.array(pooled[start : start + TEXTS_AT_ONCE])).to(device)).float().cpu()
            for start in range(0, len(pooled), TEXTS_AT_ONCE)
        ]
    vectors: NDArray[np.float32] = torch.cat(parts).numpy()
    return vectors


def build_dense(workplace: Workplace, name: str, settings: DenseSettings) -> Built:
    require_faiss()
    if not workplace.tokenise.starts:  # a text of this encoder has no [CLS] before it
        settings = replace(settings, pooling="mean")
    texts = workplace.texts
    sources = [texts.queries]
    stages = [(1.0, texts.pairs)]
    if settings.pseudo_queries:
        pseudo = workplace.source("pseudo")
        sources.append(pseudo.texts)
        stages = [(PRETRAINED, pseudo.pairs + np.array([len(texts.queries), 0])), *stages]
    queries = np.concatenate([pooled_by(settings, workplace.features(source)) for source in sources])
    hard = None
    if settings.hard_negatives:
        every_text = [text for source in sources for text in source]
        hard = bm25_negatives(workplace, every_text, np.concatenate([pairs for _, pairs in stages]))
    width = workplace.encoder.encoder.shape.width
    model = workplace.new_model(lambda: BiEncoder(width, settings))
    objective = DenseObjective(
        model,
        queries,
        pooled_by(settings, workplace.documents),
        [(until, workplace.pairs(pairs, BATCH)) for until, pairs in stages],
        settings,
        hard,
    )
    training = workplace.train(name, objective)
    retriever = DenseRetriever(workplace, model, settings)
    return Built(retriever, parameters_of(model), training, retriever.vectors.shape[1] * 4)
