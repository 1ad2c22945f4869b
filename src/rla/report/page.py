"""Page: a report as data, written as one HTML file that needs nothing else, as Markdown, and as PNG files of its figures.

    write(Page("Title", "What this is.", (Section("First", ("A paragraph.",), figures=(Figure(...),)),)), Path("report"))

    report/index.html    everything inside: style, figures (SVG in the reader's light or dark colours); see html.py
    report/report.md     the same text and tables, with the figures' PNG files
    report/figures/*.png

Text is plain, but for `code` in backticks and [links](address). The same page gives the same files, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..bench import style
from ..data.writer import write_durably

Outcome = Literal["agrees", "disagrees", "not testable at this scale"]
SYMBOLS: Mapping[Outcome, str] = {"agrees": "✓", "disagrees": "✗", "not testable at this scale": "?"}
NUMBER = re.compile(r"[-+]?[\d.,]+\*?( ?[±(%].*| to .*)?")


@dataclass(frozen=True)
class Table:
    """The first column names the row. `reference` rows are somebody else's numbers, under a heading that says so."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reference: tuple[tuple[str, ...], ...] = ()
    reference_title: str = ""

    def __post_init__(self) -> None:
        for row in (*self.rows, *self.reference):
            if len(row) != len(self.headers):
                raise ValueError(f"rows: expected {len(self.headers)} cells, as there are headers; got {len(row)}: {row}")
        if self.reference and not self.reference_title:
            raise ValueError("reference_title: expected words that say whose numbers the reference rows are; got none")

    def is_number(self, column: int) -> bool:
        """Whether all that the column holds are numbers, with or without a range, so that it is set to the right."""
        cells = [row[column] for row in (*self.rows, *self.reference) if row[column]]
        return column > 0 and all(NUMBER.fullmatch(cell) for cell in cells)


@dataclass(frozen=True)
class Figure:
    """A picture with words for those who don't see it. `name` is its file's, without .png."""

    name: str
    picture: Any  # a figure of matplotlib, drawn as style.py says, or the bytes of a PNG file
    alt: str
    caption: str = ""
    wide: bool = False  # takes the page's whole width, and on a phone is moved sideways rather than shrunk

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):
            raise ValueError(f"name: expected small letters, digits, points and hyphens; got {self.name!r}")
        if not self.alt.strip():
            raise ValueError(f"alt: expected words that say what figure {self.name} shows; got none")


@dataclass(frozen=True)
class Verdict:
    """What became of a claim of the paper's."""

    claim: str
    outcome: Outcome
    evidence: str  # what was seen here, with numbers
    paper: str = ""  # the paper's own number

    def __post_init__(self) -> None:
        if self.outcome not in SYMBOLS:
            raise ValueError(f"outcome: expected one of {', '.join(SYMBOLS)}; got {self.outcome!r}")


@dataclass(frozen=True)
class Section:
    """Shown in the order of the fields."""

    title: str
    body: tuple[str, ...] = ()  # paragraphs
    verdicts: tuple[Verdict, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # that give all this again


@dataclass(frozen=True)
class Page:
    title: str
    intro: str
    sections: tuple[Section, ...]
    facts: Mapping[str, str] = field(default_factory=dict)  # versions, machine

    def __post_init__(self) -> None:
        names = [figure.name for section in self.sections for figure in section.figures]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sections: two figures have the name {twice[0]!r}")

    @property
    def verdicts(self) -> list[tuple[Section, Verdict]]:
        return [(section, verdict) for section in self.sections for verdict in section.verdicts]


def slug(text: str) -> str:
    """The text as a name for a file or an anchor: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def write(page: Page, out: Path) -> Path:
    """Write the page into a folder and return the path of its HTML file; each file is replaced as a whole."""
    from .html import render

    pictures = out / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    for section in page.sections:
        for figure in section.figures:
            path = pictures / f"{figure.name}.png"
            if isinstance(figure.picture, bytes):
                path.write_bytes(figure.picture)
            else:
                style.save(figure.picture, path)
    write_durably(out / "report.md", "\n".join(map(_no_tags, _markdown(page))).rstrip() + "\n")
    write_durably(out / "index.html", render(page))
    return out / "index.html"


def _no_tags(line: str) -> str:
    """A < that Markdown would take for the beginning of HTML, made plain; code is left alone."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def _markdown(page: Page) -> Iterator[str]:
    yield from (f"# {page.title}", "", page.intro, "")
    if page.verdicts:
        yield from ("## Claims at a glance", "", *_table(overview(page)), "")
    for section in page.sections:
        yield from (f"## {section.title}", "")
        for paragraph in section.body:
            yield from (paragraph, "")
        for verdict in section.verdicts:
            paper = f" The paper: {verdict.paper}." if verdict.paper else ""
            yield from (
                f"**{SYMBOLS[verdict.outcome]} {verdict.outcome}:** {verdict.claim}{paper} Here: {verdict.evidence}",
                "",
            )
        for figure in section.figures:
            yield from (f"![{figure.alt}](figures/{figure.name}.png)", "")
            if figure.caption:
                yield from (figure.caption, "")
        for table in section.tables:
            yield from (f"**{table.caption}**", "", *_table(table), "")
        for note in section.notes:
            yield f"- {note}"
        if section.notes:
            yield ""
        if section.commands:
            yield from ("To get it again:", "", "\n".join(("```sh", *section.commands, "```")), "")
    if page.facts:
        yield from ("## Versions and machine", "", *(f"- {key}: {value}" for key, value in page.facts.items()))


def overview(page: Page) -> Table:
    """All verdicts of a page in one table."""
    rows = [(v.claim, f"{SYMBOLS[v.outcome]} {v.outcome}", s.title) for s, v in page.verdicts]
    return Table("The paper's claims, and what was seen here", ("claim", "verdict", "section"), tuple(rows))


def _table(table: Table) -> Iterator[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    yield line(table.headers)
    yield "|" + "|".join("---:" if table.is_number(i) else "---" for i in range(len(table.headers))) + "|"
    yield from map(line, table.rows)
    if table.reference:
        yield line((f"*{table.reference_title}*", *[""] * (len(table.headers) - 1)))
        yield from (line((f"*{row[0]}*", *row[1:])) for row in table.reference)
