"""The table of tasks: one row for each column of the paper's Tables 2 to 4, and the substitutes that files allow for.

The names are the harness's; those without a `folder` are ours, defined under yaml/. Few-shot numbers are the harness's
defaults, 0 throughout: the paper gives none. With a folder of files the data comes from there (sources.py); prompts and metrics
stay the harness's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from . import functions
from .sources import MissingData, Source, find, load, splits

Suite = Literal["language", "reasoning", "recall", "needle", "paper"]
YAML = Path(__file__).parent / "yaml"
MMLU_COLUMNS = ("question", "choices", "answer")
ARORA = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}  # how Arora et al. generate
_CLOZE = ("context", "question", "answers")


@dataclass(frozen=True)
class EvalTask:
    name: str
    suites: tuple[Suite, ...]
    source: Source | None  # what it evaluates; None: made, or a group
    folder: str | None = None  # of the harness's tasks
    group: bool = False  # of several tasks, pooled


def _hub(dataset: str, config: str | None, split: str, *columns: str) -> Source:
    return Source(dataset, config, split, columns)


_ROWS = (
    EvalTask(
        "wikitext",
        ("language",),
        _hub("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", "page"),
        "wikitext",
    ),
    EvalTask(
        "lambada_openai",
        ("language", "reasoning"),
        _hub("EleutherAI/lambada_openai", "default", "test", "text"),
        "lambada",
    ),
    EvalTask("gsm8k_ppl", ("language",), functions.GSM8K),
    EvalTask("humaneval_ppl", ("language",), functions.HUMANEVAL),
    EvalTask(
        "arc_challenge",
        ("reasoning",),
        _hub("allenai/ai2_arc", "ARC-Challenge", "test", "question", "choices", "answerKey"),
        "arc",
    ),
    EvalTask(
        "arc_easy",
        ("reasoning",),
        _hub("allenai/ai2_arc", "ARC-Easy", "test", "question", "choices", "answerKey"),
        "arc",
    ),
    EvalTask(
        "hellaswag",
        ("reasoning",),
        _hub("Rowan/hellaswag", None, "validation", "ctx_a", "ctx_b", "activity_label", "endings", "label"),
        "hellaswag",
    ),
    EvalTask("mmlu_continuation", ("reasoning",), None, "mmlu/continuation", group=True),
    EvalTask("piqa", ("reasoning",), _hub("baber/piqa", None, "validation", "goal", "sol1", "sol2", "label"), "piqa"),
    EvalTask(
        "social_iqa",
        ("reasoning",),
        _hub("lighteval/siqa", None, "validation", "context", "question", "answerA", "answerB", "answerC", "label"),
        "siqa",
    ),
    EvalTask(
        "winogrande",
        ("reasoning",),
        _hub("allenai/winogrande", "winogrande_xl", "validation", "sentence", "option1", "option2", "answer"),
        "winogrande",
    ),
    EvalTask("based_drop", ("recall",), _hub("hazyresearch/based_drop", None, "validation", *_CLOZE)),
    EvalTask("fda", ("recall",), _hub("hazyresearch/based-fda", "default", "validation", "text", "value"), "fda"),
    EvalTask("based_nq", ("recall",), _hub("hazyresearch/based_nq_2048", None, "validation", *_CLOZE)),
    EvalTask(
        "squad_completion",
        ("recall",),
        _hub("hazyresearch/based-squad", "default", "validation", "text", "value"),
        "squad_completion",
    ),
    EvalTask("swde", ("recall",), _hub("hazyresearch/based-swde-v2", "default", "validation", "text", "value"), "swde"),
    EvalTask("based_triviaqa", ("recall",), _hub("hazyresearch/based_triviaqa", None, "validation", *_CLOZE)),
    EvalTask("squad_questions", ("recall",), functions.SQUAD_QUESTIONS),
    EvalTask("nq_oracle", ("recall",), functions.NQ_ORACLE),
    EvalTask("needle", ("needle",), None),
    EvalTask("needle_pairs", ("needle",), None),
)
TASKS: Mapping[str, EvalTask] = {task.name: task for task in _ROWS}


def choose(suite: Suite | None, names: Sequence[str], *, data: bool) -> list[EvalTask]:
    """The tasks of a suite and those named. `data`: whether there is a folder of files; some tasks exist as files alone."""
    for name in names:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"--tasks: unknown task {name!r}.{hint} Known: {', '.join(TASKS)}")
    chosen = dict.fromkeys(names)
    if suite is not None:
        for task in _ROWS:
            only_files = task.source is not None and task.source.is_local
            if (suite == "paper" or suite in task.suites) and (data or not only_files):
                chosen[task.name] = None
    if not chosen:
        raise ValueError(
            f"--suite, --tasks: expected a suite ({', '.join(get_args(Suite))}) or tasks, as in --tasks wikitext,piqa"
        )
    return [TASKS[name] for name in chosen]


def manager(tasks: Iterable[EvalTask], metadata: dict[str, Any]) -> Any:
    """The harness's task manager, for these tasks alone: reading all its definitions takes half a minute."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(root / task.folder for task in tasks if task.folder is not None)
    return lm_eval.tasks.TaskManager(include_path=[YAML, *folders], include_defaults=False, metadata=metadata)


