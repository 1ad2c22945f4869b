"""README and docs: Python blocks run, commands and paths exist, no local link is dead, and the site builds without a warning.

A page's Python blocks run in order, in one namespace and in an empty folder. In console blocks and in code within sentences,
every `rla ...` and `make ...` must name a command that exists, with options that its --help has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rla
from rla import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PROSE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = "docs|examples|recipes|src|tests|tools"  # what a path in code quotes may begin with


class Block(NamedTuple):
    language: str  # of a fence; "": an indented block, or a fence without one
    line: int  # of the first line of code, from 0
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def split(page: Path) -> tuple[list[Block], str]:
    """The code blocks of a page, and its text without them."""
    blocks, prose = [], []
    fence: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines()):
        if line.startswith("```"):
            if fence is None:
                fence, language, start = [], line[3:].strip(), number + 1
            else:
                blocks.append(Block(language, start, "\n".join(fence)))
                fence = None
        elif fence is not None:
            fence.append(line)
        elif line.startswith("    "):
            blocks.append(Block("", number, line[4:]))
        else:
            prose.append(line)
    assert fence is None, f"{page}: a code block is not closed"
    return blocks, "\n".join(prose)


def spans(page: Path) -> list[str]:
    """Code within sentences, on one line each."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", split(page)[1])]


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of every command line that calls `rla` or `make`, from that word on."""
    blocks, _ = split(page)
    shown = "\n".join(block.text for block in blocks if block.language in ("", "sh")).replace("\\\n", " ")
    for line in [*shown.splitlines(), *spans(page)]:
        if line.startswith("make "):
            yield re.split(r"\s{2,}|\s#", line)[0].split()
        elif line.startswith("rla ") or " -m rla " in line:
            words = shlex.split(line, comments=True)
            yield words[words.index("rla") :]


@functools.cache
def options(command: str, recipe: str) -> set[str]:
    """The options that `rla COMMAND --help` lists."""
    out = io.StringIO()
    arguments = [*command.split(), *([recipe] if recipe else []), "--help"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return set(re.findall(r"--[a-z][a-z0-9.-]*", out.getvalue()))


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command line."""
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no target {unknown[0]}" if unknown else None
    given = words[1:]
    if given[0] in ("COMMAND", "--help", "--version"):
        return None
    name = next((" ".join(given[:n]) for n in (2, 1) if " ".join(given[:n]) in cli.COMMANDS), None)
    if name is None:
        group = len(given) == 1 and any(command.split()[0] == given[0] for command in cli.COMMANDS)
        return None if group else f"no command {given[0]}"
    recipe = ""
    if cli.COMMANDS[name].parses:
        recipe = next((word for word in given if word.startswith("recipes/")), "recipes/tiny.toml")
        if not (ROOT / recipe).exists():
            return f"no file {recipe}"
    asked = [word.split("=")[0].replace("_", "-") for word in given if word.startswith("--")]
    unknown = [option for option in asked if option not in options(name, str(ROOT / recipe) if recipe else "")]
    return f"`rla {name}` has no option {unknown[0]}" if unknown else None


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them, and of its API entries."""
    _, prose = split(page)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^::: (\S+)$", prose, re.MULTILINE))


def runnable() -> list[Path]:
    return [page for page in PAGES if any(block.language == "python" for block in split(page)[0])]


@pytest.mark.parametrize("page", runnable(), ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in split(page)[0]:
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


def test_blocks_are_found():
    assert len(runnable()) >= 7
    assert sum(len(list(command_lines(page))) for page in PAGES) >= 60
    assert {block.language for page in PAGES for block in split(page)[0]} == {"", "python", "sh"}


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_commands_exist(page):
    faults = {" ".join(words): fault_of(words) for words in command_lines(page)}
    assert {line: fault for line, fault in faults.items() if fault is not None} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("rla train recipes/tiny.toml --optimizer.lr 1e-3", None),
        ("rla train recipes/tiny.toml --optimizer.rate 1e-3", "`rla train` has no option --optimizer.rate"),
        ("rla train recipes/huge.toml", "no file recipes/huge.toml"),
        ("rla eval mqar recipes/mqar.toml --jobs 2", None),
        ("rla eval my-model --jobs 2", "`rla eval` has no option --jobs"),
        ("rla trian recipes/tiny.toml", "no command trian"),
        ("make test", None),
        ("make coffee", "no target coffee"),
    ],
)
def test_faults_of_command_lines_are_seen(line, fault):
    assert fault_of(line.split()) == fault


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_paths_exist(page):
    named = [code for code in spans(page) if re.fullmatch(rf"({FOLDERS})/[\w./-]+", code)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_local_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", split(page)[1]):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = DOCS not in page.parents or DOCS in target.parents  # the site has nothing else
        if not target.exists() or not inside or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_method_is_in_the_readme():
    assert [name for name in rla.METHODS if f"`{name}`" not in PAGES[0].read_text()] == []


def test_every_page_is_in_the_site_once():
    yaml = pytest.importorskip("yaml")

    def leaves(tree: Any) -> Iterator[str]:
        if isinstance(tree, str):
            yield tree
        else:
            for item in tree.values() if isinstance(tree, dict) else tree:
                yield from leaves(item)

    listed = sorted(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert listed == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_api_entries_exist():
    for page in (DOCS / "api").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), name):
                pytest.fail(f"{page}: there is no {path}")


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="mkdocs or mkdocstrings is not installed")
def test_the_site_builds_and_needs_no_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    fetched = [
        tag
        for page in tmp_path.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//[^>]*>", page.read_text())
    ]
    assert fetched == []
