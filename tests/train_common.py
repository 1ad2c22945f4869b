"""Small training runs in processes of their own, forked from a server that has imported everything."""

import multiprocessing
import os
import signal
import socket
from pathlib import Path

import torch
from safetensors.torch import load_file

from rla.train.recipe import Recipe, recipe_from_dict

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rla.train.loop"])

SMALL = {
    "name": "small",
    "model": {
        "mixer": ["rdn", "softmax"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.05,
        "loss_chunk_size": 64,
    },
    "data": {"length": 16},
    "schedule": {"batch_tokens": 128, "total_tokens": 128 * 20, "warmup_tokens": 256},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3},
    "parallel": {"micro_sequences": 2, "device": "cpu"},
    "checkpoint": {"every": 3},
    "log": {"every": 1, "evaluate_every": 10, "evaluate_tokens": 512, "probe_every": 10},
}


def recipe(out: Path, **changes) -> Recipe:
    """SMALL with some fields changed: `schedule__total_tokens=...`."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            tree.setdefault(section, {})[field] = value
        else:
            tree[section] = value
    return recipe_from_dict({**tree, "out": str(out)})


def _main(rank: int, size: int, port: int, recipe: Recipe, kill: tuple[int, str] | None, signal_at: int | None) -> None:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from rla.train import loop

    step = loop.Run._train_step

    def watched(self, parts, lr):
        if kill == (self.step, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        if signal_at == self.step and self.world.main:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # as torchrun's processes may get both
        result = step(self, parts, lr)
        if kill == (self.step, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    loop.Run._train_step = watched  # type: ignore[method-assign]
    loop.train(recipe, quiet=True)


def run(recipe: Recipe, *, processes: int = 1, kill: tuple[int, str] | None = None, signal_at: int | None = None) -> list[int]:
    """Train, and the exit codes of the processes. `kill`: SIGKILL before or after the update of a step."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = [
        context.Process(target=_main, args=(rank, processes, port, recipe, kill, signal_at)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder / "model" / "model.safetensors")


def losses(recipe: Recipe, kind="train") -> list[float]:
    from rla.train.metrics import read_metrics

    rows = [row for row in read_metrics(recipe.folder) if row["kind"] == kind]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    return [row["loss"] for row in rows]
