"""Launches of the kernels: buffers, grids and switches. See docs/kernels.md for what each kernel reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...method import Method
from ..reference import NORM_EPS
from . import interpreted, saved_shapes, segment, tune
from .between import between
from .config import Config, Tile, configure
from .decode import decode
from .grads import finish, grads
from .invert import invert
from .prepare import prepare
from .reverse import reverse
from .scan import scan

_LOSSES = {"l2": 0, "huber": 1, "logcosh": 2}


def target() -> tuple[str, int]:
    """What kernels are compiled for: "cuda" and its compute capability, "hip", or "cpu" in the interpreter."""
    if interpreted():
        return "cpu", 0
    device = triton.runtime.driver.active.get_current_target()
    return device.backend, device.arch if device.backend == "cuda" else 0


@functools.cache
def _switches(method: Method) -> dict[str, Any]:
    return {
        "DELTA": method.rule == "delta",
        "RESIDUAL": method.has_residual,
        "FITTED": method.has_R,
        "GATED": method.gate_output,
        "LOSS": _LOSSES[method.loss] if method.has_residual else 0,
    }


def _pick(switches: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: switches[name] for name in names}


@dataclass
class _Problem:
    """What the kernels of one call share. Tokens are [B * T], tensors contiguous."""

    q: Tensor  # [B, T, H, K], strided
    k: Tensor
    v: Tensor  # [B, T, HV, V]
    log_alpha: Tensor | None  # [B, T, HV]
    beta: Tensor | None
    gamma: Tensor | None
    S0: Tensor | None  # [N, HV, K, V]
    R0: Tensor | None
    cu: Tensor | None
    method: Method

    def __post_init__(self) -> None:
        self.q, self.k = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k))
        for name in ("v", "log_alpha", "beta", "gamma", "S0", "R0"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x.contiguous())
        (self.B, self.T, self.H, self.K), (self.HV, self.V) = self.q.shape, self.v.shape[2:]
        self.N = self.B
        if self.cu is not None:
            self.N = self.cu.shape[0] - 1
            self.cu = self.cu.to(self.q.device).contiguous()
        self.config: Config = configure(
            self.K, self.V, self.q.element_size(), *target(),
            additive=self.method.rule == "additive", residual=self.method.has_residual,
        )  # fmt: skip
        self.segment = segment(self.K, self.V, self.q.element_size(), 1 + self.method.has_R)
        self.C = self.config.C
        switches = _switches(self.method)
        # A clip's slope jumps: see scan.py. float16 has digits enough.
        fine = switches["LOSS"] == _LOSSES["huber"] and self.q.dtype == torch.bfloat16
        squares = (4 if switches["FITTED"] else 3) if switches["DELTA"] else 1 + switches["RESIDUAL"]
        self.switches = {
            **switches,
            "HAS_ALPHA": self.log_alpha is not None,
            "HAS_BETA": self.beta is not None,
            "HAS_GAMMA": self.gamma is not None,
            "PACKED": self.cu is not None,
            "PRECISION": self.config.precision,
            "C": self.C,
            "GROUP": self.HV // self.H,
            "NM": squares + fine * (1 + switches["DELTA"]),
            "FINE": fine,
            "K": self.K,
            "V": self.V,
        }
        self.gates = (self.log_alpha, self.beta, self.gamma)

    def slots(self, size: int) -> int:
        """Chunks, or segments, of `size` tokens; packed sequences: at most so many."""
        return self.B * triton.cdiv(self.T, size) if self.cu is None else self.T // size + self.N

    def run(self, kernel: Any, programs: int, tile: Tile, *args: Any, without: tuple[str, ...] = (), **more: Any) -> None:
        if programs == 0:
            return
        constants = {name: value for name, value in self.switches.items() if name not in without} | more

        def launch(tile: Tile) -> None:
            kernel[(programs,)](*args, BK=tile.BK, **constants, num_warps=tile.warps, num_stages=tile.stages)

        if tune.enabled():
            fixed = sorted((name, value) for name, value in constants.items() if name != "SAVE")  # which hangs on the length
            key = (kernel.__name__, self.q.dtype, self.q.device, tile, *fixed)
            tile = tune.choose(key, tile, launch, triton.testing.do_bench)
        launch(tile)

    def prepare(self, *, backward: bool) -> None:
        """Normalised q and k, and the matrices and vectors of each chunk."""
        q, k, slots = self.q, self.k, self.slots(self.C)
        norm, fine = self.method.qk_norm, self.switches["FINE"]
        copy_q = norm or not q.is_contiguous()
        copy_k = (norm or not k.is_contiguous()) and (backward or not fine)
        self.qn = torch.empty_like(q, memory_format=torch.contiguous_format) if copy_q else q
        self.kn = torch.empty_like(k, memory_format=torch.contiguous_format) if copy_k else k
        self.k_scan = k.contiguous() if fine else self.kn
        self.mats = q.new_empty(slots, self.HV, self.switches["NM"], self.C, self.C)
        self.vecs = q.new_empty(slots, self.HV, 5, self.C, dtype=torch.float32)
        self.run(
            prepare, slots * self.HV, self.config.prepare,
            q, k, self.log_alpha, self.qn, self.kn, self.mats, self.vecs, self.cu, self.N, self.T, self.HV,
            *q.stride()[:3], *k.stride()[:3], NORM_EPS, NORM=norm, COPY_Q=copy_q, COPY_K=copy_k,
            without=("V", "FITTED", "GATED", "LOSS", "HAS_BETA", "HAS_GAMMA"),
        )  # fmt: skip
        if self.switches["DELTA"]:
            self.run(
                invert, slots * self.HV * (1 + self.method.has_R), self.config.invert,
                self.beta, self.gamma, self.mats, self.vecs, self.cu, self.N, self.T, self.HV,
                without=("K", "V", "GROUP", "DELTA", "RESIDUAL", "GATED", "LOSS", "HAS_ALPHA"),
            )  # fmt: skip

    def scan(self, programs: int, saved: Tensor | None, outputs: tuple, traces: tuple, **modes: bool) -> None:
        tile = self.config.scan
        blocks = triton.cdiv(self.V, tile.BV)
        self.run(
            scan, programs * self.HV * blocks, tile,
            self.qn, self.k_scan, self.v, self.beta, self.gamma, self.mats, self.vecs,
            self.S0, self.R0, saved, self.cu, *outputs, *traces,
            self.N, self.T, self.HV, float(self.method.clip), BV=tile.BV, GROUPS=tile.groups, SEGMENT=self.segment,
            HAS_STATE=self.S0 is not None, without=("HAS_ALPHA",), **modes,
        )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    method: Method,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor]]:
    """Output, final S, final R (empty if the method has none), and what backward needs (empty unless `save`)."""
    p = _Problem(q, k, v, log_alpha, beta, gamma, S0, R0, cu_seqlens, method)
    o = q.new_empty(p.B, p.T, p.HV, p.V)
    S = q.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32)
    R = torch.empty_like(S) if method.has_R else S.new_empty(0)
    saved = S.new_empty(saved_shapes(q, v, p.N, method)[0] if save else 0)
    p.prepare(backward=False)
    p.scan(p.N, saved, (o, S, R), (None,) * 4, TRACE=False, SAVE=saved.numel() > 0)
    return o, S, R, (saved,)


def backward(
    do: Tensor,
    dS: Tensor | None,
    dR: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S0: Tensor | None,
    R0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Sequence[Tensor],
    method: Method,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_alpha, beta, gamma, S0, R0; None for what is None."""
    inputs = (q, k, v, log_alpha, beta, gamma, S0, R0)
    p = _Problem(*inputs, cu_seqlens, method)
    do = do.to(q.dtype).contiguous()
    s, slots, tile = p.switches, p.slots(p.C), p.config.reverse
    p.prepare(backward=True)
    x = torch.empty_like(p.v) if s["DELTA"] else p.v
    xw = torch.empty_like(p.v) if s["RESIDUAL"] else None
    slopes = torch.empty_like(p.v) if s["LOSS"] else None
    states = q.new_empty(slots, p.HV, 1 + method.has_R, p.K, p.V)
    p.scan(p.slots(p.segment), kept[0], (None,) * 3, (x, xw, slopes, states), TRACE=True, SAVE=False)

    adjoints, y, dv = torch.empty_like(states), torch.empty_like(p.v), torch.empty_like(p.v)
    z = torch.empty_like(p.v) if s["FITTED"] else None
    dS0, dR0 = (None if M is None else torch.empty_like(M) for M in (p.S0, p.R0))
    dS, dR = (
        (q.new_zeros(p.N, p.HV, p.K, p.V, dtype=torch.float32) if x is None else x.contiguous()) if exists else None
        for x, exists in ((dS, True), (dR, method.has_R))
    )
    p.run(
        reverse, p.N * p.HV * triton.cdiv(p.V, tile.BV), tile,
        p.qn, p.kn, do, p.beta, p.gamma, p.mats, p.vecs, slopes, dS, dR, p.cu, dS0, dR0, adjoints, y, z, dv,
        p.T, p.HV, BV=tile.BV, GROUPS=tile.groups, HAS_STATE=S0 is not None, without=("HAS_ALPHA", "FINE"),
    )  # fmt: skip

    dgates = [None if x is None else torch.empty_like(x) for x in p.gates]
    dmats = q.new_empty(slots, p.HV, 2, p.C, p.C)
    parts = q.new_empty(slots, p.HV, 3, 3, p.C, dtype=torch.float32)
    dqs, dks = (q.new_empty(p.B, p.T, p.HV, p.K) for _ in range(2))
    for query, dxs in ((True, dqs), (False, dks)):
        tile = p.config.between_q if query else p.config.between_k
        p.run(
            between, slots * p.HV, tile,
            do, *p.gates, p.mats, p.vecs, x, xw, y, z, dv, p.cu, dmats, parts, dgates[1], p.N, p.T, p.HV,
            BV=tile.BV, QUERY=query, without=("LOSS", "FINE"),
        )  # fmt: skip
        tile = p.config.grads_q if query else p.config.grads_k
        p.run(
            grads, slots * p.HV, tile,
            p.qn, p.kn, do, p.beta, p.gamma, p.vecs, x, xw, y, z, dv, states, adjoints, dmats, parts, p.cu, dxs,
            dgates[0], dgates[2], p.N, p.T, p.HV, BV=tile.BV, QUERY=query, without=("LOSS", "NM", "FINE"),
        )  # fmt: skip
    direct = not method.qk_norm and p.HV == p.H
    dq, dk = (dqs, dks) if direct else (_finish(p, *pair) for pair in ((p.q, dqs), (p.k, dks)))
    return dq, dk, dv, *dgates, dS0, dR0


