"""`rla plan`: its memory beside that of real training steps, its counts, its command line; and the launch scripts.

Peak memory is measured in a child process, as rla.bench.memory does: the growth of VmHWM over a step of the trainer's own model
and optimizer, with large blocks mapped one by one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model_common import tiny, tokens
from rla.bench.memory import CLEAR_REFS, MMAP_THRESHOLD, _status
from rla.train import engine
from rla.train.cost import count_parameters
from rla.train.plan import cache_bytes, main, make_plan, vocabulary
from rla.train.recipe import Recipe, load_recipe, recipe_from_dict
from rla.train.rehearsal import rehearse

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="peak memory is measured on Linux only")

SIZES = {
    "wide": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "vocab_size": 8192,
    },
    "deep": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 4096,
    },
}


def small_recipe(size: str, mixer: str, *, checkpointing: bool, accumulate: bool = False) -> Recipe:
    tree = {
        "model": {"preset": "small", "mixer": mixer, "loss_chunk_size": 512, **SIZES[size]},
        "data": {"length": 1024},
        "schedule": {"batch_tokens": 4096 * (1 + accumulate)},
        "parallel": {"micro_sequences": 4, "activation_checkpointing": checkpointing},
    }
    return recipe_from_dict(tree)


def _step(recipe: Recipe) -> None:
    """Build and take two steps: the second one has the first one's leftovers around, as all others do."""
    model = engine.build(recipe.model.config(2), 0, recipe.parallel, engine.World(0, 1, torch.device("cpu")))
    optimizer = engine.make_optimizer(model, recipe.optimizer)
    for _ in range(2):
        for _ in range(recipe.sequences // recipe.parallel.micro_sequences):
            ids = torch.randint(model.config.vocab_size, (recipe.parallel.micro_sequences, recipe.length))
            model(input_ids=ids, shift_labels=ids, num_items_in_batch=ids.numel(), use_cache=False).loss.backward()
        engine.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def child(tree: str) -> None:
    recipe = recipe_from_dict(json.loads(tree))
    short = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, length=64))
    _step(short)  # libraries, threads
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    before = _status("VmRSS:")
    _step(recipe)
    print(_status("VmHWM:") - before)


def measured_peak(recipe: Recipe) -> int:
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, json.dumps(recipe.to_dict())]
    return int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def check_peak(recipe: Recipe) -> None:
    planned = rehearse(recipe, recipe.model.config(2), processes=1, device="cpu").total
    measured = measured_peak(recipe)
    print(f"planned {planned / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB, ratio {planned / measured:.4f}")
    assert planned == pytest.approx(measured, rel=0.1)


@linux
def test_memory_is_that_of_a_step():
    check_peak(small_recipe("wide", "rdn", checkpointing=False))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("mixer", ("rdn", "gdn", "softmax"))
@pytest.mark.parametrize("size", SIZES)
def test_memory_is_that_of_steps(size, mixer, checkpointing):
    check_peak(small_recipe(size, mixer, checkpointing=checkpointing))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", (False, True))
def test_memory_with_accumulated_gradients(checkpointing):
    check_peak(small_recipe("wide", "rdn", checkpointing=checkpointing, accumulate=True))


def sharded_recipe(**parallel) -> Recipe:
    tree = {
        "model": {"preset": "tiny", "num_hidden_layers": 2, "vocab_size": 512},
        "data": {"length": 256},
        "schedule": {"batch_tokens": 8192},
        "parallel": {"precision": "bfloat16", "micro_sequences": 4, **parallel},
    }
    return recipe_from_dict(tree)


def test_shards_and_traffic():
    recipe = sharded_recipe()
    config = recipe.model.config(2)
    count, step = count_parameters(config), rehearse(recipe, config, processes=4)
    assert step.passes == 2
    assert step.backend == "triton"
    assert step.peak["weights"] == pytest.approx(count.total, rel=0.02)  # 4 bytes in 4 shards, padded
    assert step.peak["optimizer"] == pytest.approx(2 * count.total, rel=0.02)
    assert step.peak["gradients"] == pytest.approx(4 * count.total, rel=0.02)  # not reduced before the last pass
    # Two bytes a weight: blocks for the forward and the backward pass, the embedding once for both; twice, for two passes.
    gathered = 2 * 2 * (2 * (count.total - count.embedding) + count.embedding)
    assert step.traffic.all_gather == pytest.approx(gathered, rel=0.02)
    assert step.traffic.reduce_scatter == pytest.approx(4 * count.total, rel=0.02)
    assert step.traffic.all_reduce == 0


def test_other_layouts_follow_from_one_rehearsal():
    for micro in (4, 8):  # with and without accumulation
        (_, *others) = make_plan(sharded_recipe(micro_sequences=micro), gpus=4).layouts
        (replicated,) = (layout for layout in others if layout.replicas == 4)
        recipe = sharded_recipe(micro_sequences=micro, replicas=4)
        assert replicated.total == pytest.approx(rehearse(recipe, recipe.model.config(2), processes=4).total, rel=0.1)


