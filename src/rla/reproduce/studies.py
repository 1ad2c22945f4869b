"""Training experiments: language modelling, ablations, MQAR. A study becomes runs, runs become a section with verdicts."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..eval.mqar import grid
from ..eval.results import paper_numbers
from ..report import training
from ..report.page import Section, Table, Verdict
from ..report.runs import Group, Run, best, group_runs, read_run
from ..train.guard import Halt
from ..train.metrics import read_metrics
from ..train.recipe import Recipe
from ..train.sweep import SweepError, finished, place, sweep
from .claims import RULE, UNTESTABLE, Claim, halted, verdict
from .scales import Study

FINAL = 3  # seeds that decide between a method's last two learning rates
EXPLODED = 10.0  # times the norm of the full method's output
PAPER_NAMES = {
    "softmax": "Transformer",
    "retnet": "RetNet",
    "mamba2": "Mamba2",
    "sgla": "sGLA",
    "gdn": "GDN",
    "rla": "RLA",
    "rdn": "RDN",
}
Train = Callable[[Sequence[Recipe], str], list[Run]]


@dataclass(frozen=True)
class Trained:
    """The runs that count, all of a method with one learning rate, and those of the sweep that chose it."""

    runs: tuple[Run, ...]
    tried: tuple[Run, ...]

    @property
    def groups(self) -> list[Group]:
        return group_runs(self.runs)


def trainer(folder: Path, jobs: int) -> Train:
    """Trains what is not finished in `folder`, and reads all; a run that the guard stopped is left as it is.

    Under torchrun every process trains along, one run after another.
    """

    def train(recipes: Sequence[Recipe], title: str) -> list[Run]:
        placed = [place(recipe, folder) for recipe in recipes]
        todo = [recipe for recipe in placed if not settled(recipe)]
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from ..train.loop import train as train_here

            for recipe in todo:
                with suppress(Halt):
                    train_here(recipe)
        else:
            try:
                sweep(todo, folder, jobs=jobs, title=title)
            except SweepError:
                if not all(map(settled, todo)):
                    raise
        return [read_run(recipe.folder) for recipe in placed]

    return train


def reader(folder: Path) -> Train:
    """Reads what has been trained, and trains nothing."""

    def train(recipes: Sequence[Recipe], title: str) -> list[Run]:
        placed = [place(recipe, folder) for recipe in recipes]
        return [read_run(recipe.folder) for recipe in placed if settled(recipe)]

    return train


def settled(recipe: Recipe) -> bool:
    """Whether there is nothing left to do: it is finished, or has been stopped by the guard."""
    if finished(recipe):
        return True
    return bool(read_metrics(recipe.folder)) and halted(read_run(recipe.folder))


def first_recipes(study: Study) -> list[Recipe]:
    """What can be trained at once: with one learning rate all, otherwise the sweep."""
    found = []
    for method, seeds in study.seeds.items():
        if len(study.rates) == 1:
            found += grid(study.recipe, [method], study.rates, seeds, ())
        elif study.parent(method) == method:
            found += grid(study.recipe, [method], study.rates, seeds[:1], ())
    return found


def run_study(study: Study, train: Train, title: str) -> Trained:
    """The runs of a study; with several learning rates a sweep goes before them.

    A method's first seed tries all rates. Its best, and the next lower one, for what is best with one seed is often too high
    for another, are trained with FINAL seeds, and that of the better mean with all. Ablations have the rate of their method.
    """
    if len(study.rates) == 1:
        return Trained(tuple(train(first_recipes(study), title)), ())
    tried = train(first_recipes(study), f"{title}, learning rates")
    for _ in range(study.beyond):
        further = [
            recipe
            for method, rate in chosen_rates(tried).items()
            if (next_rate := beyond(rate, rates_of(method, tried))) is not None
            for recipe in grid(study.recipe, [method], [next_rate], study.seeds[method][:1], ())
        ]
        tried += train(further, f"{title}, further learning rates") if further else []
    finalists = []
    for method, rate in chosen_rates(tried).items():
        lower = [r for r in rates_of(method, tried) if r < rate][-1:]
        finalists += grid(study.recipe, [method], [rate, *lower], study.seeds[method][:FINAL], ())
    final = train(finalists, f"{title}, best learning rates")
    chosen = chosen_rates(final)
    recipes = [
        recipe
        for method, seeds in study.seeds.items()
        if (parent := study.parent(method)) in chosen
        for recipe in grid(study.recipe, [method], [chosen[parent]], seeds, ())
    ]
    swept = {run.folder: run for run in (*tried, *final)}
    return Trained(tuple(train(recipes, title)), tuple(swept.values()))


def chosen_rates(tried: Sequence[Run]) -> dict[str, float]:
    """Each method's best learning rate, of those with the most seeds."""
    groups = group_runs(tried)
    most = {group.mixer: max(len(g.whole) for g in groups if g.mixer == group.mixer) for group in groups}
    finished = [group for group in groups if len(group.whole) == most[group.mixer]]
    return {group.mixer: group.settings["optimizer.lr"] for group in best(finished)}


