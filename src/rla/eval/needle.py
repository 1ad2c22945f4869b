"""Needle in a haystack: sentences with a key and a value, hidden at some depth of a long text; the value is asked for.

    ... The miller painted a fence near the harbour. The special magic number for Oslo is 4170326. A girl found ...

    The special magic number for Oslo is  ->  4170326

`one` hides one needle, as the test the paper names does. `pairs` hides one at every depth of the same haystack and asks for
each in turn. The haystack is made of sentences drawn at random, or is a text file. A prompt has at most `length` tokens, the
generated ones included; the texts of all depths of a sample are the same but for the needles, so that they share their
beginning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench import style
from .functions import tokenizer_from

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = 10
SAMPLES = 5
ANSWER_TOKENS = 16  # as in yaml/needle.yaml

CITIES = (
    "Oslo Lima Cairo Quito Dakar Hanoi Seoul Kyiv Riga Sofia Tunis Accra Delhi Tokyo Paris Rome Vienna Madrid Lisbon Dublin "
    "Bern Prague Warsaw Athens Ankara Tehran Kabul Lagos Nairobi Havana Bogota Santiago Caracas Manila Jakarta Bangkok Perth "
    "Auckland Toronto Boston Denver Austin Seattle Chicago Atlanta Phoenix Memphis Detroit Houston Omaha"
)
KEYS = tuple(CITIES.split(" "))
WHO = "a girl|the miller|an old sailor|my neighbour|the baker|a tall stranger|the teacher|a young doctor|the gardener|her uncle"
DID = "painted|found|carried|sold|borrowed|repaired|forgot|counted|described|hid"
WHAT = "a fence|three boxes|the red umbrella|a wooden chair|some letters|an empty bottle|two lamps|the broken clock|a map"
WHERE = "near the harbour|behind the school|in the market|on the hill|by the river|after the storm|before breakfast|at noon"
NEEDLE = "The special magic number for {key} is {value}."
QUERY = "The special magic number for {key} is"


@dataclass(frozen=True)
class Grid:
    lengths: tuple[int, ...] = LENGTHS  # tokens of a prompt with its answer
    depths: int = DEPTHS  # evenly from the beginning to the end
    samples: int = SAMPLES  # haystacks for each length
    seed: int = 0
    haystack: str | None = None  # a text file

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths: expected numbers of at least 1; got {self.lengths or 'none'}")
        for name, most in (("depths", len(KEYS)), ("samples", None)):
            number = getattr(self, name)
            if number < 1 or (most and number > most):
                raise ValueError(f"{name}: expected at least 1{f' and at most {most}' if most else ''}; got {number}")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Grid:
        given = dict(metadata.get("needle") or {})
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"needle: unknown field {unknown[0]!r}; expected some of {', '.join(cls.__dataclass_fields__)}")
        return cls(**{**given, "lengths": tuple(given.get("lengths", LENGTHS))})

    def share(self, depth: int) -> float:
        """Where a depth lies, from 0 to 1."""
        return depth / (self.depths - 1) if self.depths > 1 else 0.5


def sentences(rng: random.Random, count: int) -> list[str]:
    """Random sentences without keys or numbers."""
    lists = [text.split("|") for text in (WHO, DID, WHAT, WHERE)]
    made = [" ".join(rng.choice(words) for words in lists) for _ in range(count)]
    return [f"{x[0].upper()}{x[1:]}." for x in made]


def hide(text: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """The text with each needle behind its share of the sentences."""
    places = [(round(share * len(text)), needle) for share, needle in needles]
    pieces = list(text)
    for place, needle in sorted(places, key=lambda x: x[0], reverse=True):
        pieces.insert(place, needle)
    return " ".join(pieces)


def fit(text: Sequence[str], needles: Sequence[tuple[float, str]], query: str, tokenizer: Any, length: int) -> int:
    """How many sentences of the text make a prompt of at most `length` tokens, by bisection; 0 if not even one does."""

    def tokens(count: int) -> int:
        return len(tokenizer.encode(f"{hide(text[:count], needles)}\n\n{query}")) + ANSWER_TOKENS

    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle - 1)
    return low


def documents(grid: Grid, tokenizer: Any, *, together: bool) -> list[dict[str, Any]]:
    """A row for each sample, length and depth. `together`: needles at all depths in one haystack."""
    source = None
    if grid.haystack is not None:
        words = Path(grid.haystack).read_text(encoding="utf-8").replace(". ", ".\n").split("\n")
        source = [" ".join(x.split()) for x in words if x.strip()]
    rows = []
    for sample in range(grid.samples):
        rng = random.Random(f"{grid.seed} {sample}")
        keys = rng.sample(KEYS, grid.depths)
        values = [str(rng.randrange(10**6, 10**7)) for _ in keys]
        pairs = [NEEDLE.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
        text = sentences(rng, max(grid.lengths) // 4) if source is None else source[rng.randrange(max(1, len(source) // 2)) :]
        for length in grid.lengths:
            longest = max((QUERY.format(key=key) for key in keys), key=len)
            spread = [(grid.share(depth), pair) for depth, pair in enumerate(pairs)]
            needles = spread if together else [(0.5, max(pairs, key=len))]
            count = fit(text, needles, longest, tokenizer, length)
            if count < grid.depths:
                raise ValueError(f"lengths: {length} tokens leave no room for a haystack and {len(needles)} needles")
            for depth, (key, value) in enumerate(zip(keys, values, strict=True)):
                haystack = hide(text[:count], spread if together else [spread[depth]])
                prompt = f"{haystack}\n\n{QUERY.format(key=key)}"
                rows.append({"length": length, "depth": grid.share(depth), "sample": sample, "value": value, "prompt": prompt})
    return rows


def one(**metadata: Any) -> dict[str, Any]:
    return _dataset(metadata, together=False)


def pairs(**metadata: Any) -> dict[str, Any]:
    return _dataset(metadata, together=True)


def _dataset(metadata: Mapping[str, Any], *, together: bool) -> dict[str, Any]:
    import datasets

    rows = documents(Grid.from_metadata(metadata), tokenizer_from(dict(metadata)), together=together)
    return {"test": datasets.Dataset.from_list(rows)}


def found(doc: dict[str, Any], results: Sequence[str]) -> dict[str, int]:
    return {"acc": int(doc["value"] in results[0])}


def cells(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Accuracy in each cell of the grid, from the harness's record of samples."""
    scores: dict[tuple[int, float], list[int]] = {}
    for sample in samples:
        scores.setdefault((sample["doc"]["length"], sample["doc"]["depth"]), []).append(sample["acc"])
    return [{"length": a, "depth": b, "acc": sum(x) / len(x), "n": len(x)} for (a, b), x in sorted(scores.items())]


@style.styled
def heat_map(path: Path, grid: Sequence[Mapping[str, float]], title: str) -> None:
    """Draw the cells: lengths from left to right, depths from top to bottom."""
    lengths, depths = sorted({c["length"] for c in grid}), sorted({c["depth"] for c in grid})
    values = [[float("nan")] * len(lengths) for _ in depths]
    for cell in grid:
        values[depths.index(cell["depth"])][lengths.index(cell["length"])] = 100 * cell["acc"]
    figure, axes = style.canvas(size=(2.6 + 0.9 * len(lengths), 1.6 + 0.4 * len(depths)))
    axis = axes[0, 0]
    axis.grid(False)
    image = axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:  # not NaN
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", color="black" if value > 60 else "white", size=9)
    axis.set_xticks(range(len(lengths)), [f"{x:,.0f}" for x in lengths])
    axis.set_yticks(range(len(depths)), [f"{100 * x:.0f} %" for x in depths])
    axis.set(xlabel="length (tokens)", ylabel="depth of the needle", title=title)
    figure.colorbar(image, ax=axis, label="retrieved (%)")
    style.save(figure, path)
