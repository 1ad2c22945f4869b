"""`rla reproduce` end to end at the smallest scale: what is done once is not done again, whatever interrupted it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reproduce_common
from rla.reproduce import studies
from rla.train import sweep as sweeps

pytestmark = pytest.mark.slow


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_experiments_and_the_same_page_again(tmp_path, monkeypatch):
    page = reproduce_common.make(tmp_path)
    titles = [section.title for section in page.sections]
    assert titles == [
        "Table 1: prediction and correction",
        "Kernels",
        "Training throughput",
        "Decoding",
        "Language modelling on the built-in text",
        "Evaluations",
        "Needle in a haystack",
        "Ablations",
        "Multi-query associative recall",
    ]
    assert all(section.commands for section in page.sections if section.title != "Needle in a haystack")
    assert "rla reproduce ablations --scale smallest" in page.sections[-2].commands
    assert {"machine", "torch", "rla", "measured"} <= set(page.facts)
    assert len(page.verdicts) >= 8
    report, runs = files(tmp_path / "report"), files(tmp_path / "runs")

    def never(*args, **kwargs):
        raise AssertionError("something is computed anew")

    monkeypatch.setattr(sweeps, "_train_all", never)
    for module, name in ((reproduce_common.Work, "say"), (studies, "halted")):
        monkeypatch.setattr(module, name, never)
    reproduce_common.make(tmp_path)
    assert files(tmp_path / "report") == report
    assert files(tmp_path / "runs") == runs


def start(folder: Path) -> subprocess.Popen:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, reproduce_common.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(page) -> list[tuple[str, ...]]:
    """The tables without the columns of speed."""
    found = []
    for section in page.sections:
        for table in section.tables:
            kept = [i for i, header in enumerate(table.headers) if header != "tokens/s"]
            found += [tuple(row[i] for i in kept) for row in table.rows]
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_stopped_goes_on(tmp_path, number):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = start(cut)
    deadline = time.monotonic() + 120
    while not list(cut.glob("runs/*/checkpoints/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2), said
    assert not (cut / "report").exists()
    unfinished = [path.parent for path in cut.glob("runs/*/metrics.jsonl") if not (path.parent / "model").exists()]
    assert unfinished
    names = ("ablations", "mqar")
    assert losses(reproduce_common.make(cut, names)) == losses(reproduce_common.make(whole, names))
    assert all((folder / "model").exists() for folder in unfinished)
