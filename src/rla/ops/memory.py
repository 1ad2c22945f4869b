"""Memory of large tensors, kept from one call to the next.

The system's allocator gives a block of 32 MB or more back at once. To get it again, zeroed page by page, takes a tenth of the
time of a kernel that fills it, and on a virtual machine that shares its memory with others several tenths. So the blocks of
such tensors wait here for the next of their size, as CUDA's do in torch. While they wait the system may take their pages when
it runs short; beyond an eighth of the machine's memory those that have waited longest are given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 32 << 20  # bytes: from here on glibc keeps nothing
PAGE = 2 << 20  # a huge page
SLACK = 8  # a block serves a tensor if at most one part in so many is left over

_KEEPS = sys.platform == "linux"
_idle: list[mmap.mmap] = []  # the one that has waited longest first
_lock = threading.RLock()  # reentrant: to free a tensor may run while a block is looked for, by a collection of garbage


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.empty on the CPU; a large one in memory that waits for the next when the tensor is gone."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE or not _KEEPS:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take(size)
    owner = (ctypes.c_char * size).from_buffer(block)  # lives as long as the tensor's storage
    weakref.finalize(owner, _give, block).atexit = False
    return torch.frombuffer(owner, dtype=dtype, count=count).resize_(shape)  # a view could not be written to in place by a user


def waiting() -> int:
    """Bytes that no tensor uses."""
    return sum(map(len, _idle))


def release() -> None:
    """Give back what no tensor uses."""
    with _lock:
        _idle.clear()


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
            return block
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
    _advise(block, mmap.MADV_FREE)  # its pages stay until the system needs them
    with _lock:
        _idle.append(block)
        while waiting() > _limit():
            _idle.pop(0)
