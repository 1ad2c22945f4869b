"""`rla plan RECIPE --gpus N --gpu h100`: what a run needs, before it is started.

Memory and communication come from a rehearsal of a step (rehearsal.py), operations from the configuration (cost.py), rates
from the makers' data sheets (hardware.py). docs/scaling.md tells how each figure comes about. No GPU is needed, nor the data.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..data import load_tokenizer
from ..method import get_method
from ..models.configuration_rla import SOFTMAX, RLAConfig
from .cost import Parameters, backward_flops, count_parameters, forward_flops, recomputed_flops, training_flops
from .hardware import GPU, GPUS
from .recipe import Recipe, RecipeError, load_recipe
from .rehearsal import STATIC, Rehearsal, rehearse

HELP = """usage: rla plan RECIPE --gpus N --gpu NAME [--mfu 0.4] [--json FILE] [--section.field value ...]

What a run needs: parameters, memory of each GPU, operations, days. Neither GPUs nor the recipe's data are needed for it.

  rla plan recipes/paper-1.5b.toml --gpus 64 --gpu h100
  rla plan recipes/paper-1.5b.toml --gpus 8 --gpu h200 --parallel.micro-sequences 8 --model.mixer softmax

`rla plan RECIPE --help` lists every option.
"""
NODE = 8  # GPUs of a node: the shards of the hybrid layout that is shown beside the recipe's
ROOM = 0.9  # of a GPU's memory; the rest is for the CUDA context, communication and what lies fallow between blocks
LENGTHS = (4_096, 32_768, 131_072)


@dataclass(frozen=True)
class Options:
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    gpus: int = 1
    """How many."""
    gpu: str = "h100"
    """Which: a100, h100, h200, b200, mi300x."""
    mfu: float = 0.4
    """Share of the GPUs' peak rate that the model's operations are taken to reach. An assumption: nothing is measured."""
    json: Path | None = None
    """A file to write the figures to, too."""


@dataclass(frozen=True)
class Layout:
    """Memory of one GPU when the model lies in `shards` parts, `replicas` times over; bytes."""

    name: str
    shards: int
    replicas: int
    memory: dict[str, float]  # by kind; see rehearsal.py
    fits: bool

    @property
    def total(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What a recipe needs on so many GPUs: counts, and times that follow from an assumed MFU."""

    gpus: int
    gpu: GPU
    mfu: float
    precision: str
    checkpointing: bool
    tokens_per_pass: int
    passes: int  # of a step, in each process
    backend: str  # of the op, taken to be there; empty for softmax alone
    parameters: Parameters
    flops: dict[str, dict[str, float]]  # per token: forward, backward, recomputed, each by part
    layouts: list[Layout]  # the recipe's own first
    other: Layout  # the recipe's own, with activation checkpointing the other way
    tokens_per_second: float
    days: float
    step_seconds: float
    traffic: dict[str, float]  # bytes that a GPU receives in a step, by collective
    states: dict[str, dict[int, int]] = field(default_factory=dict)  # bytes of a sequence at inference, by length

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each GPU must receive if communication is not to be waited for."""
        return sum(self.traffic.values()) / self.step_seconds


def vocabulary(recipe: Recipe) -> int:
    """Of the model, told by the recipe, its tokenizer or its data."""
    data = recipe.data
    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    if data.path == "mqar":
        return data.mqar.vocab_size
    if data.tokenizer is not None or data.path == "builtin":
        return len(load_tokenizer(data.tokenizer or "bytes"))
    raise RecipeError(
        f"model.vocab_size: needed for a plan, as the data ({data.path}) is not opened; give --model.vocab-size or "
        "--data.tokenizer"
    )


def make_plan(recipe: Recipe, *, gpus: int = 1, gpu: str = "h100", mfu: float = 0.4) -> Plan:
    """Count it all; two rehearsals of a step."""
    _check(recipe, gpus, gpu, mfu)
    config, device, parallel = recipe.model.config(vocabulary(recipe)), GPUS[gpu], recipe.parallel
    parameters = count_parameters(config)
    own = rehearse(recipe, config, processes=gpus)
    turned = dataclasses.replace(parallel, activation_checkpointing=not parallel.activation_checkpointing)
    other = rehearse(dataclasses.replace(recipe, parallel=turned), config, processes=gpus)

    def layout(name: str, replicas: int, step: Rehearsal = own) -> Layout:
        memory = _memory(step, parameters.total, gpus // replicas, replicas == parallel.replicas)
        return Layout(name, gpus // replicas, replicas, memory, sum(memory.values()) <= ROOM * device.memory)

    choices = {"sharded over all": 1, f"hybrid, shards of {NODE}": gpus // NODE, "replicated": gpus}
    others = [
        layout(name, replicas)
        for name, replicas in choices.items()
        if replicas and gpus % replicas == 0 and replicas != parallel.replicas and gpus > 1
    ]
    flops = sum(training_flops(config, recipe.length).values())
    rate = mfu * gpus * getattr(device, parallel.precision) / flops
    recomputed = recomputed_flops(config, recipe.length) if parallel.activation_checkpointing else {}
    return Plan(
        gpus=gpus,
        gpu=device,
        mfu=mfu,
        precision=parallel.precision,
        checkpointing=parallel.activation_checkpointing,
        tokens_per_pass=min(parallel.micro_sequences, recipe.sequences // gpus) * recipe.length,
        passes=own.passes,
        backend=own.backend,
        parameters=parameters,
        flops={
            "forward": forward_flops(config, recipe.length),
            "backward": backward_flops(config, recipe.length),
            "recomputed": recomputed,
        },
        layouts=[layout("the recipe's", parallel.replicas), *others],
        other=layout("without" if parallel.activation_checkpointing else "with", parallel.replicas, other),
        tokens_per_second=rate,
        days=recipe.schedule.total_tokens / rate / 86_400,
        step_seconds=recipe.schedule.batch_tokens / rate,
        traffic=_traffic(own, gpus // parallel.replicas, parallel.replicas),
        states=inference_states(recipe, config),
    )


def _check(recipe: Recipe, gpus: int, gpu: str, mfu: float) -> None:
    if gpu not in GPUS:
        near = difflib.get_close_matches(gpu, GPUS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(f"--gpu: expected one of {', '.join(GPUS)}; got {gpu!r}.{hint}")
    if gpus < 1:
        raise RecipeError(f"--gpus: expected at least 1; got {gpus}")
    if not 0 < mfu <= 1:
        raise RecipeError(f"--mfu: expected a number above 0 and up to 1; got {mfu:g}")
    if recipe.sequences % gpus:
        raise RecipeError(f"--gpus: {gpus} GPUs can't share a step's {recipe.sequences} sequences equally")
    if gpus % recipe.parallel.replicas:
        raise RecipeError(f"parallel.replicas: expected a divisor of --gpus = {gpus}; got {recipe.parallel.replicas}")


def _memory(step: Rehearsal, parameters: int, shards: int, rehearsed: bool) -> dict[str, float]:
    """By kind, at the peak. Another number of shards changes weights, moments and gradients alone."""
    if rehearsed:
        return dict(step.peak)
    gradients = 4 * parameters / (1 if step.passes > 1 else shards)  # whole while they are accumulated
    static = {"weights": 4 * parameters / shards, "optimizer": 8 * parameters / shards, "gradients": gradients}
    return {kind: static.get(kind, size) for kind, size in step.peak.items()}


def _traffic(step: Rehearsal, shards: int, replicas: int) -> dict[str, float]:
    """Received by each GPU in rings: all but its own part of what is gathered or summed, twice where all get the sum."""
    whole = step.traffic
    return {
        "all-gather": whole.all_gather * (shards - 1) / shards,
        "reduce-scatter": whole.reduce_scatter * (shards - 1) / shards,
        "all-reduce": whole.all_reduce * 2 * (replicas - 1) / replicas,
    }


def inference_states(recipe: Recipe, config: RLAConfig) -> dict[str, dict[int, int]]:
    """Bytes that one sequence keeps, of the recipe's model and of the same with softmax in every layer, in bfloat16."""
    softmax = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, mixer=(SOFTMAX,)))
    models = {" and ".join(dict.fromkeys(config.mixers)): config}
    if set(config.mixers) != {SOFTMAX}:
        models["softmax"] = softmax.model.config(config.vocab_size)
    return {name: {T: cache_bytes(model, T) for T in LENGTHS} for name, model in models.items()}


