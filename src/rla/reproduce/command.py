"""`rla reproduce`: run the paper's experiments at a scale, and write the page of what was seen.

Runs and measurements are cached by content under --runs: a second call computes nothing and writes the same page, one that was
interrupted goes on.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from ..data.writer import write_durably
from ..report.page import Page, Section, write
from ..train.sweep import SweepError, place
from . import recall, studies, table1, timing
from .scales import SCALES, Scale, Study
from .store import Store, facts
from .timing import MeasureError

Experiment = Literal["table1", "kernels", "language", "recall", "ablations", "mqar"]
EXPERIMENTS: tuple[Experiment, ...] = ("table1", "kernels", "language", "recall", "ablations", "mqar")
NEEDS_TEXT = ("language", "recall", "ablations")


def main(
    experiments: Annotated[tuple[Literal[Experiment, "all"], ...], tyro.conf.Positional] = ("all",),
    *,
    scale: Literal["demo", "small", "paper"] = "demo",
    data: Path | None = None,
    eval_data: Path | None = None,
    jobs: int = 0,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("report"),
    list_runs: bool = False,
    found_only: bool = False,
    show: bool = True,
) -> int:
    """Test the paper's claims at the scale you have, and write one page with a verdict on each.

    The same command goes on where it was stopped; when all is done it computes nothing anew and writes the same page.

    Example: rla reproduce all --scale demo

    Args:
        experiments: which of the paper's: table1, kernels, language, recall, ablations, mqar; all of them.
        scale: demo (minutes on two cores), small (days, on text of your own), paper (GPUs).
        data: folder of rla prepare with the text to train on. Needed for small and paper; demo has its own.
        eval_data: folder with files of the evaluations' data, to be used instead of the hub (scale paper).
        jobs: runs at a time; they share the cores. Default: one for each core, or one where there is a GPU.
        runs: folder of the runs and measurements.
        out: folder of the page.
        list_runs: write the recipes into their places and print a command for each, to be run by torchrun or a scheduler.
        found_only: train nothing; make the page of what has been trained.
        show: open the page in a browser, where there is a display.
    """
    names = EXPERIMENTS if "all" in experiments or not experiments else tuple(e for e in EXPERIMENTS if e in experiments)
    try:
        chosen = with_text(SCALES[scale], data, names)
        if jobs < 0:
            raise ValueError(f"--jobs: expected 1 or more, or 0 for as many as suit the machine; got {jobs}")
        if list_runs:
            return print_runs(chosen, names, runs / chosen.name)
        given = {"--scale": scale, "--data": data, "--eval-data": eval_data}
        options = [word for key, value in given.items() if value is not None for word in (key, str(value))]
        work = Work(chosen, runs / chosen.name, jobs or default_jobs(), options, found_only, eval_data)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            work.train(names)
            return 0
        page = work.page(names)
        path = write(page, out)
    except (ValueError, OSError, SweepError, MeasureError) as error:
        print(f"rla reproduce: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rla reproduce: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    for section, verdict in page.verdicts:
        print(f"{verdict.outcome:<26}  {verdict.claim}  [{section.title}]")
    print(f"written: {path}")
    if show:
        open_page(path)
    return 0


def with_text(scale: Scale, data: Path | None, names: Sequence[str]) -> Scale:
    """The scale on this text; ValueError where it needs some and has none."""
    if data is not None:
        if not data.is_dir():
            raise ValueError(f"--data: no folder {str(data)!r}; `rla prepare` makes one from text")
        return scale.with_data(str(data))
    if not scale.language.recipe.data.path and any(name in NEEDS_TEXT for name in names):
        raise ValueError(
            f"--data: the scale {scale.name} trains on text of your own; expected a folder made by `rla prepare BOOKS "
            "--tokenizer TOKENIZER --validation 0.05 --out FOLDER`"
        )
    return scale


def default_jobs() -> int:
    import torch

    return 1 if torch.cuda.is_available() else max(1, torch.get_num_threads())


def needed(scale: Scale, names: Sequence[str]) -> dict[str, Study]:
    """The studies that these experiments are made of."""
    found = {}
    if "language" in names or "recall" in names:
        found["language"] = scale.language
    if "language" in names:
        found |= scale.repeats
    if "ablations" in names:
        found["ablations"] = scale.ablations
    if "mqar" in names:
        found["mqar"] = scale.mqar
    return found


def print_runs(scale: Scale, names: Sequence[str], folder: Path) -> int:
    """Recipes beside the folders of their runs, and the command for each; with a sweep of the rates, its runs come first."""
    placed = {}
    for study in needed(scale, names).values():
        for recipe in studies.first_recipes(study):
            placed[place(recipe, folder).out] = place(recipe, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in placed.values():
        path = Path(f"{recipe.folder}.json")
        write_durably(path, json.dumps(recipe.to_dict(), indent=1) + "\n")
        state = "done" if studies.settled(recipe) else "to do"
        print(f"{state:<6}  rla train {path}")
    return 0


def open_page(path: Path) -> None:
    """In a browser, if somebody sits at a screen."""
    import webbrowser

    seen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform in ("darwin", "win32")
    if seen and sys.stdout.isatty():
        webbrowser.open(path.resolve().as_uri())


@dataclass
class Work:
    """One call: what has been done so far, and the records of the machines it was done on."""

    scale: Scale
    folder: Path
    jobs: int
    options: Sequence[str]  # of the command line that does it again
    found_only: bool = False
    eval_data: Path | None = None
    records: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store(self.folder)
        self._train = studies.reader(self.folder) if self.found_only else studies.trainer(self.folder, self.jobs)
        self._language: tuple[list[Section], studies.Trained] | None = None
        self._counter = ""
        self.console = Console(stderr=True, highlight=False)

    def train(self, names: Sequence[str]) -> None:
        """The runs alone, for processes of torchrun that do it together."""
        for name, study in needed(self.scale, names).items():
            studies.run_study(study, self._train, name)

    def page(self, names: Sequence[Experiment]) -> Page:
        sections: list[Section] = []
        for i, name in enumerate(names):
            self._counter = f"{i + 1}/{len(names)}"
            self.console.print(f"{self._counter} {name}", style="bold")
            sections += getattr(self, name)()
        words = (
            f"The paper's claims, tested at the scale `{self.scale.name}`: {self.scale.words}. A verdict says what was seen "
            "here, by a rule that its section states; what is not testable at this scale is neither confirmed nor refuted."
        )
        title = "Residual linear attention: the paper's claims, tested"
        return Page(title, words, tuple(sections), facts(self.records))

    @contextmanager
    def say(self, text: str) -> Iterator[None]:
        """What goes on, with a sign of life on a terminal."""
        if not self.console.is_terminal:
            self.console.print(f"{self._counter} {text}", markup=False, soft_wrap=True)
        with self.console.status(f"{self._counter} {text}"):
            yield

    def again(self, name: Experiment) -> str:
        return shlex.join(["rla", "reproduce", name, *self.options])

    def table1(self) -> list[Section]:
        return [table1.section(table1.kept(self.store), self.again("table1"))]

    def kernels(self) -> list[Section]:
        paths = timing.measure(self.scale.timing, self.store, self.say)
        self.records += timing.records(paths)
        return timing.sections(paths, self.scale.timing)

    def _trained(self, made: tuple[list[Section], studies.Trained]) -> list[Section]:
        self.records += [row for run in made[1].runs for row in run.of("start")]
        return made[0]

    def _models(self) -> tuple[list[Section], studies.Trained]:
        """The language study, which the evaluations need too."""
        if self._language is None:
            self._language = studies.language(self.scale.language, self._train, self.again("language"))
        return self._language

    def language(self) -> list[Section]:
        sections = self._trained(self._models())
        for name, study in self.scale.repeats.items():
            sections = [*sections, *self._trained(studies.language(study, self._train, self.again("language"), name))]
        return sections

    def recall(self) -> list[Section]:
        made = self._models()
        self._trained(made)
        found = recall.evaluate(made[1].runs, self.scale.evaluation, self.store, self.say, self.eval_data)
        return recall.sections(found)

    def ablations(self) -> list[Section]:
        return self._trained(studies.ablations(self.scale.ablations, self._train, self.again("ablations")))

    def mqar(self) -> list[Section]:
        return self._trained(studies.mqar(self.scale.mqar, self._train, self.again("mqar")))
