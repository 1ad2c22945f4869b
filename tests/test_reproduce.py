"""`rla reproduce`: Table 1 in numbers, the rules of verdicts, sections from runs that were made up, and the command line."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import rla
from report_common import STEPS, make_result, make_run
from rla.bench.measure import Quantiles
from rla.bench.ratios import Cell, Results
from rla.bench.workload import Contender, Workload
from rla.eval.mqar import grid
from rla.report.page import Page
from rla.report.runs import group_runs, read_run
from rla.report.stats import Difference
from rla.reproduce import command, recall, studies, table1, timing
from rla.reproduce.claims import Claim, halted, judge, verdict
from rla.reproduce.scales import CORE, SCALES, VARIANTS, Study, seeds
from rla.reproduce.store import Store, facts
from rla.train.cost import training_flops
from rla.train.recipe import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"


def test_table_1_agrees_in_float64():
    rows = table1.measure()
    assert set(rows) >= {"linear", "mamba2", "gla", "deltanet", "gdn", "rla", "rdn"}
    for name, row in rows.items():
        exact = [value for kind, value in row["difference"].items() if kind.endswith("float64")]
        assert len(exact) == 2, name
        assert max(exact) < 1e-12, name
        assert row["largest"] > 0.5
        assert 0.05 < row["share"] < 0.95  # neither term is idle
    section = table1.section(rows, "again")
    assert section.verdicts[0].outcome == "agrees"
    assert len(section.tables[0].rows) == len(rows)


def test_table_1_disagrees_when_a_form_is_wrong(monkeypatch):
    right = table1.written_out

    def wrong(method, x):
        found = right(method, x)
        return dataclasses.replace(found, correction=found.correction * (1 + 1e-6))

    monkeypatch.setattr(table1, "written_out", wrong)
    monkeypatch.setattr(table1, "ROWS", {"gdn": table1.ROWS["gdn"]})
    assert table1.section(table1.measure(), "again").verdicts[0].outcome == "disagrees"


@pytest.mark.parametrize("name", table1.ROWS)
def test_written_out_forms_are_the_op(name):
    """At another seed than the table's; a state's last token alone can't hide an error of the first ones."""
    x = table1.inputs(rla.METHODS[name], seed=7)
    out, _ = rla.attend(**x, method=name, backend="reference")
    torch.testing.assert_close(table1.written_out(rla.METHODS[name], x).output, out[0, :, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mean", "half", "expected", "outcome"),
    [
        (-0.02, 0.01, "lower", "agrees"),
        (-0.02, 0.01, "higher", "disagrees"),
        (0.02, 0.01, "lower", "disagrees"),
        (0.02, 0.01, "higher", "agrees"),
        (-0.02, 0.03, "lower", "not testable at this scale"),
        (-0.02, None, "lower", "not testable at this scale"),
        (0.005, 0.004, "same", "agrees"),  # within 1 % of 2
        (0.015, 0.01, "same", "not testable at this scale"),
        (0.05, 0.01, "same", "disagrees"),
        (-0.05, 0.01, "same", "disagrees"),
        (math.nan, math.nan, "lower", "not testable at this scale"),
    ],
)
def test_rule(mean, half, expected, outcome):
    assert judge(Difference(mean, half, 3, mean / 2), expected, 2.0) == outcome
    assert judge(None, expected) == "not testable at this scale"


def groups(folder):
    return group_runs([read_run(path) for path in sorted(folder.iterdir())])


def test_verdicts_from_runs(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"gdn-{seed}", "gdn", seed, loss=2.0 + 0.1 * seed)
        make_run(tmp_path / f"rdn-{seed}", "rdn", seed, loss=1.9 + 0.1 * seed + 0.001 * (seed == 1))
    make_run(tmp_path / "rla-0", "rla", 0)
    make_run(tmp_path / "sgla-0", "sgla", 0)
    found = groups(tmp_path)
    claim = Claim("RDN is lower.", "rdn", "gdn", "lower", "1 against 2")
    made = verdict(claim, found, "loss", "loss")
    assert (made.outcome, made.paper) == ("agrees", "1 against 2")
    assert "2.0003 against 2.1000, difference -0.0997 (-0.1011 to -0.0982, n = 3)" in made.evidence
    assert verdict(dataclasses.replace(claim, expected="higher"), found, "loss", "loss").outcome == "disagrees"
    one = verdict(Claim("x", "rla", "sgla", "lower"), found, "loss", "loss")
    assert one.outcome == "not testable at this scale"
    assert "one seed" in one.evidence
    assert verdict(Claim("x", "rla", "retnet", "lower"), found, "loss", "loss") is None


@pytest.mark.parametrize(("share", "words"), [(0.999, "too easy"), (0.001, "too hard")])
def test_what_all_or_none_can_do_tells_nothing(tmp_path, share, words):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"gdn-{seed}", "gdn", seed, accuracy={"4x16": share})
        make_run(tmp_path / f"rdn-{seed}", "rdn", seed, accuracy={"4x16": share + 0.0005 + 1e-6 * seed})
    made = verdict(Claim("x", "rdn", "gdn", "higher"), groups(tmp_path), "accuracy", "right", share=True)
    assert made.outcome == "not testable at this scale"
    assert words in made.evidence


