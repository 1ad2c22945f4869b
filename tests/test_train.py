"""Training: exact resumption, any number of processes, what breaks and what is said of it."""

import fcntl
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rla.train import checkpoint, loop
from rla.train.export import export
from rla.train.metrics import read_metrics
from rla.train.recipe import RecipeError
from train_common import losses, recipe, run, weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    plain = recipe(tmp_path_factory.mktemp("whole") / "run")
    assert run(plain) == [0]
    return plain


def assert_same(a, b, atol=0.0):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=atol), (name, (a[name] - b[name]).abs().max())


def test_a_run_learns_and_leaves_what_it_should(whole):
    curve = losses(whole)
    assert len(curve) == 20
    assert curve[-1] < curve[0] - 1
    assert losses(whole, "evaluation")[-1] < curve[0] - 1
    assert len(checkpoint.find_checkpoints(whole.folder)) == 2
    probes = [row for row in read_metrics(whole.folder) if row["kind"] == "probe"]
    assert [row["step"] for row in probes] == [1, 10, 20]
    assert set(probes[-1]["layers"][0]) == {"output_norm", "clip_rate"}
    assert set(probes[-1]["layers"][1]) == {"output_norm"}


def test_one_process_needs_no_network(tmp_path, monkeypatch):
    """gloo, even for one process, asks for a network interface: without any (unshare -rn) it can't be started."""

    def refuse(*args, **kwargs):
        raise RuntimeError("no interface")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    short = recipe(tmp_path / "run", schedule__total_tokens=128 * 4)
    assert loop.train(short, quiet=True)["step"] == 4
    assert checkpoint.find_checkpoints(short.folder)
    with pytest.raises(RuntimeError, match="no interface"):  # FSDP2 needs a process group, to mix precisions
        loop.train(recipe(tmp_path / "mixed", parallel__precision="bfloat16"), quiet=True)


def test_the_folder_opens_with_transformers(whole):
    import transformers

    import rla.models  # noqa: F401

    folder = whole.folder / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("It was", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, ids.shape[1] + 4)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def interrupted(tmp_path, whole, seed):
    rng = random.Random(seed)
    step, when = rng.randrange(20), rng.choice(["before", "after"])
    stopped = recipe(tmp_path / f"run{seed}")
    assert run(stopped, kill=(step, when)) == [-9]
    assert run(stopped) == [0]
    assert_same(stopped, whole)
    assert losses(stopped) == losses(whole)
    shutil.rmtree(stopped.folder)


