"""`rla report` on evaluations and benchmarks: the paper's tables with its own rows marked, needle maps, CSV files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from report_common import make_result
from rla.bench.ratios import Cell
from rla.bench.workload import Contender
from rla.eval.results import paper_numbers
from rla.report.benchmarks import read_kernels, section
from rla.report.command import build, main
from rla.report.evaluation import sections

RESULTS = Path(__file__).parent.parent / "results"
LANGUAGE = {"wikitext": {"word_perplexity": 25.0}, "lambada_openai": {"perplexity": 31.5, "acc": 0.4}}


def write_result(path, *args, **options):
    path.write_text(json.dumps(make_result(*args, **options)))
    return path


def test_tables_have_the_papers_rows_apart(tmp_path):
    paths = [write_result(tmp_path / f"{name}.json", name, LANGUAGE, mixers=[name]) for name in ("gdn", "rdn")]
    (page,) = sections(paths)
    models, second, fourth = page.tables
    assert [row[:3] for row in models.rows] == [("gdn", "gdn", "1,000,000"), ("rdn", "rdn", "1,000,000")]
    assert second.headers[:4] == ("model", "Wiki ppl", "LAMB ppl", "ARC-C acc_n")
    assert [row[0] for row in second.rows] == ["gdn", "rdn"]
    assert second.rows[0][1] == "25.00 ±0.01"
    assert second.rows[0][second.headers.index("LAMB acc")] == "40.0 ±1.0"
    assert second.rows[0][-1] == ""  # no mean of what is not all there
    assert second.reference_title.startswith("The paper's Table 2: 1.5B parameters, 100B tokens")
    assert "not measured here" in second.reference_title
    printed = paper_numbers()["2"]["models"]
    assert [row[0] for row in second.reference] == list(printed)
    for row in second.reference:
        assert [float(cell) for cell in row[1:]] == printed[row[0]]
    assert "50B tokens" in fourth.reference_title
    assert page.commands == ("rla eval gdn --suite paper", "rla eval rdn --suite paper")
    (note,) = page.notes
    assert note.startswith("All models: ")
    assert "Not run, for want of data: piqa." in note


def test_models_of_another_machine_have_a_note_of_their_own(tmp_path):
    paths = [write_result(tmp_path / f"{name}.json", name, LANGUAGE) for name in ("a", "b", "c")]
    other = json.loads(paths[2].read_text())
    other["environment"]["machine"] = "another"
    paths[2].write_text(json.dumps(other))
    first, second = sections(paths)[0].notes
    assert first.startswith("a; b: ")
    assert second.startswith("c: machine another")


def test_paper_can_be_left_out_and_parts_are_marked(tmp_path):
    path = write_result(tmp_path / "a.json", "a", LANGUAGE, limit=8)
    (page,) = sections([path], paper=False)
    assert all(not table.reference for table in page.tables)
    assert page.tables[1].rows[0][1] == "25.00 ±0.01*"
    assert any("first samples" in text for text in page.body)
    assert not any("paper" in text for text in page.body)


def test_the_plain_sum_has_its_own_table(tmp_path):
    numbers = {"arc_easy": {"acc": 0.5}}
    both = [write_result(tmp_path / f"{m}.json", m, numbers, mixers=[m]) for m in ("rdn", "rdn-sum")]
    assert any("Table 5" in table.caption for table in sections(both)[0].tables)
    assert not any("Table 5" in table.caption for table in sections(both[:1])[0].tables)


def test_results_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write_result(tmp_path / name / "x.json", "model", LANGUAGE) for name in ("a", "b")]
    labels = [row[0] for row in sections(paths)[0].tables[0].rows]
    assert len(set(labels)) == 2
    assert all(label.startswith("model (") for label in labels)


def test_needle_map(tmp_path):
    path = write_result(tmp_path / "r.json", "My Model", {"needle": {"acc": 0.75}})
    _, needles = sections([path])
    (figure,) = needles.figures
    assert figure.name == "needle-my-model-needle"
    assert "75.0 % over all, least (0 %) at 1,024 tokens and a depth of 0 %" in figure.alt
    assert needles.tables[0].rows == (("My Model", "needle", "100.0", "50.0"),)
    assert main((path,), out=tmp_path / "report") == 0
    assert (tmp_path / "report" / "figures" / "needle-my-model-needle.png").read_bytes().startswith(b"\x89PNG")


def test_kernels_file_gives_its_ratios():
    path = RESULTS / "kernels" / "kernels.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = read_kernels(rows)
    found = {(row["method"], row["by"]): float(row["ms_q50"]) for row in rows if (row["T"], row["pass"]) == ("4096", "forward")}
    cell = Cell(Contender("rla", "native"), 4096, "forward")
    assert 1e3 * results.times[cell].q50 == pytest.approx(found["rla", "native"])
    made = section(path, "kernels")
    column = made.tables[0].headers.index("T = 4,096")
    times = {row[0]: row[column] for row in made.tables[0].rows}
    assert float(times["rla native, forward"]) == pytest.approx(found["rla", "native"], abs=0.051)
    over = {row[0]: row[column] for row in made.tables[1].rows}
    expected = found["rla", "native"] / found["sgla", "native"]
    assert float(over["native rla forward: time over sgla"]) == pytest.approx(expected, abs=0.0051)
    assert f"machine {rows[0]['machine']}" in made.notes[0]


def test_a_file_of_a_gpu_can_be_read_without_one(tmp_path):
    text = (RESULTS / "kernels" / "kernels.csv").read_text().replace(",cpu,", ",cuda,")
    (tmp_path / "kernels.csv").write_text(text)
    assert "cuda" in section(tmp_path / "kernels.csv", "kernels").body[0]


def test_decode_file():
    made = section(RESULTS / "decode" / "decode.csv", "decode")
    with (RESULTS / "decode" / "decode.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    title = f"one state, in the cache, after {row['position']} tokens"
    first = made.tables[0].rows[0]
    assert first[:2] == (f"{row['method']} {row['by']}", title)
    times = [float(row["us_q50"]), float(row["pass_us_q50"])]
    assert [float(cell) for cell in first[2:]] == pytest.approx([*times, times[0] / times[1]], abs=0.051)
    (figure,) = made.figures
    assert figure.picture.axes[0].get_title() == title


def test_files_of_one_name_get_figures_of_their_own(tmp_path):
    paths = [tmp_path / name / "kernels" / "kernels.csv" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text((RESULTS / "kernels" / "kernels.csv").read_text())
    names = [section.figures[0].name for section in build(tuple(paths)).sections]
    assert [name.removeprefix(names[0][: -len("a-kernels-kernels")]) for name in names] == [
        "a-kernels-kernels",
        "b-kernels-kernels",
    ]


def test_all_kinds_on_one_page():
    page = build(
        (RESULTS / "kernels" / "kernels.csv", RESULTS / "kernels-backward" / "kernels.csv", RESULTS / "decode" / "decode.csv")
    )
    assert [section.title for section in page.sections] == ["Kernels", "Kernels", "Decoding"]
    assert [section.figures[0].name for section in page.sections] == ["kernels", "kernels-backward", "decode"]
    assert page.intro == "Made from 3 benchmarks."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not a result of `rla eval`"),
        ("a.json", "[1]", "not a result of `rla eval`"),
        ("a.json", '{"kind": "rla eval", "format": 99}', "its format is 99"),
        ("a.csv", "x,y\n1,2\n", "not a CSV file of `rla bench kernels`"),
        ("a.csv", "", "not a CSV file of `rla bench kernels`"),
        ("a.csv", "ms_q50,method\nfast,rla\n", "a row can't be read"),
    ],
)
def test_wrong_files_are_named(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert main((tmp_path / name,), out=tmp_path / "report") == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert str(tmp_path / name) in shown