def test_parameters_are_the_models():
    plan = make_plan(sharded_recipe())
    model = engine.build(sharded_recipe().model.config(2), 0, Recipe().parallel, engine.World(0, 1, torch.device("cpu")))
    assert plan.parameters.total == sum(p.numel() for p in model.parameters())
    paper = load_recipe(ROOT / "recipes/paper-1.5b.toml")
    assert count_parameters(paper.model.config(vocabulary(paper))).total == pytest.approx(1.55e9, rel=0.01)


def test_checkpointing_and_operations():
    plan = make_plan(sharded_recipe(activation_checkpointing=True), gpus=2, mfu=0.5)
    assert plan.layouts[0].memory["activations"] < plan.other.memory["activations"] / 3
    assert plan.other.name == "without"
    assert plan.flops["recomputed"]["mlp"] == plan.flops["forward"]["mlp"]
    assert "head" not in plan.flops["recomputed"]
    flops = sum(sum(plan.flops[name].values()) for name in ("forward", "backward"))
    assert plan.tokens_per_second == pytest.approx(0.5 * 2 * 989e12 / flops)
    assert plan.days == pytest.approx(Recipe().schedule.total_tokens / plan.tokens_per_second / 86400)


@pytest.mark.parametrize("mixer", ("rdn", "gdn", "retnet", "softmax", "rdn+softmax"))
def test_states_at_inference(mixer):
    model = tiny(mixer)
    cache = model(tokens(1, 7), use_cache=True).past_key_values
    held = sum(x.nbytes for layer in cache.layers for x in layer.tensors())
    assert cache_bytes(model.config, 7, itemsize=4) == held


def test_command(tmp_path, capsys):
    recipe = tmp_path / "run.toml"
    recipe.write_text('[model]\npreset = "tiny"\n[data]\npath = "nowhere"\n')
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "--gpus 64 --gpu h100" in capsys.readouterr().out
    for options, message in {
        "--model.vocab-size 300 --gpu h1000": "--gpu: expected one of a100, h100, h200, b200, mi300x; got 'h1000'.",
        "--model.vocab-size 300 --gpus 3": "--gpus: 3 GPUs can't share a step's 32 sequences equally",
        "--model.vocab-size 300 --gpus 0": "--gpus: expected at least 1; got 0",
        "--model.vocab-size 300 --gpus 4 --parallel.replicas 3": "parallel.replicas: expected a divisor of --gpus = 4; got 3",
        "--model.vocab-size 300 --mfu 40": "--mfu: expected a number above 0 and up to 1; got 40",
        "": "model.vocab_size: needed for a plan, as the data (nowhere) is not opened",
    }.items():
        assert main([str(recipe), *options.split()]) == 2
        assert message in capsys.readouterr().err
    out = tmp_path / "plan.json"
    assert main([str(recipe), "--model.vocab-size", "300", "--model.mixer", "gdn", "--gpus", "2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["gpus"] == 2
    assert figures["layouts"][0]["total"] == pytest.approx(sum(figures["layouts"][0]["memory"].values()))
    shown = capsys.readouterr().out
    assert "gdn" in shown
    assert "days for" in shown


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "recipes/launch").glob("*.sh")))
def test_launch_scripts_are_bash(script):
    path = ROOT / "recipes/launch" / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage:" in done.stderr


# SLURM's commands, as far as the script needs them: a step that finishes, fails, or runs until it is signalled.
STUBS = {
    "srun": """case $OUTCOME in
        finish) mkdir -p "$RUN/model" ;;
        fail) exit 3 ;;
        stop) echo $$ > "$DIR/pid"; trap "exit 143" TERM; kill -USR1 "$PPID"; for _ in $(seq 100); do sleep 0.1; done; exit 9 ;;
    esac""",
    "scontrol": """if [ "$1" = show ]; then echo node1; else echo "$@" >> "$DIR/calls"; fi""",
    "scancel": """kill -TERM "$(cat "$DIR/pid")\"""",
}


@pytest.mark.parametrize(("outcome", "code", "calls"), (("finish", 0, ""), ("fail", 3, ""), ("stop", 0, "requeue 7\n")))
def test_slurm_script_queues_an_unfinished_run_again(tmp_path, outcome, code, calls):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    env = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DIR": str(tmp_path), "OUTCOME": outcome}
    command = ["bash", str(ROOT / "recipes/launch/slurm.sh"), "run.toml"]
    done = subprocess.run(command, env={**env, "RUN": str(tmp_path / "run")}, cwd=tmp_path, timeout=60)
    assert done.returncode == code
    written = tmp_path / "calls"
    assert (written.read_text() if written.exists() else "") == calls


if __name__ == "__main__":
    child(sys.argv[1])
