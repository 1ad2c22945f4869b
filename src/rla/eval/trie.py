"""Which tokens of many sequences to compute once: a tree of shared prefixes.

    the haystack | question 1            edge 0: the haystack, computed once
    the haystack | question 2            edges 1, 2, 3: a question each, continued from edge 0's state
    the haystack | question 3

An edge is a piece of tokens that is run in one pass from its parent's state. A shared piece shorter than `worth` tokens is not
worth a pass of its own and is computed with each sequence; a piece longer than `segment` is cut, so that memory is bounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WORTH = 16
SEGMENT = 2048


@dataclass(eq=False)
class Edge:
    parent: Edge | None
    start: int  # tokens before it
    tokens: Sequence[int]
    children: list[Edge] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # sequences whose last token is this edge's last
    # What is predicted from its positions: offset, who wants to know, token.
    wanted: list[tuple[int, int, int]] = field(default_factory=list)
    state: Any = None  # after its last token, while an edge waits for it
    waiting: int = 0  # children that have not run

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def build(
    sequences: Sequence[Sequence[int]], *, reuse: bool = True, worth: int = WORTH, segment: int = SEGMENT
) -> tuple[list[Edge], list[Edge]]:
    """The edges without parent, and for each sequence the edge it ends with. Without reuse nothing is shared."""
    for name, number in (("worth", worth), ("segment", segment)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1; got {number}")
    roots: list[Edge] = []

    def extend(parent: Edge | None, tokens: Sequence[int]) -> Edge | None:
        for i in range(0, len(tokens), segment):
            edge = Edge(parent, 0 if parent is None else parent.end, tokens[i : i + segment])
            (roots if parent is None else parent.children).append(edge)
            parent = edge
        return parent

    ends: list[Edge | None] = [None] * len(sequences)
    if not reuse:
        for i, tokens in enumerate(sequences):
            ends[i] = extend(None, tokens)
    else:
        _build_shared(sequences, ends, extend, worth)
    done: list[Edge] = []
    for i, edge in enumerate(ends):
        if edge is None:
            raise ValueError(f"sequences: expected at least one token in each; sequence {i} is empty")
        edge.ends.append(i)
        done.append(edge)
    return roots, done


def _build_shared(sequences: Sequence[Sequence[int]], ends: list[Edge | None], extend: Any, worth: int) -> None:
    order = sorted(range(len(sequences)), key=lambda i: tuple(sequences[i]))
    groups: list[list[int]] = []  # sequences that are the same, in sorted order
    for i in order:
        if groups and tuple(sequences[groups[-1][0]]) == tuple(sequences[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    arrays = [np.asarray(sequences[group[0]], dtype=np.int64) for group in groups]
    common = np.zeros(len(groups), dtype=np.int64)  # tokens that a sequence shares with the one before
    for j in range(1, len(groups)):
        n = min(len(arrays[j - 1]), len(arrays[j]))
        differ = np.flatnonzero(arrays[j - 1][:n] != arrays[j][:n])
        common[j] = differ[0] if len(differ) else n
    pending: list[tuple[int, int, Edge | None]] = [(0, len(groups), None)] if groups else []
    while pending:
        low, high, parent = pending.pop()
        start = 0 if parent is None else parent.end
        tokens = sequences[groups[low][0]]
        if high - low == 1:
            edge = extend(parent, tokens[start:])
            for i in groups[low]:
                ends[i] = edge
            continue
        shared = int(common[low + 1 : high].min())
        if shared - start >= worth:
            parent = extend(parent, tokens[start:shared])
        cuts = low + 1 + np.flatnonzero(common[low + 1 : high] == shared)
        bounds = [low, *cuts.tolist(), high]
        pending += [(a, b, parent) for a, b in itertools.pairwise(bounds)]
