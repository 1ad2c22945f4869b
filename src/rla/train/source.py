"""The data of a recipe: training batches by step, and what to evaluate on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data import (
    MQAR,
    Batch,
    MQARBatches,
    TokenBatches,
    TokenDataset,
    builtin_dataset,
    check_tokenizer,
    fingerprint,
    load_tokenizer,
)
from ..models import RLAForCausalLM
from .engine import World
from .recipe import Data, Recipe, RecipeError

EVALUATION_ROWS = 64  # MQAR sequences of an evaluation batch


class Batches(Protocol):
    """Training data: row i of step s is a function of the seed, s and i alone."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def batch_at(self, step: int, rows: range) -> Batch: ...
    def describe(self, step: int, row: int) -> str: ...


@dataclass(frozen=True)
class Source:
    batches: Batches
    end_of_text: int | None
    tokenizer: Any  # of Transformers; None for MQAR
    evaluation: Any  # a TokenBatches, a dict of MQAR batches by task, or None


def open_source(recipe: Recipe) -> Source:
    """Open the recipe's data, with all the checks that need no reading of it."""
    data = recipe.data
    if data.path == "mqar":
        tasks = mqar_tasks(recipe)
        recall = {t: MQARBatches([t], batch=EVALUATION_ROWS, seed=recipe.seed).evaluation(data.mqar.examples) for t in tasks}
        return Source(MQARBatches(tasks, batch=recipe.sequences, seed=recipe.seed), None, None, recall)
    train, validation = _open_datasets(data)
    options: dict[str, Any] = {"length": data.length, "cross_documents": data.cross_documents, "seed": recipe.seed}
    held_out = None if validation is None else TokenBatches(validation, batch=recipe.parallel.micro_sequences, **options)
    return Source(TokenBatches(train, batch=recipe.sequences, **options), train.end_of_text, train.tokenizer(), held_out)


def mqar_tasks(recipe: Recipe) -> list[MQAR]:
    mqar = recipe.data.mqar
    if len(mqar.lengths) not in (1, len(mqar.pairs)):
        raise RecipeError(
            f"data.mqar.lengths: expected one length, or one for each of {len(mqar.pairs)} numbers of pairs; "
            f"got {len(mqar.lengths)}"
        )
    lengths = mqar.lengths * len(mqar.pairs) if len(mqar.lengths) == 1 else mqar.lengths
    return [MQAR(vocab_size=mqar.vocab_size, length=n, pairs=p) for p, n in zip(mqar.pairs, lengths, strict=True)]


def _open_datasets(data: Data) -> tuple[TokenDataset, TokenDataset | None]:
    if data.path == "builtin":
        name = data.tokenizer or "bytes"
        return builtin_dataset("train", name), builtin_dataset("validation", name)
    folder = Path(data.path)
    has_split = (folder / "train").is_dir()
    train = TokenDataset.open(folder / "train" if has_split else folder)
    other = Path(data.validation) if data.validation else folder / "validation"
    validation = TokenDataset.open(other) if data.validation or other.is_dir() else None
    if data.tokenizer is not None:
        check_tokenizer(train, fingerprint(load_tokenizer(data.tokenizer)))
    if validation is not None:
        check_tokenizer(validation, train.fingerprint)
    return train, validation


def model_inputs(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The arguments of the model's forward; documents that don't see each other lie along one row."""
    ids, labels = batch.input_ids.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    if batch.cu_seqlens is None:
        return {"input_ids": ids, "shift_labels": labels}
    cu_seqlens = batch.cu_seqlens.to(device)
    return {"input_ids": ids.flatten()[None], "shift_labels": labels.flatten()[None], "cu_seqlens": cu_seqlens}


def evaluate(model: RLAForCausalLM, source: Source, world: World, tokens: int) -> dict[str, float]:
    """Loss (and accuracy, for MQAR) on the evaluation data; the work is shared among the processes."""
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(source.evaluation, dict):
                return _evaluate_recall(model, source.evaluation, world)
            return _evaluate_text(model, source.evaluation, world, tokens)
    finally:
        model.train()


def _evaluate_text(model: RLAForCausalLM, batches: TokenBatches, world: World, tokens: int) -> dict[str, float]:
    total = count = 0.0
    for batch in _share(batches.sequential(tokens or None), world):
        n = 0 if batch is None else int((batch.labels >= 0).sum())
        # Sharded weights are gathered by all processes: one without a batch of its own runs along on nothing that counts.
        inputs = model_inputs(batch if batch is not None else next(batches.sequential(2)), world.device)
        loss = model(**inputs, num_items_in_batch=1, use_cache=False).loss.item()
        total, count = total + (loss if n else 0.0), count + n
    total, count = world.sum([total, count])
    loss = total / count
    dataset = batches.dataset
    return {"loss": loss, "bits_per_byte": loss / math.log(2) * dataset.tokens / dataset.bytes}


def _evaluate_recall(model: RLAForCausalLM, tasks: dict[MQAR, list[Batch]], world: World) -> dict[str, float]:
    row: dict[str, float] = {}
    sums = [0.0, 0.0, 0.0]
    for task, batches in tasks.items():
        own = [0.0, 0.0, 0.0]
        for batch in _share(iter(batches), world):
            inputs = model_inputs(batches[0] if batch is None else batch, world.device)
            labels = inputs.pop("shift_labels")
            logits = model(**inputs, use_cache=False).logits[labels >= 0].float()
            labels = labels[labels >= 0]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right = (logits.argmax(-1) == labels).sum().item()
            if batch is not None:
                own = [own[0] + loss, own[1] + right, own[2] + labels.numel()]
        own = world.sum(own)
        row[f"accuracy/{task.pairs}x{task.length}"] = own[1] / own[2]
        sums = [a + b for a, b in zip(sums, own, strict=True)]
    return {"loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2], **row}


def _share(batches: Iterator[Batch], world: World) -> Iterator[Batch | None]:
    """Every n-th batch; None where the others still have one, so that all processes take as many turns."""
    while True:
        turn = [next(batches, None) for _ in range(world.size)]
        if turn[0] is None:
            return
        yield turn[world.rank]
