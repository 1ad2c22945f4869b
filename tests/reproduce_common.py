"""`rla reproduce` at a scale that takes seconds; run as a script, it is a process that can be killed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from rla.eval.needle import Grid
from rla.report.page import Page, write
from rla.reproduce.command import EXPERIMENTS, Work
from rla.reproduce.scales import SCALES, Evaluation, Scale, Study, Timing, seeds
from train_common import recipe

STEPS = 20


def smallest() -> Scale:
    text = recipe(Path(), model__mixer=["rdn"], checkpoint__every=5, data__length=16)
    tasks = {"pairs": [2, 4], "lengths": [16], "vocab_size": 32, "examples": 16}
    pairs = recipe(Path(), model__mixer=["rdn"], checkpoint__every=5, data__path="mqar", data__mqar=tasks)
    language = Study(text, seeds(("gdn", "rdn"), 2), (1e-2, 2e-2))
    return dataclasses.replace(
        SCALES["demo"],
        name="smallest",
        timing=Timing((64, 128), 1, 16, 0.001, positions=(16,), cycle=2, train_lengths=(32, 64), train_tokens=64),
        language=language,
        ablations=dataclasses.replace(language, seeds=seeds(("rdn", "rdn-noclip"), 1)),
        mqar=Study(pairs, seeds(("gdn", "rdn"), 1), (1e-2,)),
        evaluation=Evaluation("needle", Grid(lengths=(512,), depths=2, samples=1)),
    )


def make(folder: Path, names=EXPERIMENTS) -> Page:
    page = Work(smallest(), folder / "runs", 1, ("--scale", "smallest")).page(names)
    write(page, folder / "report")
    return page


if __name__ == "__main__":
    make(Path(sys.argv[1]), ("ablations", "mqar"))
