"""SoftmaxAttention: causal softmax attention with grouped queries and rotary embeddings, computed by torch's SDPA.

The Transformer baseline's mixer, and the other half of hybrids. Its state is every key and value so far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import resolve_head_dim
from .rotary import check_rotary_dim, rotate


class KVState(NamedTuple):
    """Keys (rotated) and values so far, [B, T, KV heads, D] each."""

    k: Tensor
    v: Tensor


class SoftmaxAttention(nn.Module):
    """Causal attention of `num_heads` queries on `num_kv_heads` keys and values."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}; got {num_kv_heads}")
        self.head_dim = resolve_head_dim(hidden_size, num_heads, head_dim)
        check_rotary_dim(self.head_dim)
        self.num_heads, self.num_kv_heads, self.rope_theta = num_heads, num_kv_heads, rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        state: KVState | None = None,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, KVState]:
        """`x` [B, T, hidden]. `mask`: boolean [B, 1, T, S], S keys, those of the state too (`causal_mask`); None: causal."""
        T, past = x.shape[1], 0 if state is None else state.k.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + T, device=x.device)[None]
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, position_ids, self.rope_theta), rotate(k, position_ids, self.rope_theta)
        if state is not None:
            k, v = torch.cat((state.k, k), 1), torch.cat((state.v, v), 1)
        if mask is None and past and T > 1:
            mask = causal_mask(T, past, x.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), KVState(k, v)


def causal_mask(
    T: int, past: int, device: torch.device, *, padding: Tensor | None = None, sequence: Tensor | None = None
) -> Tensor:
    """Which of past + T keys each of T queries sees, boolean [B or 1, 1, T, past + T].

    `padding` [B, past + T] is False at keys that nobody sees; `sequence` [B or 1, T] numbers packed sequences (past is 0 then).
    A query always sees itself, so that no row of the softmax is empty, padding included.
    """
    query, key = torch.arange(past, past + T, device=device)[:, None], torch.arange(past + T, device=device)
    mask = (key <= query)[None, None]
    if padding is not None:
        mask = mask & padding.bool()[:, None, None]
    if sequence is not None:
        mask = mask & (sequence[:, None, :, None] == sequence[:, None, None])
    return mask | (key == query)
