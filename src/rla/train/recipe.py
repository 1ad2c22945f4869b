"""Recipe: a training run as one TOML file.

    name = "tiny"
    [model]       what is trained: a preset's sizes, the mixer, and fields of RLAConfig that differ from the preset
    [data]        token shards, or the built-in text, or MQAR; the length of a sequence
    [schedule]    the budget in tokens: batch, warm-up, total
    [optimizer]   AdamW and gradient clipping
    [parallel]    precision, sharding, compilation: may change from one resume to the next, as may the sections below
    [checkpoint]  [log]  [guard]

Every field has a default; a field that is not known, or of another type, is an error that names it. `rla train` takes each as
an option too: `--optimizer.lr 1e-3`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ..models.configuration_rla import SIZES, SOFTMAX, RLAConfig


class RecipeError(ValueError):
    """A recipe that can't be understood or can't work; the message names the field."""


def _positive(section: str, values: Any, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and (value < 0 or (value == 0 and not zero)):
            raise RecipeError(f"{section}.{name}: expected a number {'of 0 or more' if zero else 'above 0'}; got {value}")


@dataclass(frozen=True)
class Model:
    """Sizes and mixer; a field that is not given is the preset's (see RLAConfig)."""

    preset: str = "tiny"
    """Sizes to start from: tiny, small, 340m, 1.5b, or paper, those of the paper's model with this mixer."""
    mixer: tuple[str, ...] = ("rdn",)
    """A method's name, softmax, or one name for each layer."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    linear_num_heads: int | None = None
    head_dim: int | None = None
    conv_size: int | None = None
    output_gate: bool = True
    rope_theta: float = 10000.0
    initializer_range: float = 0.006
    vocab_size: int | None = None
    """None: that of the data."""
    tie_word_embeddings: bool = True
    loss_chunk_size: int = 1024
    """Tokens whose logits exist at a time; 0: all."""
    backend: str | None = None
    """Of the op; None chooses the fastest."""

    def config(self, vocab_size: int, end_of_text: int | None = None) -> RLAConfig:
        """The model's configuration for data of that vocabulary."""
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise RecipeError(f"model.vocab_size: the data has {vocab_size} tokens; got {self.vocab_size}")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:]}
        fields = {name: value for name, value in fields.items() if value is not None}
        fields["vocab_size"] = self.vocab_size or vocab_size
        if end_of_text is not None:
            fields["eos_token_id"] = end_of_text
        mixer: Any = self.mixer[0] if len(self.mixer) == 1 else list(self.mixer)
        try:
            if self.preset == "paper":
                if len(self.mixer) > 1:
                    return RLAConfig.paper("rdn", mixer=mixer, **fields)
                return RLAConfig.paper("transformer" if mixer == SOFTMAX else mixer, **fields)
            if self.preset not in SIZES:
                raise ValueError(f"preset: expected one of {', '.join(SIZES)}, paper; got {self.preset!r}")
            return RLAConfig.preset(self.preset, mixer, **fields)
        except ValueError as error:
            raise RecipeError(f"model.{error}") from error


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (`data.path = "mqar"`): training examples are drawn from all of the tasks."""

    pairs: tuple[int, ...] = (4, 8, 16)
    """Numbers of key-value pairs."""
    lengths: tuple[int, ...] = (64,)
    """Length of each task's sequences; one for all, or one for each number of pairs."""
    vocab_size: int = 1024
    examples: int = 512
    """Examples of each task in the evaluation."""


@dataclass(frozen=True)
class Data:
    path: str = "builtin"
    """A folder of `rla prepare`, `builtin` (public-domain books in the package), or `mqar`."""
    validation: str | None = None
    """A folder to evaluate on. None: FOLDER/validation if it exists; the built-in text has its own."""
    tokenizer: str | None = None
    """For the built-in text, what to cut it with (None: bytes). Otherwise, if given, the data must have been made with it."""
    length: int = 512
    """Tokens of a sequence."""
    cross_documents: bool = True
    """Whether a sequence's later documents see its earlier ones."""
    mqar: Recall = field(default_factory=Recall)

    def __post_init__(self) -> None:
        _positive("data", self, "length")


@dataclass(frozen=True)
class Schedule:
    """In tokens: linear warm-up, then a cosine from optimizer.lr down to optimizer.min_lr at the last token."""

    batch_tokens: int = 16_384
    """Tokens of one step, over all processes."""
    total_tokens: int = 4_000_000
    warmup_tokens: int = 200_000

    def __post_init__(self) -> None:
        _positive("schedule", self, "batch_tokens", "total_tokens")
        _positive("schedule", self, "warmup_tokens", zero=True)
        if self.warmup_tokens > self.total_tokens:
            raise RecipeError(
                f"schedule.warmup_tokens: expected at most total_tokens = {self.total_tokens}; got {self.warmup_tokens}"
            )

    @property
    def steps(self) -> int:
        return math.ceil(self.total_tokens / self.batch_tokens)