def rates_of(method: str, tried: Sequence[Run]) -> list[float]:
    return sorted({run.recipe.optimizer.lr for run in tried if run.mixer == method})


def beyond(rate: float, rates: Sequence[float]) -> float | None:
    """The next rate outwards, if `rate` is the first or the last of `rates`."""
    if len(rates) < 2 or rate not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if rate == rates[0] else rates[-2]
    return float(f"{rate * rate / neighbour:.6g}")


def language(study: Study, train: Train, command: str, study_name: str = "language") -> tuple[list[Section], Trained]:
    """`study_name`: "language", or what differs when it is asked again, as in "more-steps"."""
    trained = run_study(study, train, study_name)
    groups, printed = trained.groups, paper_numbers()["2"]["models"]
    claims = []
    for ours, theirs in (("rla", "sgla"), ("rdn", "gdn")):
        names = PAPER_NAMES[ours], PAPER_NAMES[theirs]
        text = f"{names[0]} has a lower perplexity than {names[1]}."
        claims.append(Claim(text, ours, theirs, "lower", _against(printed, *names, "WikiText perplexity")))
    for theirs in ("retnet", "mamba2", "softmax"):
        name = PAPER_NAMES[theirs]
        text = f"RDN has a lower perplexity than {'the ' * (theirs == 'softmax')}{name}."
        claims.append(Claim(text, "rdn", theirs, "lower", _against(printed, "RDN", name, "WikiText perplexity")))
    verdicts = [v for claim in claims if (v := verdict(claim, groups, "loss", "validation loss")) is not None]
    rows = []
    for group in groups:
        loss, bits = group.spread("loss"), group.spread("bits_per_byte")
        if loss is not None and bits is not None:
            paper = f"{printed[PAPER_NAMES[group.mixer]][0]:.2f}" if group.mixer in PAPER_NAMES else ""
            rows.append((group.label, f"{math.exp(loss.mean):.3f}", bits.show(".4f"), paper))
    headers = ("method", "perplexity per token", "bits per byte", "the paper's WikiText perplexity, 1.5B")
    table = Table("Perplexity, and what the paper has of its models (another text, another size)", headers, tuple(rows))
    section = _section(trained, study_name, command, verdicts, extra=(table,))
    if study_name != "language" and trained.runs:
        section = dataclasses.replace(section, title=f"{section.title}, {study_name.replace('-', ' ')}")
    return [section], trained


