"""RLACache: what a model keeps between calls of forward, layer by layer.

A linear layer keeps a `MixerState`, of a size that does not depend on the number of tokens; a softmax layer a `KVState`, which
grows. The cache counts tokens itself, so that it works for models without a softmax layer.

Taking tokens back. S and R forget which token put what into them, so `crop` can't cut a linear layer's state. While recording
(`activate_past_recording`, which assisted decoding calls), each layer also remembers its state and input of the calls since the
last crop; `crop` goes back to the state before and runs the layer again over the tokens that stay. `copy` makes a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..nn import KVState, MixerState
from ..ops import State
from .configuration_rla import SOFTMAX, RLAConfig

LayerState = MixerState | KVState  # of a linear layer | of a softmax layer


class Segment(NamedTuple):
    """One recorded call: the state before it, its length, and what the layer's state is after its first n tokens."""

    before: LayerState | None
    length: int
    replay: Callable[[LayerState | None, int], LayerState]


def map_state(state: LayerState | None, function: Callable[[Tensor], Tensor]) -> LayerState | None:
    """Apply a function of rows of a batch to every tensor of a state."""
    if state is None:
        return None
    if isinstance(state, KVState):
        return KVState(function(state.k), function(state.v))
    S, R = state.memory
    memory = State(_as_it_lies(function, S), None if R is None else _as_it_lies(function, R))
    return MixerState(None if state.conv is None else function(state.conv), memory)


def _as_it_lies(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Keep a state that lies by columns so: `rla.step` is fastest with the layout it was made in."""
    return function(x) if x.is_contiguous() else function(x.mT).mT


class RLACacheLayer:
    """The state of one layer. Transformers asks for the class attributes."""

    is_sliding = is_compileable = supports_early_init = False

    def __init__(self, mixer: str) -> None:
        self.mixer = mixer
        self.state: LayerState | None = None
        self.segments: list[Segment] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mixer!r})"

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        map_state(self.state, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = map_state(self.state, function)
        self.segments = []

    def crop(self, count: int) -> None:
        """Take `count` tokens back."""
        if isinstance(self.state, KVState):
            keep = self.state.k.shape[1] - count
            self.map(lambda x: x[:, :keep])
            return
        while count:
            if not self.segments:
                raise ValueError(
                    f"crop: layer {self.mixer!r} keeps one state for all tokens and can't take {count} of them back; call "
                    "cache.activate_past_recording() before those tokens, or take a cache.copy() and go back to it"
                )
            before, length, replay = self.segments.pop()
            removed = min(count, length)
            count -= removed
            self.state = before if removed == length else replay(before, length - removed)
        self.segments = []


class RLACache(Cache):
    """Cache of an `RLAModel`. `generate` and `forward(use_cache=True)` make one; make one yourself to keep it.

    Example:
        >>> cache = RLACache(model.config)
        >>> model(prompt, past_key_values=cache)
        >>> snapshot = cache.copy()
    """

    def __init__(self, config: RLAConfig) -> None:
        super().__init__(layers=[])
        self.layers: list[RLACacheLayer] = [RLACacheLayer(mixer) for mixer in config.mixers]  # type: ignore[assignment]
        self.signature = config.state_signature()
        self.seen = 0  # tokens of a row, padding included
        self.record_past = False

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first call."""
        return next((x.shape[0] for layer in self.layers for x in layer.tensors()), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(x.nbytes for layer in self.layers for x in layer.tensors())

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return self.record_past or all(layer.mixer == SOFTMAX for layer in self.layers)

    @property
    def is_linear(self) -> list[bool]:
        return [layer.mixer != SOFTMAX for layer in self.layers]

    def check(self, config: RLAConfig, batch: int) -> None:
        """Raise ValueError unless this cache can continue that model on a batch of that many rows."""
        if self.signature != config.state_signature():
            names = ", ".join(dict.fromkeys(layer.mixer for layer in self.layers))
            raise ValueError(
                f"past_key_values: this cache belongs to another model ({len(self.layers)} layers of {names}, or other heads); "
                "make one with RLACache(model.config)"
            )
        if self.batch_size not in (-1, batch):
            raise ValueError(
                f"past_key_values: this cache holds {self.batch_size} rows, the input {batch}; pass the same rows, "
                "or choose among them with cache.batch_select_indices or cache.batch_repeat_interleave"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row seen so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The same, by the name older versions of Transformers use."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.seen > 0

    def reset(self) -> None:
        """Forget every token."""
        for layer in self.layers:
            layer.state, layer.segments = None, []
        self.seen = 0

    def copy(self) -> RLACache:
        """An independent copy: a snapshot to go back to."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.layers = []
        for layer in self.layers:
            twin = RLACacheLayer(layer.mixer)
            twin.state, twin.segments = map_state(layer.state, torch.clone), list(layer.segments)
            new.layers.append(twin)
        return new

    def __deepcopy__(self, memo: dict) -> RLACache:
        return self.copy()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at these indices, in their order."""
        for layer in self.layers:
            layer.map(lambda x: x[indices] if indices.dtype == torch.bool else x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        for layer in self.layers:
            layer.map(lambda x: x.repeat_interleave(repeats, 0))

    def activate_past_recording(self) -> None:
        """From now on remember what `crop` needs, until `crop` is called."""
        self.record_past = True

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (a negative number, as everywhere in Transformers 5)."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected 0 or a negative number, of tokens to take back; got {tokens_to_remove}")
        if -tokens_to_remove > self.seen:
            raise ValueError(f"crop: the cache holds {self.seen} tokens; can't take {-tokens_to_remove} back")
        for layer in self.layers:
            layer.crop(-tokens_to_remove)
        self.seen += tokens_to_remove