@dataclass(frozen=True)
class Optimizer:
    lr: float = 3e-4
    min_lr: float = 3e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; vectors (norms, gates' A_log and dt_bias) have none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        _positive("optimizer", self, "lr", "eps")
        _positive("optimizer", self, "min_lr", "weight_decay", "clip", zero=True)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(
                    f"optimizer.{name}: expected a number from 0 up to, not including, 1; got {getattr(self, name)}"
                )
        if self.min_lr > self.lr:
            raise RecipeError(f"optimizer.min_lr: expected at most lr = {self.lr}; got {self.min_lr}")


@dataclass(frozen=True)
class Parallel:
    """How the work is laid out over processes and devices; none of it changes what is computed but for rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: weights and activations of the passes; master weights, reductions and the optimizer stay float32."""
    micro_sequences: int = 8
    """Sequences of one pass in each process; the batch is reached by accumulation."""
    replicas: int = 1
    """Groups of processes that each hold the whole model in shards (hybrid sharding); 1: sharded over all."""
    activation_checkpointing: bool = False
    compile: bool = False
    """torch.compile of each block."""

    def __post_init__(self) -> None:
        _positive("parallel", self, "micro_sequences", "replicas")


@dataclass(frozen=True)
class Checkpoint:
    every: int = 200
    """Steps between checkpoints. 0: only at the end, and when the run is stopped."""
    keep: int = 2
    """How many of the newest are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps are kept for good; 0: none."""

    def __post_init__(self) -> None:
        _positive("checkpoint", self, "every", "keep_every", zero=True)
        _positive("checkpoint", self, "keep")


@dataclass(frozen=True)
class Log:
    every: int = 10
    """Steps between rows of metrics.jsonl."""
    evaluate_every: int = 100
    """Steps between evaluations, one at the end aside; 0: none."""
    evaluate_tokens: int = 65_536
    """Tokens of an evaluation; 0: the whole split."""
    probe_every: int = 100
    """Steps between records of each layer's output norm and share of clipped residuals; 0: none."""
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = "none"

    def __post_init__(self) -> None:
        _positive("log", self, "every")
        _positive("log", self, "evaluate_every", "evaluate_tokens", "probe_every", zero=True)


@dataclass(frozen=True)
class Guard:
    """What to do with a step whose loss or gradient is not finite, or whose loss leaps."""

    nan: Literal["stop", "skip"] = "stop"
    spike: Literal["off", "stop", "skip"] = "off"
    spike_factor: float = 2.0
    """A leap: a loss above so many times the median of the last 64."""
    patience: int = 10
    """Skips in a row before the run stops after all."""

    def __post_init__(self) -> None:
        _positive("guard", self, "spike_factor", "patience")


@dataclass(frozen=True)
class Recipe:
    """A run; see the sections."""

    name: str = "run"
    out: str | None = None
    """Folder of the run; None: runs/NAME."""
    seed: int = 0
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    guard: Guard = field(default_factory=Guard)

    def __post_init__(self) -> None:
        if self.schedule.batch_tokens % self.length:
            raise RecipeError(
                f"schedule.batch_tokens: expected a multiple of the length of a sequence, {self.length}; "
                f"got {self.schedule.batch_tokens}"
            )

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return max(self.data.mqar.lengths) if self.data.path == "mqar" else self.data.length

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all processes."""
        return self.schedule.batch_tokens // self.length

    @property
    def folder(self) -> Path:
        return Path(self.out if self.out is not None else f"runs/{self.name}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def fixed(self) -> dict[str, Any]:
        """What makes the run what it is: the fields that a resumed run may not change, with dots in their names."""
        keys = ("seed", "model", "data", "schedule", "optimizer")
        flat = _flatten({key: value for key, value in self.to_dict().items() if key in keys})
        free = (
            "data.path",
            "data.validation",
            "model.backend",
            "model.loss_chunk_size",
        )  # the data are told by their fingerprint
        return {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items() if key not in free}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def load_recipe(path: str | Path) -> Recipe:
    """Read a TOML file, or the recipe.json of a run."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    path = Path(path)
    try:
        with path.open("rb") as file:
            tree = json.load(file) if path.suffix == ".json" else tomllib.load(file)
    except FileNotFoundError:
        near = sorted(str(p) for p in Path("recipes").glob("*.toml"))
        hint = f" There are: {', '.join(near)}" if near else ""
        raise RecipeError(f"{path}: no such recipe.{hint}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise RecipeError(f"{path}: not {path.suffix.strip('.').upper() or 'TOML'}: {error}") from error
    try:
        return recipe_from_dict({"name": path.stem, **tree})
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def recipe_from_dict(tree: dict[str, Any]) -> Recipe:
    """The recipe of nested dictionaries, as TOML and JSON give them; what is not given has its default."""
    return _build(Recipe, tree, "")


def _build(cls: Any, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise RecipeError(f"{where.rstrip('.')}: expected a section; got {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise RecipeError(f"{where}{key}: unknown field.{_nearest(where + key)}")
        values[key] = _convert(hints[key], value, where + key)
    return cls(**values)


def _nearest(name: str) -> str:
    """A hint for a misspelt section or field, or for the right field in another section."""
    tree = Recipe().to_dict()
    fields = list(_flatten(tree))
    near = [other for other in fields if other.split(".")[-1] == name.split(".")[-1]]
    if not near:
        sections = [key for key, value in tree.items() if isinstance(value, dict)]
        near = difflib.get_close_matches(name, fields if "." in name else [*sections, *fields], n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def _convert(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type of the field, or an error that says what was expected."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, name + ".")
    origin = get_origin(hint)
    if origin is types.UnionType:
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return None if value is None else _convert(inner, value, name)
    if origin is Literal:
        if value not in get_args(hint):
            near = difflib.get_close_matches(str(value), get_args(hint), n=1)
            hint_text = f" Did you mean {near[0]!r}?" if near else ""
            raise RecipeError(f"{name}: expected one of {', '.join(get_args(hint))}; got {value!r}.{hint_text}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise RecipeError(f"{name}: expected at least one value; got none")
        return tuple(_convert(get_args(hint)[0], item, name) for item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():  # 1e9 in TOML
        return int(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise RecipeError(f"{name}: expected {words[hint]}; got {value!r}")
    return value
