"""The dense bi-encoder that ASI is measured against: the same loop, encoder and residual layer, trained by the softmax
on vectors and nothing else, at full speed."""

DENSE = (
    *(f"loss.{name}=0" for name in ("generation", "contrastive", "reverse", "match", "balance")),
    "model.token_width=0",
    "index.known_queries=false",
    "train.docid_every=1000000000",
    "train.freeze_docids=1",
    "train.start_heads=0",
)