def _finish(p: _Problem, x: Tensor, dxs: Tensor) -> Tensor:
    tile, tokens, BT = p.config.finish, p.B * p.T, 16
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens:
        finish[(triton.cdiv(tokens, BT) * p.H,)](
            x, dxs, dx, tokens, p.T, p.H, *x.stride()[:3], NORM_EPS, p.K, tile.BK, BT,
            p.HV // p.H, p.method.qk_norm, num_warps=tile.warps,
        )  # fmt: skip
    return dx


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    S: Tensor,
    R: Tensor | None,
    method: Method,
) -> Tensor:
    """One token. Returns the output [B, 1, HV, V]; S and R [B, HV, K, V], contiguous, are updated in place."""
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    gates = [None if x is None else x.contiguous() for x in (log_alpha, beta, gamma)]
    v = v.contiguous()
    o = torch.empty_like(v)
    tile = configure(K, V, q.element_size(), *target()).step
    if B:
        decode[(B * HV * triton.cdiv(V, tile.BV),)](
            q, k, v, *gates, S, R, o, HV, float(method.clip), q.stride(0), q.stride(2), k.stride(0), k.stride(2), NORM_EPS,
            K, V, tile.BK, tile.BV, HV // H, **_switches(method), NORM=method.qk_norm,
            HAS_ALPHA=gates[0] is not None, HAS_BETA=gates[1] is not None, HAS_GAMMA=gates[2] is not None, num_warps=tile.warps,
        )  # fmt: skip
    return o
