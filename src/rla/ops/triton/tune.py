"""Opt-in search, RLA_TRITON_AUTOTUNE=1: the warps and pipeline stages of a kernel are timed on its first launch and remembered.

The rule of config.py is what everybody gets: it needs no search, and the same input gives the same bits in every process. A
search may pick another row in another process, and with it other roundings. Its key is what a kernel is compiled for (the
method, K, V, dtype, device, which inputs there are), never the length, the batch or the number of sequences: what was chosen
for the first batch serves all others. Chunks and blocks of columns stay the rule's own, so the buffers between kernels do too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable

from .config import Tile

MAX_WARPS = 8  # more than two for 16 rows of a chunk compute the same twice
_chosen: dict[tuple[Hashable, ...], Tile] = {}


def enabled() -> bool:
    return os.environ.get("RLA_TRITON_AUTOTUNE") == "1"


def candidates(tile: Tile) -> list[Tile]:
    """The rule's own tile first; twice and half its warps; one pipeline stage more, and one less."""
    warps = [w for w in (tile.warps * 2, tile.warps // 2) if 1 <= w <= MAX_WARPS]
    stages = [s for s in (tile.stages + 1, tile.stages - 1) if s >= 1]
    return [
        tile,
        *(dataclasses.replace(tile, warps=w) for w in warps),
        *(dataclasses.replace(tile, stages=s) for s in stages),
    ]


def choose(
    key: tuple[Hashable, ...], tile: Tile, launch: Callable[[Tile], None], time: Callable[[Callable[[], None]], float]
) -> Tile:
    """The fastest of the candidates by `time`, which takes a launch and gives its milliseconds; from memory the second time.

    A candidate that needs more than the device has is left out; what the rule's own raises is raised.
    """
    if key not in _chosen:
        times = {}
        for candidate in candidates(tile):
            try:
                times[candidate] = time(functools.partial(launch, candidate))
            except Exception:
                if candidate == tile:
                    raise
        _chosen[key] = min(times, key=times.__getitem__)
    return _chosen[key]