def ablations(study: Study, train: Train, command: str) -> tuple[list[Section], Trained]:
    trained = run_study(study, train, "ablations")
    groups, printed = trained.groups, paper_numbers()
    fit, plain = printed["4"]["training_loss"], printed["5"]["models"]
    without = "RLA w/o fitting"
    claims = [
        (
            Claim(
                "Without residual fitting RLA's training loss is higher.",
                "rla-nofit",
                "rla",
                "higher",
                f"{fit[without]} against {fit['RLA']}",
            ),
            "train_loss",
        ),
        (
            Claim(
                "Without residual fitting RLA's perplexity is higher.",
                "rla-nofit",
                "rla",
                "higher",
                _against(printed["4"]["models"], without, "RLA", "WikiText perplexity"),
            ),
            "loss",
        ),
        (Claim("With gamma tied to beta RLA's validation loss is higher.", "rla-tied", "rla", "higher", "Figure 3"), "loss"),
        (Claim("With gamma tied to beta RDN's validation loss is higher.", "rdn-tied", "rdn", "higher", "Figure 3"), "loss"),
        (Claim("RDN with a plain sum does slightly worse.", "rdn-sum", "rdn", "higher", _average(plain, "RDN")), "loss"),
        (Claim("RLA with a plain sum does slightly better.", "rla-sum", "rla", "lower", _average(plain, "RLA")), "loss"),
        (Claim("Without clipping RLA's training loss is higher.", "rla-noclip", "rla", "higher", "Figure 4"), "train_loss"),
        (
            Claim("Without normalisation RLA's training loss is higher.", "rla-nonorm", "rla", "higher", "Figure 4"),
            "train_loss",
        ),
        (Claim("RDN is insensitive to clipping.", "rdn-noclip", "rdn", "same", "Figure 4"), "train_loss"),
    ]
    words = {"loss": "validation loss", "train_loss": "training loss"}
    verdicts = [v for claim, key in claims if (v := verdict(claim, groups, key, words[key])) is not None]
    verdicts += [v for name in ("rla-noclip", "rla-nonorm") if (v := exploding(name, groups)) is not None]
    notes = (
        "Norms are compared by their growth: the largest of training over that after the first step. They explode when they "
        f"grow {EXPLODED:.0f} times as much as RLA's, and don't when three seeds or more grow less than twice as much.",
        "The paper judges the plain sum by accuracy on benchmarks; here it is judged by validation loss.",
        "log-cosh is not in the paper's experiments; its differences are in the table, without a claim.",
    )
    return [_section(trained, "ablations", command, verdicts, title="Ablations", notes=notes)], trained


def exploding(name: str, groups: Sequence[Group]) -> Verdict | None:
    """Whether the output norms of a variant of RLA grow without bound beside RLA's."""
    variant, base = (next((g for g in groups if g.mixer == mixer), None) for mixer in (name, "rla"))
    if variant is None or base is None:
        return None
    ours, theirs = growth(variant), growth(base)
    removed = {"rla-noclip": "clipping", "rla-nonorm": "normalisation"}[name]
    claim = f"Without {removed} the norms of RLA's attention output explode."
    if ours is None or theirs is None:
        return Verdict(claim, UNTESTABLE, "norms were not recorded.", "Figure 4")
    evidence = f"they grow to {ours:.1f} times their first value, those of RLA to {theirs:.1f} times."
    if ours >= EXPLODED * theirs:
        return Verdict(claim, "agrees", evidence, "Figure 4")
    enough = min(len(variant.whole), len(base.whole)) >= 3 and ours < 2 * theirs
    return Verdict(claim, "disagrees" if enough else UNTESTABLE, evidence, "Figure 4")


def growth(group: Group) -> float | None:
    """The largest norm of a layer's output over that after its first step; the layer that grows most, mean over seeds."""
    values = []
    for run in group.runs.values():
        rows = [row["layers"] for row in run.of("probe")]
        if rows:
            layers = range(len(rows[0]))
            values.append(max(max(row[i]["output_norm"] for row in rows) / rows[0][i]["output_norm"] for i in layers))
    return sum(values) / len(values) if values else None


