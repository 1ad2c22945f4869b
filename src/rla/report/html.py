"""A page as one HTML file: nothing is fetched, nothing runs; it reads well on a phone, on paper, in light and in dark.

Figures of matplotlib become SVG inside the page, whose colours (bench/style.py) are CSS variables: they change with the ground.
"""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Iterator
from html import escape

from ..bench.style import DPI, FAINT, GROUND, HUES, INK
from .page import SYMBOLS, Figure, Page, Section, Table, Verdict, overview, slug

VARIABLES = {"ground": GROUND, "ink": INK, "faint": FAINT, **HUES}
CSS = """
:root { color-scheme: light dark; LIGHT --soft: #57606a; --raised: #f3f5f8; --link: #0b5cad; --good: #116329; --bad: #a40e26;
  --open: #6b4a00; --font: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root { DARK --soft: #a9b4c0; --raised: #1c2128; --link: #7cc0ff; --good: #6fdd8b;
  --bad: #ff9a92; --open: #e3b341; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.55 var(--font); }
header, main, footer { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--faint); }
p, li { max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; margin: 1rem 0 0; padding: 0; }
nav a { display: inline-block; padding: .25rem 0; }
.skip { position: absolute; left: -100vw; background: var(--ground); padding: .5rem 1rem; }
.skip:focus { left: 0; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .88em; }
code { background: var(--raised); padding: .1em .3em; border-radius: 4px; }
pre { background: var(--raised); padding: .8rem 1rem; border-radius: 8px; overflow-x: auto; margin: .5rem 0 0; }
pre code { background: none; padding: 0; }
.scroll { overflow-x: auto; margin: .4rem 0 1.2rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
.caption { font-weight: 600; margin: 1.6rem 0 0; }
th, td { padding: .35rem .8rem; text-align: left; border-bottom: 1px solid var(--faint); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--ground); }
.number { text-align: right; }
.prose td, .prose th { white-space: normal; min-width: 9rem; vertical-align: top; }
@media (min-width: 60rem) { .prose td { white-space: nowrap; } }
.reference th, .reference td { color: var(--soft); font-style: italic; }
.reference .of { font-style: normal; font-weight: 600; padding-top: 1rem; max-width: none; }
.of span { position: sticky; left: .8rem; display: inline-block; max-width: calc(100vw - 4rem); white-space: normal; }
.figures { display: grid; gap: 1.5rem; margin: 1.2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure .scroll { margin: 0; }
figure svg, figure img { display: block; width: 100%; height: auto; max-width: 42rem; }
figure img { background: #fefefe; border-radius: 8px; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .3rem; max-width: 75ch; }
.verdict { border-left: 4px solid; padding: .1rem 0 .1rem .9rem; margin: 1rem 0; }
.verdict p { margin: .2rem 0; }
.verdict strong, .outcome { font-weight: 600; }
.agrees { color: var(--good); } .disagrees { color: var(--bad); } .open { color: var(--open); }
.verdict p { color: var(--ink); } .verdict p.outcome { color: inherit; }
.notes { color: var(--soft); font-size: .92rem; padding-left: 1.2rem; }
details { margin: 1.2rem 0; }
summary { cursor: pointer; padding: .25rem 0; color: var(--link); }
footer { margin-top: 3rem; padding-bottom: 3rem; color: var(--soft); font-size: .9rem; }
footer dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; padding-top: 1rem;
  border-top: 1px solid var(--faint); }
footer dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { .name { display: inline-block; width: max-content; max-width: 42vw; white-space: normal; } }
@media print { details > * { display: block; } .scroll { overflow: visible; } nav, .skip { display: none; } }
"""


def render(page: Page) -> str:
    """The whole file."""
    names = {"LIGHT": "light", "DARK": "dark"}
    css = CSS.strip()
    for word, theme in names.items():
        css = css.replace(word, " ".join(f"--{name}: {getattr(hue, theme)};" for name, hue in VARIABLES.items()))
    anchors = _anchors([section.title for section in page.sections])
    contents = [(anchors[i], section.title) for i, section in enumerate(page.sections)]
    if page.verdicts:
        contents.insert(0, ("claims", "Claims at a glance"))
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(page.title)}</title>",
        f"<style>\n{css}\n</style>",
        "</head>",
        "<body>",
        '<a class="skip" href="#content">To the content</a>',
        f"<header>\n<h1>{_inline(page.title)}</h1>\n<p>{_inline(page.intro)}</p>",
    ]
    if len(contents) > 2:
        links = "\n".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in contents)
        lines.append(f'<nav aria-label="Contents">\n<ul>\n{links}\n</ul>\n</nav>')
    lines += ["</header>", '<main id="content">']
    if page.verdicts:
        lines += ["<section>", '<h2 id="claims">Claims at a glance</h2>']
        lines += [*_table(overview(page), prose=True), "</section>"]
    for anchor, section in zip(anchors, page.sections, strict=True):
        lines += _section(section, anchor)
    lines.append("</main>")
    if page.facts:
        rows = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in page.facts.items())
        lines.append(f'<footer aria-label="Versions and machine">\n<dl>\n{rows}\n</dl>\n</footer>')
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"


def _anchors(titles: list[str]) -> list[str]:
    """An id for each section, all different."""
    found: list[str] = []
    for title in titles:
        name = f"section-{slug(title)}"
        found.append(name if name not in found else f"{name}-{len(found)}")
    return found


