"""Scores and greedy continuations of many token sequences by one of our models, with shared prefixes computed once.

The edges of a prefix tree (trie.py) wait on a stack until their parent has run; a pass takes up to `batch_size` of those on its
top. Last in, first out: the children of the edges that have just run come next, so that at most about `batch_size` states for
each level of the tree are alive at a time.

Rows of a batch may continue prefixes of different lengths where all layers are linear: their states are of one size. With a
softmax layer in the model only rows with equally long prefixes share a pass.

Logits are computed only where something is predicted, log-probabilities in float32, their sums in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models import RLACache, RLAConfig, RLAForCausalLM
from ..models.cache import map_state
from ..models.configuration_rla import SOFTMAX
from ..nn import KVState
from .trie import SEGMENT, WORTH, Edge, build

LOGITS = 2**25  # logits that exist at a time


@dataclass
class Tokens:
    """How many tokens were asked for, each sequence counted whole; how many were run; how many were generated on top."""

    asked: int = 0
    computed: int = 0
    generated: int = 0

    def as_dict(self) -> dict[str, float]:
        saved = 1 - self.computed / self.asked if self.asked else 0.0
        return {"asked": self.asked, "computed": self.computed, "generated": self.generated, "saved": round(saved, 6)}


class Score(NamedTuple):
    logprob: float
    is_greedy: bool  # whether each token is the likeliest


def join(config: RLAConfig, caches: Sequence[RLACache]) -> RLACache:
    """One cache of the rows of several, copied."""
    joined = RLACache(config)
    for new, *old in zip(joined.layers, *(cache.layers for cache in caches), strict=True):
        columns = zip(*(layer.tensors() for layer in old), strict=True)  # in the order in which map_state visits them
        new.state = map_state(old[0].state, lambda _, left=columns: torch.cat(next(left)))  # type: ignore[misc]
    # A model of linear layers alone gets its positions told; their number of tokens may differ from row to row.
    joined.seen = caches[0].seen if SOFTMAX in config.mixers else 0
    return joined


def take_row(config: RLAConfig, cache: RLACache, row: int, length: int) -> RLACache:
    """A copy of one row, whose last real token is the one at `length`; keys and values of padding after it are left out."""
    taken = RLACache(config)
    for new, old in zip(taken.layers, cache.layers, strict=True):
        grows = isinstance(old.state, KVState)
        new.state = map_state(old.state, lambda x, g=grows: (x[row : row + 1, :length] if g else x[row : row + 1]).clone())  # type: ignore[misc]
    taken.seen = length
    return taken


class Engine:
    """A model, how it is batched, and the count of its tokens."""

    def __init__(
        self,
        model: RLAForCausalLM,
        *,
        batch_size: int = 8,
        reuse: bool = True,
        worth: int = WORTH,
        segment: int = SEGMENT,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1; got {batch_size}")
        self.model, self.config, self.batch_size = model, model.config, batch_size
        self.reuse, self.worth, self.segment = reuse, worth, segment
        self.on_progress = on_progress
        self.softmax = SOFTMAX in model.config.mixers
        self.tokens = Tokens()

    @torch.no_grad()
    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """For each (input, targets): how likely the targets are, the last of which follows the last token of the input."""
        roots, ends = self._edges([tokens for tokens, _ in requests])
        for i, ((tokens, targets), edge) in enumerate(zip(requests, ends, strict=True)):
            if not 0 < len(targets) <= len(tokens):
                raise ValueError(f"requests: expected 1 to {len(tokens)} targets in request {i}; got {len(targets)}")
            position, place = len(tokens) - 1, edge
            for target in reversed(targets):
                while position < place.start:
                    assert place.parent is not None
                    place = place.parent
                place.wanted.append((position - place.start, i, target))
                position -= 1
        total, greedy = np.zeros(len(requests)), np.ones(len(requests), dtype=bool)
        for batch, _, hidden in self._run(roots):
            self._predict(batch, hidden, total, greedy)
            self.on_progress(sum(len(edge.ends) for edge in batch))
        return [Score(float(a), bool(b)) for a, b in zip(total, greedy, strict=True)]

    @torch.no_grad()
    def generate(
        self, contexts: Sequence[Sequence[int]], *, max_tokens: int, stop: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """The likeliest tokens after each context, until `stop` says so of those generated; at most max_tokens."""
        results: list[list[int]] = [[] for _ in contexts]
        roots, _ = self._edges(contexts)
        ready: list[tuple[Edge, RLACache, int]] = []  # contexts that have been read: edge, state, first token

        def decode(count: int) -> None:
            rows = [ready.pop() for _ in range(count)]
            for (edge, _, _), tokens in zip(rows, self._decode(rows, max_tokens, stop), strict=True):
                for i in edge.ends:
                    results[i] = list(tokens)
                self.on_progress(len(edge.ends))

        for batch, cache, hidden in self._run(roots):
            for row, edge in enumerate(batch):
                if edge.ends:
                    logits = self.model.lm_head(hidden[row, len(edge.tokens) - 1])
                    state = take_row(self.config, cache, row, edge.end)
                    ready.append((edge, state, int(logits.argmax())))
            while len(ready) >= self.batch_size:
                decode(self.batch_size)
        if ready:
            decode(len(ready))
        return results

    def _edges(self, sequences: Sequence[Sequence[int]]) -> tuple[list[Edge], list[Edge]]:
        self.tokens.asked += sum(map(len, sequences))
        roots, ends = build(sequences, reuse=self.reuse, worth=self.worth, segment=self.segment)
        roots.sort(key=lambda edge: len(edge.tokens))  # the stack's top is its end: longest first
        return roots, ends

    def _run(self, roots: list[Edge]) -> Iterator[tuple[list[Edge], RLACache, Tensor]]:
        """Run every edge; yields batches with the cache after them and the hidden states [B, T, hidden]."""
        stack = list(roots)
        while stack:
            batch = self._take(stack)
            cache, hidden = self._pass(batch)
            yield batch, cache, hidden
            for row, edge in enumerate(batch):
                if edge.parent is not None:
                    edge.parent.waiting -= 1
                    if not edge.parent.waiting:
                        edge.parent.state = None
                if edge.children:
                    edge.state = take_row(self.config, cache, row, edge.end)
                    edge.waiting = len(edge.children)
                    stack += sorted(edge.children, key=lambda child: len(child.tokens))

    def _take(self, stack: list[Edge]) -> list[Edge]:
        """Up to batch_size edges from the top of the stack that can share a pass."""
        batch: list[Edge] = []
        left: list[Edge] = []
        first = stack[-1]
        for _ in range(min(len(stack), 8 * self.batch_size)):
            edge = stack.pop()
            fits = (edge.parent is None) == (first.parent is None) and (not self.softmax or edge.start == first.start)
            (batch if fits else left).append(edge)
            if len(batch) == self.batch_size:
                break
        stack += reversed(left)
        return batch

    def _pass(self, batch: list[Edge]) -> tuple[RLACache, Tensor]:
        lengths = [len(edge.tokens) for edge in batch]
        T, device = max(lengths), self.model.device
        ids = torch.zeros(len(batch), T, dtype=torch.int64)
        for row, edge in enumerate(batch):
            ids[row, : lengths[row]] = torch.as_tensor(edge.tokens)
        positions = torch.tensor([edge.start for edge in batch])[:, None] + torch.arange(T)
        parents = [edge.parent.state for edge in batch if edge.parent is not None]
        cache = join(self.config, parents) if parents else RLACache(self.config)
        mask = None
        if min(lengths) < T:
            mask = torch.arange(T) < torch.tensor(lengths)[:, None]
            mask = torch.cat((mask.new_ones(len(batch), cache.seen), mask), 1).to(device)
        self.tokens.computed += sum(lengths)
        hidden = self.model.model(
            ids.to(device), attention_mask=mask, position_ids=positions.to(device), past_key_values=cache
        ).last_hidden_state
        return cache, hidden

    def _predict(self, batch: list[Edge], hidden: Tensor, total: np.ndarray, greedy: np.ndarray) -> None:
        """Add what the edges want to know to the requests' totals."""
        T = hidden.shape[1]
        wanted = sorted((row * T + offset, i, token) for row, edge in enumerate(batch) for offset, i, token in edge.wanted)
        if not wanted:
            return
        places, owners, tokens = (np.array(column) for column in zip(*wanted, strict=True))
        rows, index = np.unique(places, return_inverse=True)
        flat = hidden.flatten(0, 1)
        step = max(1, LOGITS // self.config.vocab_size)
        for low in range(0, len(rows), step):
            a, b = np.searchsorted(index, (low, low + step))
            logits = self.model.lm_head(flat[torch.as_tensor(rows[low : low + step], device=flat.device)]).float()
            best, scale = logits.argmax(-1).cpu(), logits.logsumexp(-1)
            own, target = torch.as_tensor(index[a:b] - low), torch.as_tensor(tokens[a:b])
            chosen = logits[own.to(logits.device), target.to(logits.device)] - scale[own.to(logits.device)]
            np.add.at(total, owners[a:b], chosen.double().cpu().numpy())
            np.logical_and.at(greedy, owners[a:b], (best[own] == target).numpy())

    def _decode(
        self, rows: list[tuple[Edge, RLACache, int]], max_tokens: int, stop: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Continue each row token by token; rows that are done leave the batch."""
        generated: list[list[int]] = [[] for _ in rows]
        groups: dict[int, list[int]] = {}  # rows that can share a batch
        for i, (edge, _, _) in enumerate(rows):
            groups.setdefault(edge.end if self.softmax else 0, []).append(i)
        for members in groups.values():
            cache = join(self.config, [rows[i][1] for i in members])
            ends, tokens = [rows[i][0].end for i in members], [rows[i][2] for i in members]
            for step in range(max_tokens):
                for i, token in zip(members, tokens, strict=True):
                    generated[i].append(token)
                alive = [j for j, i in enumerate(members) if not stop(generated[i])] if step + 1 < max_tokens else []
                if not alive:
                    break
                if len(alive) < len(members):
                    cache.batch_select_indices(torch.tensor(alive))
                    members, ends, tokens = ([x[j] for j in alive] for x in (members, ends, tokens))
                ids = torch.tensor(tokens, device=self.model.device)[:, None]
                positions = torch.tensor(ends, device=self.model.device)[:, None] + step
                hidden = self.model.model(ids, position_ids=positions, past_key_values=cache).last_hidden_state
                tokens = self.model.lm_head(hidden[:, -1]).argmax(-1).tolist()
        self.tokens.generated += sum(map(len, generated))
        return generated
