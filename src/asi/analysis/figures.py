"""Figures as SVG text."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asi.errors import ConfigError

COLOURS = ("#1558b0", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e")
TSNE_POINTS = 5000  # more are sampled: the picture is full by then


def check_packages() -> None:
    """Refuse before hours of training what can't be drawn after them."""
    for package in ("matplotlib", "openTSNE"):
        if find_spec(package) is None:
            raise ConfigError(f"figures need {package}; run: pip install 'auto-search-indexer[report]'")


def new_axes(width: float = 7.0, height: float = 4.0, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "asi"})
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def as_svg(figure: Any) -> str:
    import matplotlib.pyplot as plt

    text = StringIO()
    figure.savefig(text, format="svg", dpi=150, metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def density_figure(sizes: NDArray[np.int64]) -> str:
    """Documents behind each docid, the fullest docid first, both axes logarithmic: a long tail is a falling line."""
    figure, axes = new_axes()
    ordered = np.sort(sizes)[::-1]
    axes.loglog(np.arange(1, len(ordered) + 1), ordered, drawstyle="steps-post", color=COLOURS[0])
    axes.fill_between(np.arange(1, len(ordered) + 1), ordered, 0.8, step="post", color=COLOURS[0], alpha=0.15)
    axes.set(xlabel="docids, the fullest first", ylabel="documents with the docid", ylim=(0.8, None))
    axes.grid(alpha=0.3)
    return as_svg(figure)


def tsne_figure(docids: NDArray[np.int64], V: int, seed: int = 0) -> str | None:
    """Docids as vectors of m numbers, laid out by t-SNE and coloured by their first code; None for a handful."""
    from openTSNE import TSNE

    if len(docids) < 20:
        return None
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(docids), min(TSNE_POINTS, len(docids)), replace=False)
    vectors = docids[chosen] / V
    perplexity = min(30, (len(chosen) - 1) / 3)
    places = TSNE(perplexity=perplexity, initialization="random", random_state=seed, n_jobs=-1).fit(vectors)
    figure, axes = new_axes(6.5, 5.5)
    dots = axes.scatter(*np.asarray(places).T, c=docids[chosen, 0], s=4, cmap="viridis", linewidths=0, rasterized=True)
    figure.colorbar(dots, label="first code")
    axes.set(xticks=[], yticks=[])
    return as_svg(figure)


Lines = Mapping[str, Sequence[float | None]]


def lines_figure(panels: Mapping[str, Lines], places: Sequence[int], label: str) -> str:
    """Panels side by side, each with lines over the same few places."""
    figure, all_axes = new_axes(4.2 * len(panels), 3.6, columns=len(panels))
    for axes, (title, lines) in zip(np.atleast_1d(all_axes), panels.items(), strict=True):
        for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
            axes.plot(
                range(len(places)), [np.nan if v is None else v for v in values], "o-", ms=4, label=name, color=colour
            )
        axes.set(xlabel=label, title=title, xticks=range(len(places)), xticklabels=[str(place) for place in places])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
    return as_svg(figure)