def _inline(text: str) -> str:
    """Text with `code` and [links](address)."""
    parts = re.split(r"(`[^`]+`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"<code>{escape(part[1:-1])}</code>"
        else:
            parts[i] = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', escape(part))
    return "".join(parts)


def _section(section: Section, anchor: str) -> Iterator[str]:
    yield "<section>"
    yield f'<h2 id="{anchor}">{_inline(section.title)}</h2>'
    for paragraph in section.body:
        yield f"<p>{_inline(paragraph)}</p>"
    for verdict in section.verdicts:
        yield from _verdict(verdict)
    if section.figures:
        yield '<div class="figures">'
        for figure in section.figures:
            yield from _figure(figure)
        yield "</div>"
    for table in section.tables:
        yield from _table(table)
    if section.notes:
        yield '<ul class="notes">'
        yield from (f"<li>{_inline(note)}</li>" for note in section.notes)
        yield "</ul>"
    if section.commands:
        commands = escape("\n".join(section.commands))
        region = f'role="group" aria-label="Commands: {escape(section.title)}" tabindex="0"'
        yield f"<details>\n<summary>To get it again</summary>\n<pre {region}><code>{commands}</code></pre>\n</details>"
    yield "</section>"


def _verdict(verdict: Verdict) -> Iterator[str]:
    kind = verdict.outcome if verdict.outcome in ("agrees", "disagrees") else "open"
    yield f'<div class="verdict {kind}">'
    yield f'<p class="outcome">{SYMBOLS[verdict.outcome]} {verdict.outcome.capitalize()}</p>'
    yield f"<p><strong>{_inline(verdict.claim)}</strong></p>"
    if verdict.paper:
        yield f"<p>The paper: {_inline(verdict.paper)}</p>"
    yield f"<p>Here: {_inline(verdict.evidence)}</p>"
    yield "</div>"


def _table(table: Table, *, prose: bool = False) -> Iterator[str]:
    aligned = ["number" if table.is_number(i) else "" for i in range(len(table.headers))]

    def cells(row: tuple[str, ...], tag: str, scope: str) -> str:
        made = []
        for i, text in enumerate(row):
            name = "th" if tag == "th" or i == 0 else "td"
            attributes = (f' scope="{scope}"' if name == "th" else "") + (f' class="{aligned[i]}"' if aligned[i] else "")
            inner = _inline(text) if i or tag == "th" else f'<span class="name">{_inline(text)}</span>'
            made.append(f"<{name}{attributes}>{inner}</{name}>")
        return f"<tr>{''.join(made)}</tr>"

    kind = "scroll prose" if prose else "scroll"
    yield f'<p class="caption">{_inline(table.caption)}</p>'  # outside of what scrolls, so that it is always whole
    yield f'<div class="{kind}" role="group" aria-label="Table: {escape(table.caption)}" tabindex="0">'
    yield f'<table aria-label="{escape(table.caption)}">'
    yield f"<thead>{cells(table.headers, 'th', 'col')}</thead>"
    yield "<tbody>"
    yield from (cells(row, "td", "row") for row in table.rows)
    yield "</tbody>"
    if table.reference:
        yield '<tbody class="reference">'
        title = _inline(table.reference_title)
        yield f'<tr><th class="of" scope="rowgroup" colspan="{len(table.headers)}"><span>{title}</span></th></tr>'
        yield from (cells(row, "td", "row") for row in table.reference)
        yield "</tbody>"
    yield "</table>\n</div>"


def _figure(figure: Figure) -> Iterator[str]:
    picture, width = _png(figure) if isinstance(figure.picture, bytes) else (svg(figure), figure.picture.get_figwidth())
    if figure.wide:  # as large as the page allows, never so small that its letters can't be read
        size = f'style="min-width: {84 * width:.0f}px; max-width: {104 * width:.0f}px"'
        picture = re.sub(r"^<(svg|img)", rf"<\1 {size}", picture)
        label = f'role="group" aria-label="Figure: {escape(figure.caption or figure.name)}" tabindex="0"'
        picture = f'<div class="scroll" {label}>{picture}</div>'
    yield f'<figure class="wide">{picture}' if figure.wide else f"<figure>{picture}"
    if figure.caption:
        yield f"<figcaption>{_inline(figure.caption)}</figcaption>"
    yield "</figure>"


def _png(figure: Figure) -> tuple[str, float]:
    """The image, and its width in inches at the resolution of style.save."""
    data = figure.picture
    width, height = struct.unpack(">II", data[16:24])  # of the IHDR chunk, which comes first
    code = base64.b64encode(data).decode()
    image = f'<img alt="{escape(figure.alt)}" width="{width}" height="{height}" src="data:image/png;base64,{code}">'
    return image, width / DPI


def svg(figure: Figure) -> str:
    """The figure's SVG with ids of its own, the page's font, and variables for the colours of style.py."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.name}):
        figure.picture.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{figure.name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{figure.name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{figure.name}-\1)", text)
    text = re.sub(r"font: ([^;\"]*?[\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", text)
    for name, hue in VARIABLES.items():
        text = text.replace(hue.light, f"var(--{name})")
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height|xmlns(:xlink)?|version)="[^"]*"', "", head)  # the page's CSS gives the size
    return f'{head} role="img" aria-label="{escape(figure.alt)}">{rest}'
