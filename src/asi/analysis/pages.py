"""A page of tables and figures, written three ways: HTML in one file, Markdown with figures beside it, JSON."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asi.folders import write_atomically

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Figure:
    caption: str
    name: str  # of its file, without the suffix
    svg: str


@dataclass(frozen=True)
class Section:
    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Page:
    title: str
    introduction: Sequence[str]
    sections: Sequence[Section]
    data: dict[str, Any] = field(default_factory=dict)  # goes into the JSON beside the tables

    def write(self, folder: Path) -> Path:
        """Write all three forms into the folder; returns the HTML file."""
        figures = folder / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            for figure in section.figures:
                write_atomically(figures / f"{figure.name}.svg", figure.svg)
        write_atomically(folder / "report.md", markdown(self))
        write_atomically(folder / "report.json", json.dumps(as_json(self), indent=1, ensure_ascii=False))
        write_atomically(folder / "report.html", as_html(self))
        return folder / "report.html"


def shown(cell: Cell) -> str:
    """
    >>> [shown(cell) for cell in (None, "a", 12345, 0.12345, 3.5e-7, 1234.5, 62.74, 2.345, 0.0)]
    ['–', 'a', '12,345', '0.123', '3.5e-07', '1,234.5', '62.7', '2.35', '0.000']
    """
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if 0 < abs(cell) < 1e-3:
        return f"{cell:.1e}"
    decimals = 1 if abs(cell) >= 10 else 2 if abs(cell) > 1 else 3
    return f"{cell:,.{decimals}f}"


def is_number(cell: Cell) -> bool:
    return cell is None or not isinstance(cell, str)


def markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", *spaced(page.introduction)]
    for section in page.sections:
        lines += [f"## {section.title}", "", *spaced(section.paragraphs)]
        for figure in section.figures:
            lines += [f"![{figure.caption}](figures/{figure.name}.svg)", ""]
        for table in section.tables:
            lines += [f"**{table.caption}**", "", *markdown_table(table), ""]
    return "\n".join(lines)


def spaced(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]


def markdown_table(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [
        row(table.columns),
        row(["---"] * len(table.columns)),
        *(row([shown(cell) for cell in cells]) for cells in table.rows),
    ]


def as_json(page: Page) -> dict[str, Any]:
    tables = {
        f"{section.title}: {table.caption}": [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for section in page.sections
        for table in section.tables
    }
    texts = {section.title: list(section.paragraphs) for section in page.sections if section.paragraphs}
    about = {"title": page.title, "introduction": list(page.introduction), "texts": texts}
    return {**about, **page.data, "tables": tables}


STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2024; background: #fff; margin: 0 auto; max-width: 80rem;
  padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .5rem;
  border-top: 1px solid #d9dde3; }
p { max-width: 46rem; margin: .5rem 0; } nav { margin: 1rem 0; } nav a { margin-right: 1rem; white-space: nowrap; }
a { color: #1558b0; } code { background: #f2f4f7; padding: 0 .25em; border-radius: 3px; }
.wide { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .25rem 0 .5rem; }
th, td { padding: .3rem .45rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e6e9ee; }
th { border-bottom: 2px solid #9aa3af; vertical-align: bottom; }
.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
td:first-child { min-width: 7.5em; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; } figcaption { font-size: .9rem; color: #555; }
"""


def as_html(page: Page) -> str:
    places = {section.title: f"s{number}" for number, section in enumerate(page.sections)}
    links = " ".join(f'<a href="#{place}">{html.escape(title)}</a>' for title, place in places.items())
    body = [f"<h1>{html.escape(page.title)}</h1>", *map(html_paragraph, page.introduction), f"<nav>{links}</nav>"]
    for section in page.sections:
        body += [f'<h2 id="{places[section.title]}">{html.escape(section.title)}</h2>']
        body += [html_paragraph(text) for text in section.paragraphs]
        body += [html_figure(figure) for figure in section.figures]
        body += [html_table(table) for table in section.tables]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(page.title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def html_paragraph(text: str) -> str:
    """Text between backticks is code."""
    parts = [html.escape(part, quote=False) for part in text.split("`")]
    return "<p>" + "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)) + "</p>"


def html_figure(figure: Figure) -> str:
    # As an image, not inline: the identifiers inside of two inline figures would clash.
    data = base64.b64encode(figure.svg.encode()).decode()
    caption = html.escape(figure.caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def html_table(table: Table) -> str:
    numeric = [all(is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    kinds = [' class="n"' if number else "" for number in numeric]

    def row(tag: str, cells: Sequence[Cell]) -> str:
        inside = (f"<{tag}{kind}>{html.escape(shown(c))}</{tag}>" for c, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    body = "".join(row("td", cells) for cells in table.rows)
    caption = f"<caption>{html.escape(table.caption)}</caption>"
    inside = f"{caption}<thead>{row('th', table.columns)}</thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{inside}</table></div>'