def cache_bytes(config: RLAConfig, length: int, itemsize: int = 2) -> int:
    """Of one sequence after so many tokens: states are float32, keys, values and the convolution's inputs of `itemsize`."""
    total, D = 0, config.resolved_head_dim
    linear = config.linear_num_heads or config.num_attention_heads
    for mixer in config.mixers:
        if mixer == SOFTMAX:
            total += 2 * length * (config.num_key_value_heads or config.num_attention_heads) * D * itemsize
        else:
            width = config.conv_size_of(mixer)
            total += linear * D * (4 * D * (1 + get_method(mixer).has_R) + 3 * max(width - 1, 0) * itemsize)
    return total


def to_dict(plan: Plan) -> dict[str, Any]:
    """For JSON; what follows from the fields is in it too."""
    tree = dataclasses.asdict(plan)
    tree["parameters"]["total"] = plan.parameters.total
    for layout, values in zip((*plan.layouts, plan.other), (*tree["layouts"], tree["other"]), strict=True):
        values |= {"total": layout.total, "static": sum(layout.memory[kind] for kind in STATIC)}
    return tree | {"bandwidth": plan.bandwidth}


def parse(argv: list[str]) -> Options:
    """The options, and the recipe of the file with its changes."""
    default = Options(load_recipe(argv[0]))
    return tyro.cli(Options, default=default, args=argv[1:], prog=f"rla plan {argv[0]}", description=HELP)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    try:
        options = parse(argv)
        plan = make_plan(options.recipe, gpus=options.gpus, gpu=options.gpu, mfu=options.mfu)
    except (RecipeError, FileNotFoundError) as error:
        print(f"rla plan: {error}", file=sys.stderr)
        return 2
    from .plan_tables import show

    show(plan, options.recipe)
    if options.json is not None:
        options.json.write_text(json.dumps(to_dict(plan), indent=1))
        print(f"figures in {options.json}")
    return 0
