"""`rla report` on training runs: groups, spread, paired differences, figures, the command and what it says to bad input."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from report_common import STEPS, make_run
from rla.report import figures, training
from rla.report.command import build, main
from rla.report.runs import best, difference, find_runs, group_runs, pairs, read_run
from rla.report.stats import Difference, Spread, paired, smooth, t_quantile

LOSSES = {"gdn": (2.10, 2.20, 2.15), "rdn": (2.00, 2.14, 2.06)}


@pytest.fixture
def folder(tmp_path):
    """Two methods, three seeds."""
    for mixer, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            make_run(tmp_path / "runs" / f"{mixer}-{seed}", mixer, seed, loss=loss)
    return tmp_path / "runs"


def groups_of(folder):
    return group_runs([read_run(path) for path in find_runs(folder)])


@pytest.mark.parametrize(
    ("confidence", "degrees", "t"),  # from the tables in statistics books
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 10, 2.228),
        (0.99, 4, 4.604),
        (0.9, 7, 1.895),
        (0.95, 120, 1.980),
    ],
)
def test_t_quantile(confidence, degrees, t):
    assert t_quantile(confidence, degrees) == pytest.approx(t, abs=6e-4)


def test_paired_difference_takes_common_seeds():
    found = paired({0: 2.0, 1: 2.14, 2: 2.06, 7: 9.0}, {0: 2.1, 1: 2.2, 2: 2.15, 8: 1.0})
    differences = [-0.10, -0.06, -0.09]
    half = 4.30265 * statistics.stdev(differences) / math.sqrt(3)
    assert found is not None
    assert (found.n, found.mean) == (3, pytest.approx(statistics.fmean(differences)))
    assert found.half == pytest.approx(half, rel=1e-5)
    assert found.relative == pytest.approx(statistics.fmean(differences) / 2.15)
    assert found.is_clear
    assert paired({0: 1.0}, {1: 1.0}) is None
    single = paired({0: 1.0}, {0: 2.0})
    assert single == Difference(-1.0, None, 1, -0.5)
    assert not single.is_clear
    assert not paired({0: 1.0, 1: 3.0}, {0: 2.0, 1: 2.0}).is_clear


def test_smooth_weighs_the_first_values_as_the_others():
    assert smooth([3.0] * 5, 4) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 2) == pytest.approx([1.0, (0.5 * 1 + 2) / 1.5])
    assert smooth([1.0, 5.0, 2.0], 1) == [1.0, 5.0, 2.0]


def test_runs_that_differ_in_the_seed_are_grouped(folder):
    gdn, rdn = groups_of(folder)
    assert (gdn.label, rdn.label) == ("gdn", "rdn")
    assert list(gdn.runs) == [0, 1, 2]
    assert rdn.spread("loss") == Spread(pytest.approx(statistics.fmean(LOSSES["rdn"])), 2.0, 2.14, 3)
    found = difference(rdn, gdn, "loss")
    assert found.mean == pytest.approx(-(0.10 + 0.06 + 0.09) / 3)
    assert gdn.curve("evaluation", "loss")[STEPS].mean == pytest.approx(2.15)
    assert gdn.curve("train", "loss")[1].high == pytest.approx(2.2 + 2.7 + 0.1)


def test_labels_say_what_differs_and_best_takes_the_best(tmp_path):
    for lr, loss in ((1e-3, 2.0), (4e-3, 1.9), (1e-2, 2.3)):
        make_run(tmp_path / f"rdn-{lr}", "rdn", lr=lr, loss=loss)
    make_run(tmp_path / "gdn", "gdn", lr=4e-3, loss=1.95)
    groups = groups_of(tmp_path)
    assert [group.label for group in groups] == ["gdn", "rdn, lr 0.001", "rdn, lr 0.004", "rdn, lr 0.01"]
    assert [group.label for group in best(groups)] == ["gdn", "rdn, lr 0.004"]
    # a baseline with one set of settings serves all; of several, the equal one
    assert [(a.label, b.label) for a, b in pairs(groups)] == [(group.label, "gdn") for group in groups[1:]]
    (section,) = build((tmp_path,), only_best=True).sections
    assert "groups in the method and in optimizer.lr and optimizer.min_lr" in section.body[0]
    assert len(section.tables[0].rows) == 4
    assert [row[0] for row in section.tables[1].rows] == ["rdn, lr 0.004 less gdn"] * 2
    make_run(tmp_path / "gdn-2", "gdn", lr=1e-2, loss=2.2)
    compared = [(a.label, b.label) for a, b in pairs(groups_of(tmp_path))]
    assert compared == [("rdn, lr 0.004", "gdn, lr 0.004"), ("rdn, lr 0.01", "gdn, lr 0.01")]


def test_what_is_compared_with_what(tmp_path):
    for mixer in ("sgla", "rla", "rla-noclip", "softmax"):
        make_run(tmp_path / mixer, mixer)
    groups = groups_of(tmp_path)
    assert [group.label for group in groups] == ["softmax", "sgla", "rla", "rla-noclip"]
    assert [(a.label, b.label) for a, b in pairs(groups)] == [("rla", "sgla"), ("rla-noclip", "rla")]
    assert {(a.label, b.label) for a, b in pairs(groups, "softmax")} == {(x, "softmax") for x in ("sgla", "rla", "rla-noclip")}


def test_an_unfinished_run_is_named_and_left_out_of_tables(folder):
    make_run(folder / "rdn-3", "rdn", 3, loss=0.5, steps=4, events=("step 4: loss is nan",))
    rdn = groups_of(folder)[1]
    assert list(rdn.runs) == [0, 1, 2, 3]
    assert rdn.spread("loss").n == 3
    assert max(rdn.curve("evaluation", "loss")) == STEPS
    (section,) = training.sections([read_run(path) for path in find_runs(folder)], command="rla report runs")
    assert [note.split(":")[0] for note in section.notes] == ["rdn, seed 3", "rdn, seed 3, step 4"]
    assert "4 of 10 steps" in section.notes[0]
    row = next(row for row in section.tables[0].rows if row[0] == "rdn")
    assert row[1] == "0 1 2"


def test_figures_draw_the_numbers(folder):
    groups = groups_of(folder)
    axis = figures.curves(groups, "evaluation", "loss", "loss").axes[0]
    assert axis.lines[0].get_xdata()[-1] == pytest.approx(1024 * STEPS / 1e6)
    assert [line.get_ydata()[-1] for line in axis.lines] == pytest.approx([2.15, statistics.fmean(LOSSES["rdn"])])
    axis = figures.differences(pairs(groups), "loss", "difference").axes[0]
    assert axis.lines[0].get_ydata() == pytest.approx([-(0.10 + 0.06 + 0.09) / 3] * 5)
    low, high = axis.get_ylim()
    assert low < 0 < high
    norms = figures.layers(groups, "output_norm", "norm")
    assert norms.axes[0].lines[1].get_ydata()[0] == pytest.approx(3.0)  # layer 2: 2 + seed, mean over seeds 0 to 2
    assert figures.layers(groups, "clip_rate", "clipped", percent=True) is None


def test_clip_rates_are_in_per_cent(tmp_path):
    make_run(tmp_path / "rla", "rla")
    make_run(tmp_path / "sgla", "sgla")
    shown = figures.layers(groups_of(tmp_path), "clip_rate", "clipped", percent=True)
    assert [axis.get_title() for axis in shown.axes] == ["rla"]
    assert shown.axes[0].lines[1].get_ydata()[0] == pytest.approx(10.0)


def test_text_section_has_results_and_intervals(folder):
    (section,) = training.sections([read_run(path) for path in find_runs(folder)], command="rla report runs")
    results, differences = section.tables
    assert results.rows[0][:3] == ("gdn", "0 1 2", "2.1500 (2.1000 to 2.2000)")
    assert results.rows[0][5] == "506"  # the median of a run's rates
    first = differences.rows[0]
    assert first[:3] == ("rdn less gdn", "validation loss", "-0.0833")
    assert first[3] == "-0.1350 to -0.0316 *"
    assert first[4:] == ("3", "-3.88 %")
    assert section.commands == ("rla report runs",)
    assert {figure.name for figure in section.figures} == {"train-loss", "validation-loss", "differences", "output-norms"}


def test_recall_and_text_are_different_subjects(tmp_path):
    for mixer, shares in (("sgla", (0.9, 0.3)), ("rla", (1.0, 0.5))):
        for seed in (0, 1):
            tasks = dict(zip(("4x64", "16x64"), shares, strict=True))
            make_run(tmp_path / f"{mixer}-{seed}", mixer, seed, accuracy=tasks)
    make_run(tmp_path / "text", "rdn")
    runs = [read_run(path) for path in find_runs(tmp_path)]
    sections = {section.title: section for section in training.sections(runs, command="x")}
    assert set(sections) == {"Multi-query associative recall", "Language modelling on the built-in text"}
    recall = sections["Multi-query associative recall"]
    assert recall.tables[0].headers[2:4] == ("4 x 64", "16 x 64")  # by number, not by letter
    assert recall.tables[0].rows[1][-1] == "123,456"
    assert recall.tables[0].rows[1][:4] == ("rla", "0 1", "100.0 (100.0 to 100.0)", "50.0 (50.0 to 50.0)")
    assert ("rla less sgla", "16 x 64, points", "+20.0") in {row[:3] for row in recall.tables[1].rows}


def rewrite(folder, keep):
    path = folder / "metrics.jsonl"
    rows = [changed for line in path.read_text().splitlines() if (changed := keep(json.loads(line))) is not None]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kinds", [("train",), ("evaluation",), ("probe",), ("event",)])
def test_runs_that_logged_only_a_part(folder, tmp_path, kinds):
    for path in find_runs(folder):
        rewrite(path, lambda row: row if row["kind"] in (*kinds, "event") else None)
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "event", "step": STEPS, "message": "done"}) + "\n")
    assert main((folder,), out=tmp_path / "report") == 0


def test_a_loss_that_is_no_number(tmp_path):
    for seed in (0, 1):
        for mixer in ("gdn", "rdn"):
            make_run(tmp_path / f"{mixer}-{seed}", mixer, seed)
        rewrite(tmp_path / f"rdn-{seed}", lambda row: row | ({"loss": math.nan} if row["step"] > 4 and "loss" in row else {}))
        make_run(tmp_path / f"rdn-low-{seed}", "rdn", seed, lr=1e-4, loss=2.5)
    page = build((tmp_path,), only_best=True)
    assert [row[0] for row in page.sections[0].tables[1].rows] == ["rdn, lr 0.0001 less gdn"] * 2
    shown = build((tmp_path,))
    assert any("nan" in cell for row in shown.sections[0].tables[0].rows for cell in row)


def test_a_hybrid_has_both_names(tmp_path):
    path = make_run(tmp_path / "hybrid", "rdn")
    tree = json.loads((path / "recipe.json").read_text())
    tree["model"]["mixer"] = ["rdn", "softmax", "rdn", "softmax"]
    (path / "recipe.json").write_text(json.dumps(tree))
    assert groups_of(tmp_path)[0].label == "rdn and softmax"
    assert build((tmp_path,)).sections[0].tables[0].rows[0][0] == "rdn and softmax"


def test_command_writes_the_page(folder, tmp_path, capsys):
    out = tmp_path / "report"
    assert main((folder,), out=out, title="A title") == 0
    assert str(out / "index.html") in capsys.readouterr().out
    html, markdown = (out / "index.html").read_text(), (out / "report.md").read_text()
    for text in (html, markdown):
        assert "A title" in text
        assert "2.1500 (2.1000 to 2.2000)" in text
        assert "-0.1350 to -0.0316" in text
    assert (out / "figures" / "validation-loss.png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main((folder,), out=out, title="A title") == 0
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_baseline_option(folder):
    page = build((folder,), baseline="rdn")
    assert page.sections[0].tables[1].rows[0][0] == "gdn less rdn"
    with pytest.raises(ValueError, match="--baseline: none of the runs is of 'rla'; there are gdn, rdn"):
        build((folder,), baseline="rla")


def _broken_metrics(folder):
    (folder / "gdn-0" / "metrics.jsonl").write_text('{"kind": "train"\n{}\n')


def _no_recipe(folder):
    (folder / "gdn-0" / "recipe.json").unlink()


def _bad_recipe(folder):
    path = folder / "gdn-0" / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sede": 1}))


def _empty(folder):
    (folder / "gdn-0" / "metrics.jsonl").write_text("")


def _twice(folder):
    make_run(folder / "again", "rdn", 0, loss=3.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_broken_metrics, r"metrics.jsonl, line 1: not JSON"),
        (_no_recipe, r"gdn-0 is no run: it has metrics.jsonl, but no recipe.json"),
        (_bad_recipe, r"recipe.json: sede: unknown field. Did you mean seed"),
        (_empty, r"metrics.jsonl is empty"),
        (_twice, r"again and .*rdn-0 are the same run: rdn, seed 0"),
    ],
)
def test_a_damaged_run_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        build((folder,))


def test_wrong_inputs_exit_with_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for inputs, message in (
        ((), "expected at least one run"),
        ((tmp_path / "nothing",), "no such file or folder"),
        ((tmp_path / "empty",), "no run in this folder"),
        ((tmp_path / "notes.txt",), "expected a run's folder, a .json file of rla eval or a .csv file of rla bench"),
    ):
        assert main(inputs, out=tmp_path / "report") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