def subjects(task: EvalTask, known: Any) -> dict[str, Source]:
    """The tasks of a group and their data."""
    entries = (known.task_index[name] for name in known.all_subtasks)
    return {
        entry.name: Source(entry.cfg["dataset_path"], entry.cfg["dataset_name"], entry.cfg["test_split"], MMLU_COLUMNS)
        for entry in entries
        if entry.name.startswith("mmlu_") and entry.name.endswith("_continuation")
    }


def files(task: EvalTask, known: Any, data: Path) -> list[Path]:
    """The files that a task evaluates; MissingData if one is not there."""
    if not task.group:
        return [] if task.source is None else find(data, task.source)
    found, missing = [], []
    wanted = subjects(task, known)
    for source in wanted.values():
        try:
            found += find(data, source)
        except MissingData as error:
            missing.append(str(error))
    if missing:
        raise MissingData(f"{len(missing)} of {len(wanted)} subjects are missing, the first: {missing[0]}")
    return found


def build(task: EvalTask, known: Any, data: Path | None) -> dict[str, Any]:
    """The harness's task objects by name, with their data read: from files, or from the hub."""
    if data is not None and task.group:
        built = {name: _from_files(name, source, known, data) for name, source in subjects(task, known).items()}
    elif data is None or task.source is None or "custom_dataset" in known.task_index[task.name].cfg:
        built = known.load([task.name])["tasks"]  # a data function of ours looks for the folder in the metadata
    else:
        built = {task.name: _from_files(task.name, task.source, known, data)}
    if task.name == "squad_completion":
        # The harness means to do so, but its class takes the general defaults, 256 tokens up to an empty line, for given ones.
        built[task.name].set_config(key="generation_kwargs", value=dict(ARORA))
    return built


def _from_files(name: str, source: Source, known: Any, data: Path) -> Any:
    cfg = known.task_index[name].cfg
    if "class" in cfg:
        return _from_class(name, source, data)
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    rows = splits(data, source, (cfg.get(key) for key in keys))
    changes: dict[str, Any] = {key: None for key in keys if cfg.get(key) is not None and cfg[key] not in rows}
    changes |= {"custom_dataset": partial(_constant, rows), "dataset_kwargs": None, "task": name}
    loaded = known.load([{"group": "rla_files", "task": [changes]}])
    return loaded["tasks"][name]


def _constant(rows: dict[str, Any], **_metadata: Any) -> dict[str, Any]:
    return rows


def _from_class(name: str, source: Source, data: Path) -> Any:
    """A task that the harness defines as a class, which takes no configuration."""
    from lm_eval.tasks.fda.task import FDA
    from lm_eval.tasks.squad_completion.task import SQUADCompletion
    from lm_eval.tasks.swde.task import SWDE

    stock = {"fda": FDA, "squad_completion": SQUADCompletion, "swde": SWDE}[name]
    rows = load(data, source)

    def download(self: Any, *args: Any, **kwargs: Any) -> None:
        self.dataset = {source.split: rows}

    task = type(stock.__name__, (stock,), {"download": download})()
    task.config.task = name
    return task
