"""The page: one HTML file that is well formed and needs nothing else, colours that can be seen, the same bytes each time."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report_common import sample_page, sample_picture
from rla.bench import style
from rla.method import METHODS
from rla.report.html import CSS, VARIABLES, render, svg
from rla.report.page import Figure, Page, Section, Table, Verdict, write

VOID = {"meta", "img", "br", "link", "input"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is given twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return render(sample_page())


@pytest.fixture(scope="module")
def page(html) -> Reader:
    return Reader(html)


def test_page_needs_nothing_else(page, html):
    assert not page.all("script")
    assert not page.all("link")
    assert "@import" not in html
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href"):
            if attributes.get(name):
                assert attributes[name].startswith(("#", "data:image/png;base64,")), (tag, attributes[name][:80])
    assert not re.search(r"url\((?!#)", html)


def test_page_says_what_readers_need(page):
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert len(page.all("h1")) == 1
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(headings))
    assert [image["alt"] for image in page.all("img")] == ["The same lines as pixels."]
    assert [x["aria-label"] for x in page.all("svg")] == ["Lines of five methods.", 'Lines, with "quotes".']
    assert all(x["role"] == "img" for x in page.all("svg"))
    for attributes in page.all("th"):
        assert attributes["scope"] in ("col", "row", "rowgroup")
    for tag, attributes in page.elements:
        if tag == "div" and "scroll" in (attributes.get("class") or "").split():
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        target = attributes.get("href") or attributes.get("xlink:href") or ""
        assert not target.startswith("#") or target[1:] in ids, (tag, target)
        for value in attributes.values():
            for name in re.findall(r"url\(#([^)]+)\)", value or ""):
                assert name in ids


def test_text_is_escaped(page, html):
    text = "".join(page.text)
    assert "a <sample> of the report" in text
    assert "<sample>" not in html
    assert 'rla report runs/* --title "a & b"' in text
    hostile = Page("<script>x</script>", "<b>", (Section("<i>", ("<img src=x onerror=y>",)),), {"<u>": "<u>"})
    reader = Reader(render(hostile))
    assert not {"script", "img", "b", "i", "u"} & {tag for tag, _ in reader.elements}


def test_verdicts_and_reference_rows_are_told_in_words(html):
    for words in ("✓ Agrees", "✗ Disagrees", "? Not testable at this scale", "Claims at a glance"):
        assert words in html
    reference = html[html.index('<tbody class="reference">') :]
    assert "The paper, 1.5B parameters, 100B tokens: printed there, not measured here" in reference[:300]
    assert "58.7" in reference


def test_numbers_are_set_to_the_right():
    rows = (("a", "1.5", "word", "", "3 (2 to 4)", "0 1 2", "-1 to +2 *"), ("b", "1,024", "3", "", "40.5 ±1.2*", "0", "+0.1"))
    table = Table("t", tuple("abcdefg"), rows)
    assert [table.is_number(i) for i in range(7)] == [False, True, False, True, True, False, True]


def test_svg_takes_the_colours_of_the_page(html):
    made = svg(Figure("one", sample_picture(), "alt"))
    for hue in style.HUES.values():
        assert hue.light not in made
    for name in ("sky", "blue", "amber", "brick", "grey", "ink", "faint"):
        assert f"var(--{name})" in made
    assert "DejaVu" not in made
    assert not re.search(r'<svg[^>]* (width|height)="', made)
    assert made.count("<svg") == 1
    for name, hue in VARIABLES.items():
        assert f"--{name}: {hue.light};" in html
        assert f"--{name}: {hue.dark};" in html


def test_the_same_page_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(sample_page(), tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert [str(path) for path in files] == [
        "figures/sample-png.png",
        "figures/sample-wide.png",
        "figures/sample.png",
        "index.html",
        "report.md",
    ]
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


def test_markdown(tmp_path):
    write(sample_page(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for line in (
        "# Residual linear attention: a &lt;sample> of the report",
        "| a &lt; b | 3.5 (3.1 to 3.9) | `code` \\| pipe |",
        "|---|---:|---|",
        "![Lines of five methods.](figures/sample.png)",
        'rla report runs/* --title "a & b"',
        "- torch: 2.13.0",
    ):
        assert line in text.split("\n")
    for target in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (tmp_path / target).exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("t", ("a", "b"), (("1",),)), "rows: expected 2 cells"),
        (lambda: Table("t", ("a",), (), (("x",),)), "reference_title: expected words"),
        (lambda: Figure("A B", None, "alt"), "name: expected small letters"),
        (lambda: Figure("a", None, " "), "alt: expected words"),
        (lambda: Verdict("c", "perhaps", "e"), "outcome: expected one of agrees, disagrees"),
        (lambda: Page("t", "i", (Section("s", figures=(Figure("a", b"", "x"), Figure("a", b"", "y"))),)), "have the name 'a'"),
    ],
)
def test_misuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """As WCAG defines it."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out(theme):
    ground = getattr(style.GROUND, theme)
    for name, hue in style.HUES.items():
        assert contrast(getattr(hue, theme), ground) >= 3, name
    assert contrast(getattr(style.INK, theme), ground) >= 7
    for colour in style.ramp(7):  # one for both grounds
        assert contrast(colour, ground) >= 2.9
    rules = CSS.split("@media (prefers-color-scheme: dark)")[theme == "dark"].split("* {")[0]
    words = dict(re.findall(r"--(soft|link|good|bad|open|raised): (#\w{6})", rules))
    assert len(words) == 6
    for name in ("soft", "link", "good", "bad", "open"):
        assert contrast(words[name], ground) >= 4.5, name
        assert contrast(words[name], words["raised"]) >= 4.5, name


def test_each_method_has_its_own_colour_and_pairs_their_own_dashes():
    named = [*METHODS, "softmax"]
    tones = style.colours(named)
    plain = [name for name in named if "-" not in name]
    assert len({tones[name] for name in plain}) == len(plain)
    for family in ("rla", "rdn"):
        looks = [(tones[name], style.dashes(name)) for name in named if name.split("-")[0] == family]
        assert len(set(looks)) == len(looks)
    for method, base in (("rla", "sgla"), ("rdn", "gdn")):
        assert style.dashes(method) != style.dashes(base)
    assert style.colours(["rdn, lr 0.01"]) == {"rdn, lr 0.01": tones["rdn"]}
    assert style.colours(["x", "rdn"])["rdn"] == tones["rdn"]


def test_the_manuals_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manual = Path(__file__).parent.parent / "docs" / "report.md"
    for block in re.findall(r"```python\n(.*?)```", manual.read_text(), re.DOTALL):
        exec(compile(block, str(manual), "exec"), {})
    assert "2.0 against 2.1" in (tmp_path / "my-report" / "index.html").read_text()


@pytest.mark.slow
def test_accessibility_in_chromium(tmp_path):
    """RLA_NODE_MODULES names a folder with playwright-core and axe-core; see tests/a11y/check.mjs."""
    modules, chromium = os.environ.get("RLA_NODE_MODULES"), shutil.which("chromium") or shutil.which("google-chrome")
    if not modules or not chromium or not shutil.which("node"):
        pytest.skip("needs node, chromium and RLA_NODE_MODULES")
    path = write(sample_page(), tmp_path)
    script = Path(__file__).parent / "a11y" / "check.mjs"
    env = os.environ | {"NODE_MODULES": modules, "CHROMIUM": chromium}
    done = subprocess.run(["node", str(script), str(path)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 0 violations") == 4
