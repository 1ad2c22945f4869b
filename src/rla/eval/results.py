"""Result files of `rla eval`, and the paper's tables made from them.

A result file is JSON: the model (hash, sizes), how it was run, versions and machine, and for each task its version, number of
samples, metrics with standard errors, and how many tokens were computed. `table` puts several of them beside the paper's own
numbers (paper.json), whose rows are marked as the paper's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..data.writer import write_durably

FORMAT = 1
KIND = "rla eval"


@dataclass(frozen=True)
class Column:
    header: str
    unit: str  # as the paper prints it: ppl, acc, acc_n
    task: str
    metric: str

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of 1, which tables show in per cent."""
        return self.unit != "ppl"


_REASONING = (
    Column("ARC-C", "acc_n", "arc_challenge", "acc_norm"),
    Column("ARC-E", "acc", "arc_easy", "acc"),
    Column("HellaSwag", "acc_n", "hellaswag", "acc_norm"),
    Column("LAMB", "acc", "lambada_openai", "acc"),
    Column("MMLU", "acc_n", "mmlu_continuation", "acc_norm"),
    Column("PIQA", "acc", "piqa", "acc"),
    Column("SIQA", "acc", "social_iqa", "acc"),
    Column("Wino", "acc", "winogrande", "acc"),
)
_WIKI = Column("Wiki", "ppl", "wikitext", "word_perplexity")
_LAMBADA = Column("LAMB", "ppl", "lambada_openai", "perplexity")
COLUMNS: Mapping[int, tuple[Column, ...]] = {
    2: (_WIKI, _LAMBADA, *_REASONING),
    3: (
        Column("DROP", "acc", "based_drop", "contains"),
        Column("FDA", "acc", "fda", "contains"),
        Column("NQ", "acc", "based_nq", "contains"),
        Column("SQD", "acc", "squad_completion", "contains"),
        Column("SWDE", "acc", "swde", "contains"),
        Column("TQA", "acc", "based_triviaqa", "contains"),
        Column("NIAH", "acc", "needle", "acc"),
    ),
    4: (
        _WIKI,
        _LAMBADA,
        Column("GSM8k", "ppl", "gsm8k_ppl", "perplexity"),
        Column("HumanEval", "ppl", "humaneval_ppl", "perplexity"),
    ),
    5: _REASONING,
}
AVERAGED = (2, 3, 5)  # tables whose last column is the mean of the shares


@dataclass(frozen=True)
class Cell:
    value: float  # as the table shows it: perplexity, or per cent
    stderr: float | None = None
    n: int | None = None
    limited: bool = False  # measured on a part of the data
    digits: int = 1

    def __str__(self) -> str:
        error = "" if self.stderr is None else f" ±{self.stderr:.{self.digits}f}"
        return f"{self.value:.{self.digits}f}{error}{'*' if self.limited else ''}"


@dataclass(frozen=True)
class Row:
    model: str
    source: Literal["measured", "paper"]
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """`rows` have a cell for each header; None where nothing was measured."""

    number: int
    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]


def read(path: str | Path) -> dict[str, Any]:
    """A result file; ValueError if it is none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a result of `rla eval`: {error}") from error
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise ValueError(f"{path}: not a result of `rla eval`")
    if result.get("format") != FORMAT:
        raise ValueError(f"{path}: its format is {result.get('format')}; this version of rla reads {FORMAT}")
    return result


def write(path: Path, result: Mapping[str, Any]) -> None:
    """The whole file at once, in the place of the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def table(number: int, results: Mapping[str, Mapping[str, Any]], *, paper: bool = True) -> Table:
    """One of the paper's tables: a row for each result, by label, then the paper's own rows."""
    if number not in COLUMNS:
        raise ValueError(f"number: expected one of {', '.join(map(str, COLUMNS))}; got {number}")
    columns, printed = COLUMNS[number], paper_numbers()[str(number)]
    headers = tuple(f"{column.header} {column.unit}" for column in columns)
    rows = [
        Row(label, "measured", _with_average(number, [_cell(result, c) for c in columns])) for label, result in results.items()
    ]
    if paper:
        for model, values in printed["models"].items():
            digits = [1 if c.is_share else 2 for c in columns] + [2] * (number in AVERAGED)
            cells = tuple(Cell(value, digits=d) for value, d in zip(values, digits, strict=True))
            rows.append(Row(model, "paper", cells))
    return Table(number, printed["caption"], headers + (("Avg",) if number in AVERAGED else ()), tuple(rows))


def paper_numbers() -> dict[str, Any]:
    """The numbers printed in the paper's Tables 2 to 5, in the order of the columns."""
    return json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))


def _cell(result: Mapping[str, Any], column: Column) -> Cell | None:
    task = result["tasks"].get(column.task)
    if task is None:
        return None
    metric, scale = task["metrics"][column.metric], 100 if column.is_share else 1
    stderr = None if metric["stderr"] is None else scale * metric["stderr"]
    limited = result["run"]["limit"] is not None
    return Cell(scale * metric["value"], stderr, task["n"], limited, 1 if column.is_share else 2)


def _with_average(number: int, cells: Sequence[Cell | None]) -> tuple[Cell | None, ...]:
    if number not in AVERAGED:
        return tuple(cells)
    shares = [cell for cell, column in zip(cells, COLUMNS[number], strict=True) if column.is_share]
    if any(cell is None for cell in shares):
        return (*cells, None)
    known = [cell for cell in shares if cell is not None]
    mean = Cell(sum(c.value for c in known) / len(known), limited=any(c.limited for c in known), digits=2)
    return (*cells, mean)


def standard_error(items: Sequence[Any], aggregation: str) -> float | None:
    """Of a metric over samples: `mean`, or a perplexity or bits per byte by the delta method on the ratio of two sums.

    Perplexity is exp(r), r = sum(-logprob) / sum(weight); the variance of r is that of a ratio estimator.
    """
    n = len(items)
    if n < 2:
        return None
    if aggregation == "mean":
        mean = sum(items) / n
        return math.sqrt(sum((x - mean) ** 2 for x in items) / (n - 1) / n)
    if aggregation not in ("perplexity", "weighted_perplexity", "bits_per_byte"):
        return None
    pairs = [(-x, 1.0) if aggregation == "perplexity" else (-x[0], x[1]) for x in items]
    weight = sum(w for _, w in pairs)
    ratio = sum(x for x, _ in pairs) / weight
    error = math.sqrt(n / (n - 1) * sum((x - ratio * w) ** 2 for x, w in pairs)) / weight
    return error / math.log(2) if aggregation == "bits_per_byte" else error * math.exp(ratio)
