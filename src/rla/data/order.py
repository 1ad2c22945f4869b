"""Numbers that are a pure function of where they are used: a hash of counters, and a permutation without a table.

`mix` is the finaliser of splitmix64. `permute` is a Feistel network over the smallest power of two that holds n, walked along
its cycle until the value falls below n again (each index takes less than two walks on average): a bijection of 0..n-1 for every
key, in constant memory, so that 100 billion tokens are shuffled as cheaply as ten. All on uint64 arrays, which wrap around.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64: 2**64 over the golden ratio
ROUNDS = 8


def words(values: object) -> Words:
    """Integers (an array or nested sequence, negative ones wrap) as uint64, at least one-dimensional."""
    array = np.atleast_1d(np.asarray(values))
    return array.astype(np.uint64) if array.dtype == np.uint64 else array.astype(np.int64).astype(np.uint64)


def mix(x: Words) -> Words:
    """A well-stirred 64-bit word for each; a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream(*counters: object) -> Words:
    """One word for each tuple of integers, broadcast: `stream(seed, step, row)` names a stream of random numbers."""
    state = np.zeros(1, np.uint64)
    for counter in counters:
        state = mix((state ^ words(counter)) + GOLDEN)
    return state


def uniform(x: Words) -> NDArray[np.float64]:
    """Numbers strictly between 0 and 1."""
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def below(x: Words, n: int) -> NDArray[np.int64]:
    """Integers in 0..n-1 for n up to 2**32, from the upper half of each word."""
    return (((x >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)).astype(np.int64)


def permute(index: object, n: int, key: object) -> NDArray[np.int64]:
    """Where each index in 0..n-1 goes under the permutation that its key chooses; `index` and `key` broadcast."""
    flat, keys = np.broadcast_arrays(words(index), words(key))
    shape, x, keys = flat.shape, flat.ravel().copy(), keys.ravel()
    if x.size and int(x.max()) >= n:
        raise ValueError(f"index: expected numbers below n = {n}; got {int(x.max())}")
    bits = max(1, (n - 1).bit_length())
    walking = np.arange(x.size)
    while walking.size:
        x[walking] = _feistel(x[walking], bits, keys[walking])
        walking = walking[x[walking] >= n]
    return x.astype(np.int64).reshape(shape)


def _feistel(x: Words, bits: int, key: Words) -> Words:
    low = np.uint64(bits - bits // 2)
    left_mask, right_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << int(low)) - 1)
    left, right = x >> low, x & right_mask
    for i in range(ROUNDS):
        key = key + GOLDEN
        if i % 2:
            left = left ^ (mix(right ^ key) & left_mask)
        else:
            right = right ^ (mix(left ^ key) & right_mask)
    return (left << low) | right