def mqar(study: Study, train: Train, command: str) -> tuple[list[Section], Trained]:
    trained = run_study(study, train, "mqar")
    printed = paper_numbers()["3"]["models"]
    verdicts = []
    for ours, theirs in (("rla", "sgla"), ("rdn", "gdn")):
        names = PAPER_NAMES[ours], PAPER_NAMES[theirs]
        paper = f"{printed[names[0]][-1]} against {printed[names[1]][-1]}, mean of recall benchmarks"
        claim = Claim(f"{names[0]} recalls more than {names[1]}.", ours, theirs, "higher", paper)
        found = verdict(claim, trained.groups, "accuracy", "right answers in per cent", share=True)
        verdicts += [found] if found is not None else []
    notes = ("MQAR is not in the paper; its recall benchmarks ask for text that a model of this size can't read.",)
    return [_section(trained, "mqar", command, verdicts, notes=notes)], trained


def _section(
    trained: Trained,
    prefix: str,
    command: str,
    verdicts: Sequence[Verdict],
    *,
    title: str | None = None,
    extra: tuple[Table, ...] = (),
    notes: tuple[str, ...] = (),
) -> Section:
    """The report's section on the runs, with verdicts, figures named after the experiment, and the sweep of the rates."""
    if not trained.runs:
        return Section(title or prefix.replace("-", " ").capitalize(), ("No run has been finished yet.",), commands=(command,))
    (made,) = training.sections(trained.runs, command=command)
    body, tables = [*made.body], [*extra, *made.tables]
    if trained.tried:
        table, edge = _rates(trained)
        tables.append(table)
        notes = (*notes, *edge)
        body.append(
            "Each method's first seed tried the same learning rates; its best and the next lower one were trained with up to "
            f"{FINAL} seeds, and that of the better mean with all."
        )
    if verdicts:
        body.append(RULE)
    figures = tuple(dataclasses.replace(figure, name=f"{prefix}-{figure.name}") for figure in made.figures)
    return dataclasses.replace(
        made,
        title=title or made.title,
        body=tuple(body),
        verdicts=tuple(verdicts),
        figures=figures,
        tables=tuple(tables),
        notes=(*notes, *made.notes),
    )


def _rates(trained: Trained) -> tuple[Table, list[str]]:
    """The sweep as a table, and a note on each method whose best rate is the first or the last tried."""
    recall = trained.tried[0].is_recall
    key, form, scale = ("accuracy", ".1f", 100) if recall else ("loss", ".4f", 1)
    rates = sorted({run.recipe.optimizer.lr for run in trained.tried})
    chosen = {run.mixer: run.recipe.optimizer.lr for run in trained.runs}
    groups = {(group.mixer, group.settings["optimizer.lr"]): group for group in group_runs(trained.tried)}
    rows, notes = [], []
    for mixer in dict.fromkeys(run.mixer for run in trained.tried):
        cells = []
        for rate in rates:
            group = groups.get((mixer, rate))
            spread = None if group is None else group.spread(key)
            if group is None or spread is None:
                cells.append("" if group is None else "stopped")
            else:
                seeds = f" ({len(group.whole)} seeds)" if len(group.whole) > 1 else ""
                cells.append(f"{scale * spread.mean:{form}}{seeds}")
        rows.append((mixer, *cells, f"{chosen[mixer]:g}"))
        if beyond(chosen[mixer], rates_of(mixer, trained.tried)) is not None:
            notes.append(f"{mixer}: its best learning rate, {chosen[mixer]:g}, is at the edge of those tried.")
    what = "right answers in per cent" if recall else "validation loss"
    return Table(
        f"{what[0].upper()}{what[1:]} by learning rate", ("method", *(f"{r:g}" for r in rates), "chosen"), tuple(rows)
    ), notes


def _against(printed: dict[str, list[float]], ours: str, theirs: str, what: str) -> str:
    return f"{printed[ours][0]:.2f} against {printed[theirs][0]:.2f}, {what}"


def _average(printed: dict[str, list[float]], name: str) -> str:
    return f"{printed[f'{name}, plain sum'][-1]:.2f} against {printed[name][-1]:.2f}, mean accuracy"
