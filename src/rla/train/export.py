"""`rla export RUN`: a checkpoint of a run as a Hugging Face folder, with its tokenizer."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from ..models import RLAForCausalLM
from .checkpoint import CheckpointError, checkpoint_name, find_checkpoints, load, read_manifest
from .recipe import recipe_from_dict
from .source import open_source


def export(run: Path, out: Path, step: int | None = None) -> int:
    """Write the folder, whole or not at all; returns the step of the checkpoint, by default the newest."""
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another --out")
    paths = find_checkpoints(run)
    if not paths:
        raise CheckpointError(f"{run} holds no checkpoint; expected the folder of a run, such as runs/tiny")
    path = paths[0] if step is None else run / "checkpoints" / checkpoint_name(step)
    if path not in paths:
        known = ", ".join(str(int(p.name.removeprefix("step-"))) for p in reversed(paths))
        raise CheckpointError(f"{run} holds no checkpoint of step {step}; there are: {known}")
    manifest = read_manifest(path)
    recipe = recipe_from_dict(manifest["recipe"])
    source = open_source(recipe)
    model = RLAForCausalLM(recipe.model.config(source.batches.vocab_size, source.end_of_text))
    with torch.no_grad():
        load(path, {f"model.{name}": p.detach() for name, p in model.named_parameters()}, alone=True)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(partial)
    os.replace(partial, out)
    return manifest["step"]


def main(run: Annotated[Path, tyro.conf.Positional], *, out: Path, step: int | None = None) -> int:
    """Write a checkpoint of a run as a folder that Transformers and `rla generate` open.

    Example: rla export runs/tiny --step 200 --out tiny-at-200

    Args:
        run: the folder of a run.
        out: the folder to write; it must not exist.
        step: which checkpoint; None: the newest.
    """
    try:
        taken = export(run, out, step)
    except (CheckpointError, FileExistsError, ValueError) as error:
        print(f"rla export: {error}", file=sys.stderr)
        return 2
    print(f"step {taken} of {run} in {out}")
    return 0
