"""Sweeps: each recipe is trained once, wherever the sweep was stopped; the MQAR study on top of them."""

import csv
import dataclasses
import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rla.eval import mqar
from rla.train.checkpoint import find_checkpoints
from rla.train.sweep import SweepError, finished, place, sweep
from train_common import recipe

RECALL = {"pairs": [2, 4], "lengths": [16], "vocab_size": 32, "examples": 16}


def small(folder, **changes):
    return recipe(folder, data__path="mqar", data__mqar=RECALL, schedule__total_tokens=128 * 4, **changes)


def test_a_folder_is_named_after_what_decides_the_result(tmp_path):
    one = place(small(tmp_path), tmp_path)
    assert place(dataclasses.replace(small(tmp_path), out="elsewhere"), tmp_path) == one
    assert place(small(tmp_path, log__every=3), tmp_path).out == one.out
    assert place(small(tmp_path, seed=1), tmp_path).out != one.out
    assert place(small(tmp_path, optimizer__lr=0.02), tmp_path).out != one.out


@pytest.mark.slow
def test_runs_are_trained_once(tmp_path):
    recipes = [small(tmp_path, seed=seed) for seed in (0, 1)]
    folders = sweep(recipes, tmp_path, jobs=2)
    assert all(finished(place(one, tmp_path)) for one in recipes)
    before = {p: p.stat().st_mtime_ns for folder in folders for p in folder.rglob("*")}
    assert sweep(recipes, tmp_path) == folders
    assert before == {p: p.stat().st_mtime_ns for folder in folders for p in folder.rglob("*")}


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_are_kept(tmp_path):
    bad = small(tmp_path, model__mixer=["nonsense"])
    with pytest.raises(SweepError, match="1 of 2 runs failed: small-"):
        sweep([bad, small(tmp_path)], tmp_path)
    assert finished(place(small(tmp_path), tmp_path))


@pytest.mark.slow
def test_the_study(tmp_path, capsys):
    toml = tmp_path / "mqar.toml"
    toml.write_text(
        'name = "mqar"\n[model]\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 1\nnum_attention_heads = 2\n'
        '[data]\npath = "mqar"\nmqar = {pairs = [2, 4], lengths = [16], vocab_size = 32, examples = 16}\n'
        "[schedule]\nbatch_tokens = 128\ntotal_tokens = 512\nwarmup_tokens = 128\n[log]\nevery = 1\n"
    )
    options = {"methods": ("gdn", "softmax"), "learning_rates": (1e-3, 1e-2), "seeds": (0, 1), "widths": (16, 32)}
    assert mqar.main(toml, **options, runs=tmp_path / "runs", out=tmp_path / "out") == 0
    rows = list(csv.DictReader((tmp_path / "out" / "mqar.csv").read_text().splitlines()))
    assert len(rows) == 16
    table = (tmp_path / "out" / "mqar.md").read_text().splitlines()
    assert len(table) == 2 + 4
    assert (tmp_path / "out" / "mqar.png").stat().st_size > 10_000


def test_the_best_rate_counts():
    rows = [{"method": "rdn", "width": 8, "lr": lr, "seed": s, "accuracy": a} for lr, s, a in
            ((1, 0, 0.9), (1, 1, 0.1), (2, 0, 0.6), (2, 1, 0.7))]  # fmt: skip
    assert mqar.best(rows)["rdn", 8] == rows[2:]


def test_a_recipe_of_other_data_is_refused(tmp_path, capsys):
    (tmp_path / "r.toml").write_text('[data]\npath = "builtin"\n')
    assert mqar.main(tmp_path / "r.toml") == 2
    assert 'data.path: expected "mqar"' in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_sweep_takes_its_runs_along_and_goes_on(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from test_sweep import long; from rla.train.sweep import sweep\n"
        "if __name__ == '__main__': sweep([long(Path(sys.argv[2]))], Path(sys.argv[2]))\n"
    )
    (tmp_path / "main.py").write_text(script)
    command = [sys.executable, str(tmp_path / "main.py"), str(Path(__file__).parent), str(tmp_path)]
    placed = place(long(tmp_path), tmp_path)
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: find_checkpoints(placed.folder))
        child.kill()
        child.wait()
        lock = placed.folder.with_name(f".{placed.folder.name}.lock")
        with lock.open("w") as file:  # free as soon as the run's process has ended
            wait_for(lambda: locks(file))
    finally:
        child.kill()
    assert not finished(placed)
    assert sweep([long(tmp_path)], tmp_path) == [placed.folder]
    assert finished(placed)


def long(folder):
    return recipe(folder, data__path="mqar", data__mqar=RECALL, schedule__total_tokens=128 * 400, checkpoint__every=20)


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def locks(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
