"""What the evaluation's tests share: a tiny model with a byte tokenizer in a folder, harness models, the fixtures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from model_common import tiny

FIXTURES = Path(__file__).parent / "fixtures" / "eval"
VOCAB = 257


def save_model(folder: Path, mixer: str = "rdn", **changes: Any) -> Path:
    from rla.data.tokenizer import load_tokenizer

    tiny(mixer, vocab_size=VOCAB, **changes).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


def harness_model(folder: Path, **options: Any) -> Any:
    from rla.eval.lm import RLAHarnessLM

    return RLAHarnessLM(str(folder), device="cpu", **options)


def stock_model(folder: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    import rla.models  # noqa: F401  registers the model family

    return HFLM(str(folder), device="cpu", **options)


def requests(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def fixtures_with_mmlu(folder: Path) -> Path:
    """A copy of the fixtures in which every subject of MMLU has the questions on astronomy."""
    from rla.eval.tasks import TASKS, manager, subjects

    shutil.copytree(FIXTURES, folder)
    questions = folder / "hub/cais/mmlu/astronomy/test.jsonl"
    for source in subjects(TASKS["mmlu_continuation"], manager([TASKS["mmlu_continuation"]], {})).values():
        target = folder / "hub/cais/mmlu" / str(source.config) / "test.jsonl"
        target.parent.mkdir(exist_ok=True)
        if target != questions:
            shutil.copy(questions, target)
    return folder