@pytest.mark.parametrize("seed", range(2))
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path, whole, seed):
    interrupted(tmp_path, whole, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_killed_anywhere_and_resumed_is_the_same_to_the_bit(tmp_path, whole, seed):
    interrupted(tmp_path, whole, seed)


def test_killed_many_times(tmp_path, whole):
    stopped = recipe(tmp_path / "run", checkpoint__every=1)
    for step in (1, 4, 5, 11, 17):
        assert run(stopped, kill=(step, "after")) == [-9]
    assert run(stopped) == [0]
    assert_same(stopped, whole)


def test_two_processes_train_as_one(tmp_path, whole):
    two = recipe(tmp_path / "run")
    assert run(two, processes=2) == [0, 0]
    assert losses(two) == pytest.approx(losses(whole), abs=1e-5)
    assert losses(two, "evaluation") == pytest.approx(losses(whole, "evaluation"), abs=1e-5)
    assert_same(two, whole, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_another_number_of_processes_resumes(tmp_path, whole, first, second):
    """Against the first number throughout: what differs is the order of a sum from the resumption on."""
    if first == 2:
        whole = recipe(tmp_path / "whole")
        assert run(whole, processes=2) == [0, 0]
    stopped = recipe(tmp_path / "run")
    assert run(stopped, processes=first, signal_at=17) == [0] * first
    assert not (stopped.folder / "model").exists()
    assert run(stopped, processes=second) == [0] * second
    assert_same(stopped, whole, atol=1e-6)
    assert losses(stopped) == pytest.approx(losses(whole), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__replicas": 2},
        {"parallel__activation_checkpointing": True},
        {"data__cross_documents": False},
        {"parallel__precision": "bfloat16"},
        {"parallel__compile": True},
    ],
    ids=str,
)
def test_layouts_of_the_work_train_alike(tmp_path, whole, changes):
    other = recipe(tmp_path / "run", **changes)
    assert run(other, processes=2) == [0, 0]
    near = 0.05 if "parallel__precision" in changes or "data__cross_documents" in changes else 1e-4
    assert losses(other) == pytest.approx(losses(whole), abs=near)


def test_sigterm_saves_and_the_run_goes_on(tmp_path, whole):
    stopped = recipe(tmp_path / "run", checkpoint__every=0)
    assert run(stopped, signal_at=7) == [0]
    assert [p.name for p in checkpoint.find_checkpoints(stopped.folder)] == ["step-00000008"]
    assert run(stopped) == [0]
    assert_same(stopped, whole)


def test_checkpoints_are_kept_and_pruned(tmp_path):
    r = recipe(tmp_path / "run", checkpoint__every=2, checkpoint__keep=1, checkpoint__keep_every=8)
    assert run(r) == [0]
    assert [p.name for p in checkpoint.find_checkpoints(r.folder)] == ["step-00000020", "step-00000016", "step-00000008"]
    export(r.folder, tmp_path / "early", 8)
    assert (tmp_path / "early" / "model.safetensors").exists()
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of step 3; there are: 8, 16, 20"):
        export(r.folder, tmp_path / "other", 3)
    with pytest.raises(FileExistsError):
        export(r.folder, tmp_path / "early", 8)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_broken_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, whole, capsys):
    stopped = recipe(tmp_path / "run")
    assert run(stopped, signal_at=10) == [0]
    newest, before = checkpoint.find_checkpoints(stopped.folder)
    flip(next(newest.glob("*.safetensors")))
    notes: list[str] = []
    path, progress = checkpoint.newest_whole(stopped.folder, notes.append)
    assert path == before
    assert progress.step == 9
    assert "SHA-256 differs" in notes[0]
    assert newest.name in notes[0]
    assert newest.with_name(newest.name + ".broken").exists()
    assert run(stopped) == [0]
    assert_same(stopped, whole)


@pytest.mark.parametrize("harm", ["truncated", "removed", "manifest"])
def test_every_harm_to_a_checkpoint_is_named(tmp_path, whole, harm):
    copy = tmp_path / "step-00000020"
    shutil.copytree(whole.folder / "checkpoints" / "step-00000020", copy)
    shard = next(copy.glob("*.safetensors"))
    if harm == "truncated":
        shard.write_bytes(shard.read_bytes()[:-5])
        message = f"{shard.name} has .* bytes; expected"
    elif harm == "removed":
        shard.unlink()
        message = f"{shard.name} is missing"
    else:
        (copy / checkpoint.MANIFEST).write_text("{")
        message = "can't be read"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.read_manifest(copy)


def test_no_whole_checkpoint_does_not_start_anew(tmp_path):
    stopped = recipe(tmp_path / "run")
    assert run(stopped, signal_at=5) == [0]
    for path in checkpoint.find_checkpoints(stopped.folder):
        flip(next(path.glob("*.safetensors")))
    with pytest.raises(RecipeError, match="none of its 2 checkpoints is whole"):
        loop.train(stopped, quiet=True)
    assert not checkpoint.find_checkpoints(stopped.folder)


