"""Memory of large tensors, kept from one call to the next.

The system's allocator gives a block of 32 MB or more back at once, and smaller ones when enough of them are free. To get it
again, zeroed page by page, takes a tenth of the time of a kernel that fills it, and on a virtual machine that shares its memory
with others several tenths. So the blocks of such tensors wait here for the next of their size, as CUDA's do in torch, in huge
pages where the system has them. When a tensor of another size is asked for, the system may from then on take the pages of those
that wait if it runs short; beyond an eighth of the machine's memory those that have waited longest are given back.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 4 << 20  # bytes: a kernel that fills so many takes milliseconds, to look for a block some ten microseconds
PAGE = 2 << 20  # a huge page
SLACK = 8  # a block serves a tensor if at most one part in so many is left over

_KEEPS = sys.platform == "linux"
_idle: list[mmap.mmap] = []  # the one that has waited longest first
_offered: set[int] = set()  # id of those that are the system's to take
_lock = threading.RLock()  # reentrant: to free a tensor may run while a block is looked for, by a collection of garbage


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.empty on the CPU; a large one in memory that waits for the next when the tensor is gone."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE or not _KEEPS:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take(size)
    owner = memoryview(block)  # lives as long as the tensor's storage
    weakref.finalize(owner, _give, block).atexit = False
    return torch.frombuffer(owner, dtype=dtype, count=count).resize_(shape)  # a view could not be written to in place by a user


def waiting() -> int:
    """Bytes that no tensor uses."""
    return sum(map(len, _idle))


def release() -> None:
    """Give back what no tensor uses."""
    with _lock:
        _idle.clear()
        _offered.clear()


def _advise(block: mmap.mmap, what: int) -> None:
    with contextlib.suppress(OSError):  # a system that doesn't know it does without
        block.madvise(what)


def _limit() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


def _take(size: int) -> mmap.mmap:
    with _lock:
        fitting = [block for block in _idle if size <= len(block) <= size + size // SLACK + PAGE]
        if fitting:
            block = min(reversed(fitting), key=len)  # of equals the one that was used last
            _idle.remove(block)
            _offered.discard(id(block))
            return block
        for block in list(_idle):
            if id(block) not in _offered:
                _advise(block, mmap.MADV_FREE)  # its pages stay until the system needs them
                _offered.add(id(block))
    rounded = -(-size // PAGE) * PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        block = mmap.mmap(-1, rounded, flags=flags)
    except OSError:
        release()
        block = mmap.mmap(-1, rounded, flags=flags)
    _advise(block, mmap.MADV_HUGEPAGE)
    return block


def _give(block: mmap.mmap) -> None:
    with _lock:
        _idle.append(block)
        while waiting() > _limit():
            _offered.discard(id(_idle.pop(0)))
