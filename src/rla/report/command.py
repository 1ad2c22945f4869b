"""`rla report RUN...`: a page of tables and figures from training runs, evaluations and benchmarks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from .page import Page, Section, slug, write
from .runs import find_runs, read_run


def main(
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    out: Path = Path("report"),
    title: str = "Report",
    best: bool = False,
    baseline: str | None = None,
    paper: bool = True,
) -> int:
    """Put training runs, evaluations and benchmarks side by side, as a web page, Markdown and PNG files.

    Runs that differ in nothing but the seed are grouped: mean, range, and differences between methods at the same seed.

    Example: rla report runs/rdn-0 runs/rdn-1 runs/gdn-0 runs/gdn-1 results/eval/rdn.json --out report

    Args:
        inputs: folders of runs (or folders that hold several), result files of rla eval, CSV files of rla bench.
        out: folder for index.html, report.md and figures/.
        title: of the page.
        best: of each method show only the settings that did best, after a sweep of the learning rate, say.
        baseline: the method to compare all others with. Default: sgla for rla, gdn for rdn, a method for its variants.
        paper: show the paper's own numbers beside evaluations, marked as such.
    """
    try:
        if not inputs:
            raise ValueError("expected at least one run, result file or CSV file; `rla report --help` has an example")
        page = build(inputs, title=title, only_best=best, baseline=baseline, paper=paper)
        path = write(page, out)
    except (ValueError, OSError) as error:
        print(f"rla report: {error}", file=sys.stderr)
        return 2
    print(f"written: {path}, {out / 'report.md'}, {out / 'figures'}")
    return 0


def build(
    inputs: tuple[Path, ...], *, title: str = "Report", only_best: bool = False, baseline: str | None = None, paper: bool = True
) -> Page:
    """The page of these inputs; ValueError that names the one which is none of the kinds."""
    from . import training

    folders: list[Path] = []
    results: list[Path] = []
    tables: list[Path] = []
    for path in dict.fromkeys(inputs):
        if path.is_dir():
            found = find_runs(path)
            if not found:
                raise ValueError(f"{path}: no run in this folder: a run has metrics.jsonl and recipe.json")
            folders += found
        elif not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        elif path.suffix in (".json", ".csv"):
            (results if path.suffix == ".json" else tables).append(path)
        else:
            raise ValueError(f"{path}: expected a run's folder, a .json file of rla eval or a .csv file of rla bench")
    sections: list[Section] = []
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    if baseline is not None and runs and baseline not in {run.mixer for run in runs}:
        known = ", ".join(dict.fromkeys(run.mixer for run in runs))
        raise ValueError(f"--baseline: none of the runs is of {baseline!r}; there are {known}")
    options = [*["--best"] * only_best, *(["--baseline", baseline] if baseline else [])]
    command = shlex.join(["rla", "report", *map(str, inputs), *options])
    sections += training.sections(runs, command=command, only_best=only_best, baseline=baseline)
    if results:
        from .evaluation import sections as of_results

        sections += of_results(results, paper=paper)
    if tables:
        from .benchmarks import section as of_table

        names = [slug(path.parent.name or path.stem) for path in tables]
        for path, name in zip(tables, names, strict=True):
            sections.append(of_table(path, name if names.count(name) == 1 else slug(str(path.with_suffix("")))))
    counted = [(len(runs), "training run"), (len(results), "evaluation"), (len(tables), "benchmark")]
    intro = "Made from " + ", ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in counted if n) + "."
    return Page(title, intro, tuple(sections))