def test_another_recipe_in_the_same_folder_is_refused(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")}
    with pytest.raises(RecipeError, match=r"optimizer\.lr was 0\.01, is 0\.02"):
        loop.train(recipe(whole.folder, optimizer__lr=0.02), quiet=True)
    with pytest.raises(RecipeError, match=r"data\.length was 16, is 32"):
        loop.train(recipe(whole.folder, data__length=32), quiet=True)
    assert before == {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RecipeError, match="is no run of ours"):
        loop.train(recipe(tmp_path), quiet=True)


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    with (tmp_path / ".run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match="another process is training in"):
            loop.train(recipe(folder), quiet=True)
    assert not folder.exists()


def test_a_finished_run_is_left_alone(whole):
    before = weights(whole)
    assert run(whole) == [0]
    assert all(torch.equal(before[name], w) for name, w in weights(whole).items())
    assert len(losses(whole)) == 20


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    r = recipe(tmp_path / "run", checkpoint__every=5)
    real = checkpoint._sha256

    def full(path):
        if "step-00000010" in str(path):
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(checkpoint, "_sha256", full)
    loop.train(r, quiet=True)
    events = [row["message"] for row in read_metrics(r.folder) if row["kind"] == "event"]
    assert events == ["a checkpoint could not be written (the disk is full); the last good one is kept"]
    assert [p.name for p in checkpoint.find_checkpoints(r.folder)] == ["step-00000020", "step-00000015"]
    assert not list((r.folder / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize(("policy", "steps"), [("stop", 12), ("skip", 20)])
def test_a_loss_that_is_not_a_number(tmp_path, monkeypatch, policy, steps):
    r = recipe(tmp_path / "run", guard__nan=policy)
    real = loop.engine.clip_gradients
    calls = []

    def broken(model, limit):
        calls.append(1)
        return torch.tensor(float("nan")) if len(calls) == 13 else real(model, limit)

    monkeypatch.setattr(loop.engine, "clip_gradients", broken)
    if policy == "stop":
        with pytest.raises(loop.Halt, match=r"step 13: loss .*, gradient norm nan; of the batch, rows"):
            loop.train(r, quiet=True)
    else:
        loop.train(r, quiet=True)
    rows = read_metrics(r.folder)
    (event,) = [row["message"] for row in rows if row["kind"] == "event"]
    assert "window" in event
    assert "Skipped" in event or policy == "stop"
    assert max(row["step"] for row in rows if row["kind"] == "train") == steps


def test_a_loss_that_leaps_is_skipped(tmp_path, monkeypatch):
    from rla.train.guard import Guardian, Halt
    from rla.train.recipe import Guard

    guardian = Guardian(Guard(spike="skip", patience=2))
    assert all(guardian.judge(1.0, 1.0) is None for _ in range(20))
    assert "above 2 times the usual 1.0000" in guardian.judge(2.5, 1.0)
    assert guardian.decide("step 21: a leap").endswith("Skipped")
    again = Guardian(Guard(spike="skip", patience=2))
    again.state = json.loads(json.dumps(guardian.state))
    assert again.judge(2.5, 1.0) is not None
    again.decide("step 22")
    assert again.judge(2.5, 1.0) is not None
    with pytest.raises(Halt, match="2 skipped steps in a row"):
        again.decide("step 23")


def test_the_learning_rate(tmp_path):
    r = recipe(tmp_path)
    rates = [loop.learning_rate(r, step) for step in range(20)]
    assert rates[:2] == pytest.approx([0.005, 0.01])
    assert rates[-1] == pytest.approx(0.001)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[10] == pytest.approx(0.0055, abs=5e-4)


def test_mqar_trains(tmp_path):
    changes = {"data__path": "mqar", "data__mqar": {"pairs": [2, 4], "lengths": [16], "vocab_size": 32, "examples": 16}}
    r = recipe(tmp_path / "run", **changes)
    row = loop.train(r, quiet=True)
    assert set(row) >= {"loss", "accuracy", "accuracy/2x16", "accuracy/4x16"}
    assert (r.folder / "model" / "model.safetensors").exists()


def test_tensorboard(tmp_path):
    r = recipe(tmp_path / "run", log__tracker="tensorboard", schedule__total_tokens=128 * 3, schedule__warmup_tokens=0)
    loop.train(r, quiet=True)
    assert list((r.folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_accelerate_launches_the_trainer_on_two_processes(tmp_path):
    script = Path(__file__).with_name("accelerate_script.py")
    # accelerate starts several CPU processes by MPI, or by torchrun, which it calls --multi_gpu; the script says use_cpu.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", str(script), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["processes"] == second["processes"] == 2
    assert first["weight"] == second["weight"]
    assert first["losses"][-1] < first["losses"][0] - 0.5


@pytest.mark.slow
def test_torchrun_trains(tmp_path):
    toml = tmp_path / "small.toml"
    toml.write_text(
        f'out = "{tmp_path / "run"}"\n[model]\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 1\n'
        "num_attention_heads = 2\n[data]\nlength = 16\n[schedule]\nbatch_tokens = 64\ntotal_tokens = 320\nwarmup_tokens = 64\n"
        '[parallel]\ndevice = "cpu"\n[log]\nevery = 1\nevaluate_tokens = 64\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rla", "train", str(toml)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert "2 processes on cpu" in done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