def test_a_run_that_the_guard_stopped(tmp_path):
    make_run(tmp_path / "rla", "rla")
    make_run(tmp_path / "bad", "rla-nonorm", steps=4, events=("step 5: loss nan. Stopped (guard.nan or guard.spike is stop)",))
    make_run(tmp_path / "cut", "rla-noclip", steps=4)
    found = groups(tmp_path)
    assert halted(read_run(tmp_path / "bad"))
    assert not halted(read_run(tmp_path / "cut"))
    assert not halted(read_run(tmp_path / "rla"))
    made = verdict(Claim("x", "rla-nonorm", "rla", "higher"), found, "loss", "loss")
    assert made.outcome == "agrees"
    assert "seed 0 after 4 steps" in made.evidence
    assert verdict(Claim("x", "rla-noclip", "rla", "higher"), found, "loss", "loss").outcome == "not testable at this scale"


def norms(folder, factor):
    """Rewrite a run's norms: `factor` times the first at the end."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "probe":
            row["layers"] = [{"output_norm": 1 + (factor - 1) * (row["step"] - 2) / (STEPS - 2)} for _ in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("factor", "count", "outcome"),
    [(40, 1, "agrees"), (3, 3, "disagrees"), (3, 1, "not testable at this scale"), (10, 3, "not testable at this scale")],
)
def test_exploding_norms(tmp_path, factor, count, outcome):
    for seed in range(count):
        norms(make_run(tmp_path / f"rla-{seed}", "rla", seed), 2)
        norms(make_run(tmp_path / f"no-{seed}", "rla-noclip", seed), factor)
    made = studies.exploding("rla-noclip", groups(tmp_path))
    assert made.outcome == outcome
    assert f"{factor:.1f} times" in made.evidence
    assert studies.exploding("rla-nonorm", groups(tmp_path)) is None


class Fake:
    """A trainer that makes up runs: losses by mixer and rate."""

    def __init__(self, folder, losses, accuracy=None):
        self.folder, self.losses, self.accuracy, self.made = folder, losses, accuracy, []

    def __call__(self, recipes, title):
        runs = []
        for recipe in recipes:
            mixer, lr = recipe.model.mixer[0], recipe.optimizer.lr
            folder = self.folder / recipe.name
            if not folder.exists():
                loss = self.losses.get((mixer, lr), self.losses.get(mixer, 2.0)) + 0.01 * recipe.seed
                loss = self.losses.get((mixer, lr, recipe.seed), loss)
                share = None if self.accuracy is None else {"4x32": self.accuracy[mixer] - 0.01 * recipe.seed**2}
                make_run(folder, mixer, recipe.seed, loss=loss, lr=lr, accuracy=share)
                self.made.append((mixer, lr, recipe.seed))
            runs.append(read_run(folder))
        return runs


def test_a_sweep_of_rates_chooses_for_each_method_alike(tmp_path):
    losses = {("gdn", 0.01): 2.0, ("gdn", 0.1): 2.5, ("rdn", 0.01): 2.2, ("rdn", 0.1): 1.9}
    train = Fake(tmp_path, losses)
    study = Study(SCALES["demo"].language.recipe, seeds(("gdn", "rdn"), 3), (0.01, 0.1))
    (section,), trained = studies.language(study, train, "again")
    assert {(run.mixer, run.recipe.optimizer.lr) for run in trained.runs} == {("gdn", 0.01), ("rdn", 0.1)}
    assert len(trained.runs) == 6
    assert len(train.made) == 4 + 2 + 2 * 2  # gdn's best rate has none below it, rdn's has
    (made,) = section.verdicts
    assert made.outcome == "agrees"
    assert made.paper == "16.57 against 17.27, WikiText perplexity"
    assert section.tables[-1].rows == (
        ("gdn", "2.0100 (3 seeds)", "2.5000", "0.01"),
        ("rdn", "2.2100 (3 seeds)", "1.9100 (3 seeds)", "0.1"),
    )
    assert sum("at the edge" in note for note in section.notes) == 2
    assert section.tables[0].rows[0][-1] == "17.27"
    assert float(section.tables[0].rows[1][1]) == pytest.approx(math.exp(1.91), abs=1e-3)


def test_a_sweep_goes_on_beyond_its_edges(tmp_path):
    losses = {("gdn", 0.1): 2.2, ("gdn", 0.2): 2.1, ("gdn", 0.4): 1.9, ("gdn", 0.8): 1.8, ("gdn", 1.6): 1.7}
    losses |= {
        ("rdn", 0.1): 1.9,
        ("rdn", 0.2): 2.0,
        ("rdn", 0.05): 1.95,
        ("sgla", 0.1): 2.0,
        ("sgla", 0.2): 1.9,
        ("sgla", 0.4): 2.0,
    }
    train = Fake(tmp_path, losses)
    study = Study(SCALES["demo"].language.recipe, seeds(("gdn", "rdn", "sgla"), 1), (0.1, 0.2), beyond=2)
    (section,), trained = studies.language(study, train, "again")
    assert {run.mixer: run.recipe.optimizer.lr for run in trained.runs} == {"gdn": 0.8, "rdn": 0.1, "sgla": 0.2}
    assert len(train.made) == 3 * 2 + 3 + 1
    assert section.tables[-1].headers == ("method", "0.05", "0.1", "0.2", "0.4", "0.8", "chosen")
    assert section.tables[-1].rows[1] == ("rdn", "1.9500", "1.9000", "2.0000", "", "", "0.1")
    assert [note for note in section.notes if "at the edge" in note] == [
        "gdn: its best learning rate, 0.8, is at the edge of those tried."
    ]
    with pytest.raises(ValueError, match="rates: expected ascending"):
        dataclasses.replace(study, rates=(0.2, 0.1))


def test_the_rate_that_is_best_for_all_seeds_counts(tmp_path):
    losses = {("rla", 0.1): 2.1, ("rla", 0.2): 2.0, ("rla", 0.4): 2.4}
    unlucky = {("rla", 0.2, 1): 2.6}
    train = Fake(tmp_path, losses | unlucky)
    study = Study(SCALES["demo"].ablations.recipe, seeds(("rla", "rla-tied"), 2), (0.1, 0.2, 0.4))
    _, trained = studies.ablations(study, train, "again")
    assert {(run.mixer, run.recipe.optimizer.lr) for run in trained.runs} == {("rla", 0.1), ("rla-tied", 0.1)}


def test_further_seeds_have_the_chosen_rate_alone(tmp_path):
    train = Fake(tmp_path, {("gdn", 0.1): 2.1, ("gdn", 0.2): 2.0, ("gdn", 0.2, 4): 9.0})
    study = Study(SCALES["demo"].language.recipe, seeds(("gdn",), 5), (0.1, 0.2))
    _, trained = studies.language(study, train, "again")
    assert sorted(train.made) == [("gdn", 0.1, seed) for seed in range(3)] + [("gdn", 0.2, seed) for seed in range(5)]
    assert [(run.recipe.optimizer.lr, run.recipe.seed) for run in trained.runs] == [(0.2, seed) for seed in range(5)]


def test_an_ablation_has_the_rate_of_its_method(tmp_path):
    train = Fake(tmp_path, {("rla", 0.01): 2.5, ("rla", 0.1): 2.0, "rla-tied": 2.1})
    study = Study(SCALES["demo"].ablations.recipe, seeds(("rla", "rla-tied"), 2), (0.01, 0.1))
    _, trained = studies.ablations(study, train, "again")
    swept = [("rla", 0.01, 0), ("rla", 0.1, 0), ("rla", 0.1, 1), ("rla", 0.01, 1)]
    assert train.made == [*swept, ("rla-tied", 0.1, 0), ("rla-tied", 0.1, 1)]
    assert [run.mixer for run in trained.runs] == ["rla", "rla", "rla-tied", "rla-tied"]


def test_sections_of_all_studies_fit_on_one_page(tmp_path):
    scale = SCALES["small"].with_data("books")
    ablations = dataclasses.replace(scale.ablations, rates=(1e-3,))
    made = studies.language(dataclasses.replace(scale.language, rates=(1e-3,)), Fake(tmp_path / "a", {}), "x")[0]
    for name, study in scale.repeats.items():
        made += studies.language(dataclasses.replace(study, rates=(1e-3,)), Fake(tmp_path / name, {"rla": 1.9}), "x", name)[0]
    title = made[0].title
    assert [section.title for section in made] == [title, f"{title}, more steps"]
    assert [section.verdicts[0].claim for section in made] == 2 * ["RLA has a lower perplexity than sGLA."]
    assert [section.verdicts[0].outcome for section in made] == ["not testable at this scale", "agrees"]
    made += studies.ablations(ablations, Fake(tmp_path / "b", {"rla-tied": 2.1}), "y")[0]
    shares = dict.fromkeys(("softmax", *CORE), 0.5) | {"rla": 0.8}
    made += studies.mqar(dataclasses.replace(scale.mqar, rates=(1e-3,)), Fake(tmp_path / "c", {}, shares), "z")[0]
    outcomes = {v.claim: v.outcome for section in made for v in section.verdicts}
    assert outcomes["With gamma tied to beta RLA's validation loss is higher."] == "agrees"
    assert outcomes["RDN is insensitive to clipping."] == "agrees"
    assert outcomes["RLA recalls more than sGLA."] == "agrees"
    assert len(outcomes) == 2 + 3 + 11 + 2
    Page("x", "y", tuple(made))  # figures' names must differ


def test_nothing_trained_yet(tmp_path):
    (section,), trained = studies.language(SCALES["demo"].language, studies.reader(tmp_path), "again")
    assert section.body == ("No run has been finished yet.",)
    assert trained.runs == ()
    assert "No model" in recall.sections({})[0].body[0]


def test_tables_of_needles_have_the_first_seeds(tmp_path):
    found = {}
    for mixer in ("gdn", "rdn"):
        for seed in (0, 1):
            path = tmp_path / f"{mixer}-{seed}.json"
            grid = [{"length": 512, "depth": 0.5, "acc": 0.1 * seed, "samples": 5}]
            result = make_result(f"{mixer}, seed {seed}", {"needle": {"acc": 0.5 * seed}})
            result["tasks"]["needle"]["grid"] = grid
            path.write_text(json.dumps(result))
            found[path] = read_run(make_run(tmp_path / path.stem, mixer, seed))
    first, last = recall.sections(found)
    assert [row[0] for row in first.tables[0].rows] == ["gdn, seed 0", "rdn, seed 0"]
    assert last.body[-1] == "Tables and figures have each method's first seed; verdicts count all, 4 models."
    assert "n = 2" in last.verdicts[0].evidence


def test_needles():
    scores = {"sgla": {0: 0.5, 1: 0.52, 2: 0.48}, "rla": {0: 0.7, 1: 0.73, 2: 0.68}, "gdn": {0: 0.0}, "rdn": {0: 0.01}}
    first, second = recall.needle_verdicts(scores)
    assert (first.outcome, first.paper) == ("agrees", "83.6 against 76.6")
    assert second.outcome == "not testable at this scale"
    assert "next to none" in second.evidence
    assert recall.needle_verdicts({"rla": {0: 0.5}}) == []


def results(times):
    found = Results(Workload(1, 1, 8, "float32", "cpu", 1), {}, {})
    for (method, by, T), seconds in times.items():
        found.times[Cell(Contender(method, by), T, "forward")] = Quantiles(0.9 * seconds, seconds, 1.1 * seconds, 3)
    return found


def test_kernel_verdicts():
    fast = {("rla", "native", 10): 1.0, ("rla", "native", 100): 11.0, ("softmax", "sdpa", 100): 30.0}
    linear, faster = timing.kernel_verdicts(results(fast))
    assert (linear.outcome, faster.outcome) == ("agrees", "agrees")
    assert "1.10 times as long" in linear.evidence
    slow = {("rla", "native", 10): 1.0, ("rla", "native", 100): 50.0, ("softmax", "sdpa", 100): 30.0}
    assert [v.outcome for v in timing.kernel_verdicts(results(slow))] == ["disagrees", "disagrees"]
    noisy = fast | {("rla", "native", 100): 13.0}  # the ends of the ranges are within the rule
    assert timing.kernel_verdicts(results(noisy))[0].outcome == "not testable at this scale"
    close = fast | {("softmax", "sdpa", 100): 11.5}
    assert timing.kernel_verdicts(results(close))[1].outcome == "not testable at this scale"
    assert timing.kernel_verdicts(results({("rla", "native", 10): 1.0})) == []


def test_commands_say_what_was_measured():
    given = timing.options(SCALES["demo"].timing)
    assert set(given) == {"kernels", "decode", "train"}
    line = timing.command("kernels", given["kernels"])
    assert "--lengths 1024 2048 4096 8192" in line
    assert "--no-memory" in line
    assert "--seconds 0.2" in line


def test_an_interrupted_benchmark_is_no_result(tmp_path, monkeypatch):
    import os
    import signal

    def interrupted(**given):
        (given["out"] / "kernels.csv").write_text("half")
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return 0
        return 0

    monkeypatch.setattr(timing.kernels, "main", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    work = command.Work(SCALES["demo"], tmp_path, 1, ())
    with pytest.raises(KeyboardInterrupt):
        work.kernels()
    assert signal.getsignal(signal.SIGINT) is handler
    assert not list(tmp_path.glob("kernels-*"))


def test_a_failed_benchmark_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.kernels, "main", lambda **given: print("why") or 1)
    with pytest.raises(timing.MeasureError, match=r"rla bench kernels.*exit code 1\. why"):
        command.Work(SCALES["demo"], tmp_path, 1, ()).kernels()


def test_the_store_makes_each_thing_once(tmp_path):
    store, calls = Store(tmp_path), []

    def make(folder):
        calls.append(folder)
        (folder / "x").write_text("1")

    first = store.files("x", {"a": 1}, make)
    assert store.files("x", {"a": 1}, make) == first
    assert store.files("x", {"a": 2}, make) != first
    assert len(calls) == 2

    def fails(folder):
        (folder / "half").write_text("1")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        store.files("x", {"a": 3}, fails)
    assert not (store.files("x", {"a": 3}, make) / "half").exists()


def test_facts_are_those_of_the_records():
    one = {"machine": "A", "torch": "2.13.0", "threads": 1, "date": "2026-11-16T00:00:00+00:00", "onnxruntime": ""}
    assert facts([one, one]) == {"machine": "A", "threads": "1", "torch": "2.13.0", "measured": "2026-11-16"}
    other = facts([one, {**one, "machine": "B", "date": "2026-11-18T00:00:00+00:00"}])
    assert (other["machine"], other["measured"]) == ("A; B", "2026-11-16 to 2026-11-18")


def test_the_paper_scale_has_the_paper_recipe():
    file = load_recipe(RECIPES / "paper-1.5b.toml")
    ours = SCALES["paper"].with_data(file.data.path).language
    assert dataclasses.replace(ours.recipe, model=dataclasses.replace(ours.recipe.model, mixer=("rdn",))) == file
    assert set(ours.seeds) == {"softmax", "retnet", "mamba2", "sgla", "gdn", "rla", "rdn"}
    assert ours.rates == (file.optimizer.lr,)
    assert SCALES["paper"].ablations.recipe.schedule.total_tokens == 50_000_000_000


def test_every_ablation_is_a_method():
    assert set(VARIANTS) <= set(rla.METHODS)
    assert {name for name in rla.METHODS if "-" in name} == set(VARIANTS)


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_recipes_are_sound_and_differ(scale):
    for study in command.needed(scale.with_data("builtin"), command.EXPERIMENTS).values():
        recipes = studies.first_recipes(study)
        assert len({recipe.name for recipe in recipes}) == len(recipes)
        for recipe in recipes:
            recipe.model.config(256)
            assert recipe.schedule == study.recipe.schedule
            assert recipe.data == study.recipe.data


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_every_method_of_a_study_can_be_trained(scale):
    """What training asks of a method beside its layer, for names with a threshold too."""
    for study in command.needed(scale.with_data("builtin"), command.EXPERIMENTS).values():
        for recipe in grid(study.recipe, list(study.seeds), [], [], []):
            config = recipe.model.config(256)
            flops = training_flops(config, recipe.length)
            assert set(flops) == {"projections", "op", "mlp", "head"}
            assert min(flops.values()) > 0


def test_text_is_asked_for(tmp_path, capsys):
    assert command.main(("language",), scale="small", runs=tmp_path) == 2
    assert "--data: the scale small trains on text of your own" in capsys.readouterr().err
    assert command.main(("language",), scale="small", data=tmp_path / "none", runs=tmp_path) == 2
    assert "--data: no folder" in capsys.readouterr().err
    assert command.main(("table1",), jobs=-1, runs=tmp_path) == 2
    assert "--jobs: expected 1 or more" in capsys.readouterr().err


def test_runs_can_be_listed(tmp_path, capsys):
    assert command.main(("language", "mqar"), scale="paper", data=tmp_path, runs=tmp_path / "runs", list_runs=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 + 5 * 3  # MQAR's rates are tried with one seed first
    first = Path(lines[0].split("rla train ")[1])
    recipe = load_recipe(first)
    assert recipe.model.mixer == ("softmax",)
    assert recipe.folder == first.with_suffix("")
    assert not studies.settled(recipe)


def test_the_command_writes_the_page_and_the_same_again(tmp_path, capsys):
    out = tmp_path / "report"
    assert command.main(("table1",), runs=tmp_path / "runs", out=out, show=False) == 0
    assert "agrees" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "Table 1: prediction and correction" in (out / "report.md").read_text()
    assert command.main(("table1",), runs=tmp_path / "runs", out=out, show=False) == 0
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
