"""Scales: how much of each experiment is done. A scale is data; the experiments are the same at all of them.

    demo     the built-in books and MQAR, models of 0.1M parameters: minutes on two cores
    small    two million parameters on text of your own (`--data`), two to eight seeds, a sweep of the learning rate: some hours
    paper    the recipes of recipes/paper-1.5b.toml: GPUs

A study is a recipe with the methods to train it with. All methods of a study have the same data, order, budget and learning
rates to choose from: the first seed tries them all, its best and the next lower one are trained with three seeds, and that of
the better mean with all. Where the best is the first or the last of those tried, the sweep may go on beyond it (`beyond`), for
each method by the same rule. An ablation changes one thing, so it has the rate of its method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..bench.workload import Device, Dtype
from ..eval.needle import Grid
from ..eval.tasks import Suite
from ..train.recipe import Recipe, recipe_from_dict

Seeds = Mapping[str, tuple[int, ...]]  # by method

BASELINES = ("softmax", "retnet", "mamba2")
CORE = ("sgla", "rla", "gdn", "rdn")
ABLATIONS = ("nofit", "tied", "sum", "noclip", "logcosh")
VARIANTS = (*(f"{method}-{name}" for method in ("rla", "rdn") for name in ABLATIONS), "rla-nonorm")
BEYOND = ("rdn-nofit", "rla-logcosh", "rdn-logcosh", "rla-clip0.25", "rla-clip4")  # of which the paper says nothing


@dataclass(frozen=True)
class Study:
    recipe: Recipe
    seeds: Seeds
    rates: tuple[float, ...]  # ascending
    beyond: int = 0  # rates to try beyond these, one at a time, each by the factor between the last two at that end

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("rates: expected at least one learning rate; got none")
        if list(self.rates) != sorted(set(self.rates)):
            raise ValueError(f"rates: expected ascending learning rates; got {self.rates}")
        for method, seeds in self.seeds.items():
            if not seeds:
                raise ValueError(f"seeds: expected at least one for {method}; got none")

    def parent(self, method: str) -> str:
        """The method that this one is an ablation of, if that is in the study, otherwise itself."""
        base = method.split("-")[0]
        return base if base in self.seeds else method


@dataclass(frozen=True)
class Timing:
    """What is timed: `rla bench kernels`, `decode` and `train` with these options."""

    lengths: tuple[int, ...]
    heads: int
    dim: int
    seconds: float
    device: Device = "cpu"
    dtype: Dtype = "float32"
    positions: tuple[int, ...] = (128, 4096)  # of decoding
    cycle: int = 8
    train_lengths: tuple[int, ...] = ()  # empty: training is not timed
    train_preset: str = "tiny"
    train_tokens: int = 4096
    train_vocabulary: int = 4096


@dataclass(frozen=True)
class Evaluation:
    """`rla eval` of the language models, one seed of each method unless `every_seed`."""

    suite: Suite
    grid: Grid
    every_seed: bool = False


@dataclass(frozen=True)
class Scale:
    name: str
    words: str  # what it is, for the page
    timing: Timing
    language: Study
    ablations: Study  # with the language study's recipe it shares its runs
    mqar: Study
    evaluation: Evaluation
    repeats: Mapping[str, Study] = field(default_factory=dict)  # the language study once more, by what differs

    def with_data(self, data: str) -> Scale:
        """With the language models trained on this text."""

        def on(study: Study) -> Study:
            return replace(study, recipe=replace(study.recipe, data=replace(study.recipe.data, path=data)))

        repeats = {name: on(study) for name, study in self.repeats.items()}
        return replace(self, language=on(self.language), ablations=on(self.ablations), repeats=repeats)


def seeds(methods: tuple[str, ...], count: int) -> Seeds:
    """The first seeds for each method."""
    return dict.fromkeys(methods, tuple(range(count)))


def _mqar(pairs: list[int], lengths: list[int], steps: int) -> Recipe:
    """Two heads of 32 x 32; with the usual small initial weights nothing is learnt in so few steps."""
    sequences, longest = 64, max(lengths)
    return recipe_from_dict(
        {
            "name": "mqar",
            "model": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "initializer_range": 0.1,
            },
            "data": {"path": "mqar", "mqar": {"pairs": pairs, "lengths": lengths, "vocab_size": 256, "examples": 512}},
            "schedule": {
                "batch_tokens": sequences * longest,
                "total_tokens": steps * sequences * longest,
                "warmup_tokens": steps * sequences * longest // 15,
            },
            "optimizer": {"lr": 1e-2, "min_lr": 1e-4},
            "parallel": {"micro_sequences": sequences},
            "checkpoint": {"every": 200, "keep": 1},
            "log": {"every": 25, "evaluate_every": max(1, steps // 6), "probe_every": 0},
        }
    )


def _demo() -> Scale:
    text = {
        "name": "demo",
        "model": {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.02,
        },
        "data": {"length": 256},
        "schedule": {"batch_tokens": 4_096, "total_tokens": 409_600, "warmup_tokens": 40_960},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3},
        "parallel": {"micro_sequences": 16},
        "checkpoint": {"every": 50, "keep": 1},
        "log": {"every": 2, "evaluate_every": 20, "evaluate_tokens": 65_536, "probe_every": 10},
    }
    language = Study(recipe_from_dict(text), seeds(CORE, 3), (1e-2,))
    variants = ("rla-nofit", "rla-noclip", "rla-nonorm", "rdn-noclip")
    return Scale(
        "demo",
        "models of about 0.1 million parameters, trained for a minute or less: a look at the machinery, not evidence",
        Timing((1024, 2048, 4096, 8192), 4, 128, 0.2, train_lengths=(512, 4096), train_vocabulary=512),
        language,
        replace(language, seeds=seeds(("rla", "rdn", *variants), 1)),
        Study(_mqar([4, 8], [32], 600), seeds(CORE, 1), (1e-2,)),
        Evaluation("needle", Grid(lengths=(512, 1024), depths=3, samples=2)),
    )


def _small() -> Scale:
    text = {
        "name": "small",
        "model": {
            "preset": "small",
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "initializer_range": 0.02,
        },
        "data": {"path": "", "length": 512},
        "schedule": {"batch_tokens": 2_048, "total_tokens": 819_200, "warmup_tokens": 81_920},
        "optimizer": {"lr": 2e-3, "min_lr": 2e-4},
        "parallel": {"micro_sequences": 4},
        "checkpoint": {"every": 100, "keep": 1},
        "log": {"every": 10, "evaluate_every": 200, "evaluate_tokens": 262_144, "probe_every": 20},
    }
    language = Study(recipe_from_dict(text), {**seeds(CORE, 5), **seeds(BASELINES, 2)}, (1e-3, 2e-3, 4e-3, 8e-3), beyond=2)
    recipe = language.recipe
    quarter = replace(  # of the tokens a step, so four times the steps
        recipe,
        schedule=replace(recipe.schedule, batch_tokens=512),
        parallel=replace(recipe.parallel, micro_sequences=1),
        checkpoint=replace(recipe.checkpoint, every=400),
        log=replace(recipe.log, every=40, evaluate_every=800, probe_every=80),
    )
    return Scale(
        "small",
        "models of 2 million parameters, trained on two cores for some minutes each",
        Timing(
            (1024, 2048, 4096, 8192, 16384),
            16,
            128,
            1.0,
            positions=(128, 32768),
            cycle=48,
            train_lengths=(2048, 8192),
            train_preset="small",
            train_tokens=8192,
        ),
        language,
        replace(language, seeds={**seeds(("rla", "rdn", *VARIANTS), 3), **seeds(BEYOND, 2)}),
        Study(
            _mqar([4, 8, 16, 32], [64, 64, 64, 128], 1500),
            {**seeds(CORE, 8), **seeds(("softmax",), 2)},
            (3e-3, 1e-2, 3e-2),
        ),
        Evaluation("needle", Grid(lengths=(512, 1024, 2048), depths=5, samples=5), every_seed=True),
        {"more-steps": Study(quarter, {**seeds(CORE, 8), **seeds(("mamba2",), 2)}, (2e-3, 4e-3), beyond=1)},
    )


def _paper() -> Scale:
    text = {
        "name": "paper-1.5b",
        "model": {"preset": "paper", "initializer_range": 0.006, "vocab_size": 200_064},
        "data": {"path": "", "length": 4096},
        "schedule": {"batch_tokens": 4_194_304, "warmup_tokens": 500_000_000, "total_tokens": 100_000_000_000},
        "optimizer": {"lr": 3e-4, "min_lr": 3e-5, "weight_decay": 0.1, "clip": 1.0},
        "parallel": {
            "device": "cuda",
            "precision": "bfloat16",
            "micro_sequences": 4,
            "activation_checkpointing": True,
            "compile": True,
        },
        "checkpoint": {"every": 500, "keep": 3, "keep_every": 5_000},
        "log": {"every": 10, "evaluate_every": 500, "evaluate_tokens": 4_194_304, "probe_every": 500},
    }
    language = Study(recipe_from_dict(text), seeds((*BASELINES, *CORE), 1), (3e-4,))
    half = replace(language.recipe, schedule=replace(language.recipe.schedule, total_tokens=50_000_000_000))
    return Scale(
        "paper",
        "the paper's models, 1.5 billion parameters and 100 billion tokens",
        Timing((2048, 4096, 8192, 16384, 32768, 65536), 16, 128, 1.0, device="cuda", dtype="bfloat16", cycle=16),
        language,
        Study(half, seeds(("rla", "rdn", *VARIANTS), 1), language.rates),
        _small().mqar,
        Evaluation("paper", Grid()),
    )


SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (_demo(), _small(), _paper())}
