"""ResidualAttention: the one token-mixing layer, for every linear method.

    q, k, v     = W x                                          heads of head_dim channels
    q, k, v     = silu(conv(q, k, v))                          short convolution; not for methods with rate "one"
    a, b, c     = gates(x)                                     alpha, beta, gamma: see gates.py
    o           = attend(q, k, v, a, b, c)                     q and k L2-normalised there if the method says so
    y           = W_o [ RMSNorm(o, per head) * silu(W_g x) ]

What differs between methods, and what is simplified of their papers' layers (sizes are the family's throughout: as many key
heads as value heads, keys and values of head_dim channels):

| methods | here | simplified |
|---|---|---|
| `linear` | no convolution, no activation, q scaled by head_dim^-1/2 | no feature map; RMSNorm instead of the normaliser |
| `retnet` | as `linear`; fixed decays, rotary q and k | values as wide as keys; RMSNorm with weights instead of group norm |
| `gla` | as `linear`; decay per key channel by a rank-16 map | keys as wide as values |
| `mamba2` | convolution, SiLU; beta = dt, skip D * v | own q and k for each head; the norm comes before the gate; no biases |
| `deltanet`, `gdn`, `sgla`, `rla`, `rdn` and variants | convolution, SiLU, L2 norm of q and k | - |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..method import Method, get_method
from ..ops import State, attend, step
from .conv import ShortConvolution
from .gates import Gates
from .norms import GatedRMSNorm, no_weight_decay
from .packing import positions_of
from .rotary import check_rotary_dim, rotate


class MixerState(NamedTuple):
    """What N sequences leave behind in a layer, of a size that does not depend on their lengths."""

    conv: Tensor | None  # last inputs of the convolution, [N, W - 1, channels]; None: no convolution
    memory: State  # S and R, [N, H, K, V] each


def resolve_head_dim(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1; got {num_heads}")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"head_dim: hidden_size = {hidden_size} is not a multiple of num_heads = {num_heads}; give head_dim, "
                "which need not be hidden_size / num_heads, or other sizes"
            )
        return hidden_size // num_heads
    if head_dim < 1:
        raise ValueError(f"head_dim: expected at least 1; got {head_dim}")
    return head_dim


def faithful_conv_size(method: str | Method) -> int:
    """The short convolution a method's own paper has: 4 inputs, or 0 (none) for the older methods, whose rate is one."""
    return 0 if get_method(method).rate == "one" else 4


class ResidualAttention(nn.Module):
    """Linear attention with gates, short convolution, norm and output gate, for any `rla.Method`.

    Args:
        hidden_size, num_heads: width of the input, number of heads.
        head_dim: channels of a head, of q, k and v alike. None: `hidden_size / num_heads`.
        method: a name in `rla.METHODS` or a `rla.Method`.
        conv_size: width of the short convolution; 0: none. None: as in the method's paper (`faithful_conv_size`).
        output_gate: whether the normalised output is multiplied with silu(W_g x).
        rope_theta: base of the rotary embeddings, which methods with fixed decay have.
        norm_eps: of the norm of each head's output.
        backend: of `rla.attend`; None chooses.

    Example:
        >>> layer = rla.nn.ResidualAttention(256, num_heads=4, method="rdn")
        >>> y, state = layer(torch.randn(2, 100, 256))
        >>> y, state = layer(torch.randn(2, 1, 256), state=state)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        method: str | Method = "rdn",
        *,
        conv_size: int | None = None,
        output_gate: bool = True,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.method = get_method(method)
        self.num_heads, self.head_dim = num_heads, resolve_head_dim(hidden_size, num_heads, head_dim)
        self.rope_theta, self.backend = rope_theta, backend
        self.rotary = self.method.decay == "fixed"
        if self.rotary:
            check_rotary_dim(self.head_dim)
        conv_size = faithful_conv_size(self.method) if conv_size is None else conv_size
        size = num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, size, bias=False)
        self.k_proj = nn.Linear(hidden_size, size, bias=False)
        self.v_proj = nn.Linear(hidden_size, size, bias=False)
        self.g_proj = nn.Linear(hidden_size, size, bias=False) if output_gate else None
        self.o_proj = nn.Linear(size, hidden_size, bias=False)
        self.conv = ShortConvolution(3 * size, conv_size) if conv_size else None
        self.gates = Gates(hidden_size, num_heads, self.head_dim, self.method)
        self.D = no_weight_decay(nn.Parameter(torch.ones(num_heads))) if self.method.rate == "dt" else None
        self.norm = GatedRMSNorm(self.head_dim, norm_eps)
        self.observer: Callable[..., None] | None = None  # called with the six tensors that go to the op

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, backend={self.backend}"

    def forward(
        self,
        x: Tensor,
        *,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, MixerState]:
        """Mix `x`, [B, T, hidden].

        Args:
            x: the input; for packed sequences B is 1.
            state: what an earlier call returned, to continue from. A single token without gradients overwrites its memory.
            cu_seqlens: `[N + 1]` int, bounds of N sequences packed along T.
            position_ids: [B or 1, T], used by rotary methods alone. None: counted from 0, in each packed sequence.

        Returns:
            The output, [B, T, hidden], and the state.
        """
        past = None if state is None else state.conv
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = None
        if self.conv is not None:
            qkv, conv = self.conv(torch.cat((q, k, v), -1), past, cu_seqlens)
            q, k, v = qkv.chunk(3, -1)
        if self.method.rate == "one":
            q = q * self.head_dim**-0.5
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (q, k, v))
        if self.rotary:
            position_ids = self._positions(x, state, cu_seqlens, position_ids)
            q, k = rotate(q, position_ids, self.rope_theta), rotate(k, position_ids, self.rope_theta)
        log_alpha, beta, gamma = self.gates(x)
        if self.observer is not None:
            self.observer(q, k, v, log_alpha, beta, gamma)
        memory = None if state is None else state.memory
        if x.shape[1] == 1 and cu_seqlens is None and memory is not None and not torch.is_grad_enabled():
            out = step(q, k, v, log_alpha, beta, gamma, method=self.method, state=memory, backend=self.backend)
        else:
            gates = (log_alpha, beta, gamma)
            out, memory = attend(q, k, v, *gates, method=self.method, state=memory, cu_seqlens=cu_seqlens, backend=self.backend)
        if self.D is not None:
            out = out + self.D.to(v.dtype)[:, None] * v
        gate = None if self.g_proj is None else self.g_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return self.o_proj(self.norm(out, gate).flatten(2)), MixerState(conv, memory)

    def _positions(self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None, position_ids: Tensor | None) -> Tensor:
        if position_ids is not None:
            return position_ids
        if state is not None:
            raise ValueError("position_ids: a rotary method (decay='fixed') that goes on from a state needs them; got None")
        if cu_seqlens is not None:
            return positions_of(cu_seqlens, x.shape[1], x.device)
        return torch.arange(x.shape[1], device=x.device)[None]
