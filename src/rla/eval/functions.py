"""What the task definitions under yaml/ refer to: data, prompts and metrics.

A task's `metadata` reaches its data function: `pretrained` or `tokenizer` names the tokenizer, `data` a folder of files
(sources.py) to use instead of the hub. `lm_eval run` fills in the former itself; the latter it gets as
`--metadata '{"data": "DIR"}'`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .sources import Source, load

GSM8K = Source("openai/gsm8k", "main", "test", ("question", "answer"))
HUMANEVAL = Source("openai/openai_humaneval", "openai_humaneval", "test", ("prompt", "canonical_solution"))
SQUAD_QUESTIONS = Source("recall/squad_1000", None, "test", ("title", "context", "question", "answers"))
NQ_ORACLE = Source("recall/nq_oracle_2655", None, "test", ("title", "context", "question", "answers"))


@cache
def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer

    import rla.models  # noqa: F401  registers our configurations

    return AutoTokenizer.from_pretrained(name)


def tokenizer_from(metadata: dict[str, Any]) -> Any:
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, str):
        raise ValueError("metadata: expected the name of the model or of its tokenizer, as pretrained or tokenizer; got none")
    return tokenizer_of(name)


def _rows(source: Source, metadata: dict[str, Any]) -> Any:
    if metadata.get("data"):
        return load(Path(metadata["data"]), source)
    if source.is_local:
        raise ValueError(f'metadata: {source.dataset} is not on the hub; expected {{"data": a folder that holds it}}')
    import datasets

    return datasets.load_dataset(source.dataset, source.config, split=source.split)


def _with_tokens(rows: Any, text: Callable[[dict[str, Any]], str], metadata: dict[str, Any]) -> dict[str, Any]:
    """The rows as documents: what to predict, and how many tokens and bytes that is."""
    import datasets

    tokenizer = tokenizer_from(metadata)
    documents = [text(row) for row in rows]
    made = [{"text": x, "tokens": len(tokenizer.encode(x)), "bytes": len(x.encode())} for x in documents]
    return {"test": datasets.Dataset.from_list(made)}


def gsm8k(**metadata: Any) -> dict[str, Any]:
    """Question and answer in the form of the harness's gsm8k task."""
    return _with_tokens(_rows(GSM8K, metadata), lambda d: f"Question: {d['question']}\nAnswer: {d['answer']}", metadata)


def humaneval(**metadata: Any) -> dict[str, Any]:
    """Prompt and reference solution."""
    return _with_tokens(_rows(HUMANEVAL, metadata), lambda d: d["prompt"] + d["canonical_solution"], metadata)


def perplexities(doc: dict[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    return {"perplexity": (results[0], doc["tokens"]), "bits_per_byte": (results[0], doc["bytes"])}


def squad_questions(**metadata: Any) -> dict[str, Any]:
    return {"test": _rows(SQUAD_QUESTIONS, metadata)}


def nq_oracle(**metadata: Any) -> dict[str, Any]:
    return {"test": _rows(NQ_ORACLE, metadata)}


def question_prompt(doc: dict[str, Any]) -> str:
    """A passage, then a question on it: for data that is not in cloze form."""
    return f"{doc['title'].replace('_', ' ')}\n{doc['context'].strip()}\n\nQuestion: {doc['question'].strip()}\nAnswer:"


def cloze_prompt(doc: dict[str, Any]) -> str:
    """The passage without the cloze question that some rows repeat at its end, then the question."""
    context, question = doc["context"].strip(), doc["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return f"{context.strip().strip('.')}. {question}"


def trivia_prompt(doc: dict[str, Any]) -> str:
    """As cloze_prompt, without the marks of paragraphs, documents and titles."""
    return cloze_prompt({**doc, "context": re.sub(r"\[(?:PAR|DOC|TLE)\]", "", doc["context"])})


def first_answer(doc: dict[str, Any]) -> str:
    return f" {doc['answers'][0]}" if doc["answers"] else ""


def contains(doc: dict[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Whether one of the answers is in the generated text, whatever the case of its letters."""
    text = results[0].lower()
    return {"contains": int(any(answer.lower() in text for answer in doc["answers"]))}
