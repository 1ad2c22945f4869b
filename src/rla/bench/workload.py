"""What is timed: a contender (a method on a backend, or a peer) over T random tokens, forward or forward and backward.

Multiply-adds per token and head, chunks of C = 64 tokens, K = V = d, of the forward pass:

    sgla 2Cd + 2d^2      rla 5Cd + 5d^2      gdn 4Cd + 3d^2      rdn 7Cd + 6d^2      causal softmax Td

They count each product of the chunked form once and whole, though the `C d` ones are triangular. For rla forward and backward
together 18Cd + 16d^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..method import get_method
from ..ops import attend, chunked
from ..ops.backends import choose

Pass = Literal["forward", "both"]
Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]

Inputs = Sequence[Tensor | None]

CHUNK = 64
FLOAT32 = "float32"  # a method on float32 inputs, in a run of another dtype
AUTOGRAD = "chunked-autograd"  # the chunked forward differentiated by autograd, to compare peak memory with


class Unavailable(Exception):
    """A contender that can't run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    method: str  # a name in METHODS, or "softmax"
    by: str  # backend or peer that computes it, or FLOAT32

    def __str__(self) -> str:
        return f"{self.method} {self.by}"


@dataclass(frozen=True)
class Tokens:
    q: Tensor  # [B, T, H, d]
    k: Tensor
    v: Tensor
    log_alpha: Tensor  # [B, T, H]
    beta: Tensor
    gamma: Tensor
    do: Tensor  # [B, T, H, d], the gradient that arrives at the output


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    dim: int
    dtype: Dtype
    device: Device
    threads: int

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "dim", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected at least 1; got {getattr(self, name)}")

    def check_device(self) -> None:
        """ValueError if the tokens can't be made here; to read what another machine measured needs no device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: torch finds no CUDA device here; expected cpu")

    def __str__(self) -> str:
        where = self.device if self.device != "cpu" else f"{self.threads} thread{'s' * (self.threads > 1)}"
        if self.device == "cuda" and torch.cuda.is_available():
            where = torch.cuda.get_device_name()
        return f"B={self.batch} H={self.heads} K=V={self.dim} {self.dtype}, {where}"

    def columns(self) -> dict[str, int | str]:
        """What a CSV row says of the workload; the threads are told with the machine."""
        return {name: getattr(self, name) for name in ("batch", "heads", "dim", "dtype", "device")}

    def tensor_bytes(self, T: int) -> int:
        """Of q, k, v, the output and their gradients."""
        return 8 * self.batch * T * self.heads * self.dim * getattr(torch, self.dtype).itemsize

    def tokens(self, T: int) -> Tokens:
        """Random tokens with gates as a trained layer makes them: decays of about 0.95, rates about 0.5."""
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.batch, T, self.heads, *shape, generator=generator, device=self.device)

        q, k, v, do = (normal(self.dim).to(dtype) for _ in range(4))
        log_alpha = F.logsigmoid(normal() + 3).to(dtype)
        beta, gamma = (normal().sigmoid().to(dtype) for _ in range(2))
        return Tokens(q, k, v, log_alpha, beta, gamma, do)


def differentiated(call: Callable[..., Tensor], inputs: Inputs, do: Tensor, which: Pass) -> Callable[[], object]:
    """The function to time: `call(*inputs)`, without autograd, or followed by the gradients of all inputs."""
    if which == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*inputs)

        return forward
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    wanted = [x for x in leaves if x is not None]
    return lambda: torch.autograd.grad(call(*leaves), wanted, do)


def gates(name: str, tokens: Tokens) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """log_alpha, beta and gamma of the tokens; None where the method takes none."""
    method = get_method(name)
    log_alpha = None if method.decay == "none" else tokens.log_alpha
    if method.decay == "vector":
        log_alpha = tokens.log_alpha[..., None].expand_as(tokens.k).contiguous()
    beta = None if method.rate == "one" else tokens.beta
    gamma = tokens.gamma if method.has_residual and method.gamma == "own" else None
    return log_alpha, beta, gamma


def attend_pass(contender: Contender, tokens: Tokens, which: Pass) -> Callable[[], object]:
    """A pass of `rla.attend`, or of autograd through the chunked forward."""
    log_alpha, beta, gamma = gates(contender.method, tokens)
    qkv = (tokens.q, tokens.k, tokens.v)
    if contender.by == AUTOGRAD:
        # load() overwrites what autograd would keep for log_alpha: it stays a constant here, and autograd's need of memory
        # is understated by that much.
        def plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gamma: Tensor | None) -> Tensor:
            return _plain_chunked(contender.method, q, k, v, log_alpha, beta, gamma)

        return differentiated(plain, (*qkv, beta, gamma), tokens.do, which)

    try:
        choose(contender.by, tokens.q, tokens.v, get_method(contender.method))
    except ValueError as error:
        raise Unavailable(str(error)) from error

    def call(*inputs: Tensor) -> Tensor:
        return attend(*inputs, method=contender.method, backend=contender.by)[0]

    return differentiated(call, (*qkv, log_alpha, beta, gamma), tokens.do, which)


def _plain_chunked(
    name: str, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor | None, beta: Tensor | None, gamma: Tensor | None
) -> Tensor:
    """The chunked forward without its own backward, for autograd to follow."""
    method = get_method(name)
    gamma = beta if method.gamma == "tied" and method.has_residual else gamma
    S = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.promote_types(q.dtype, torch.float32))
    R = S if method.has_R else None
    rows, o = slice(0, q.shape[0]), []
    for start in range(0, q.shape[1], CHUNK):
        tokens = slice(start, min(start + CHUNK, q.shape[1]))
        c = chunked._Chunk.load(q, k, v, log_alpha, beta, gamma, rows, tokens, method)
        o.append(c.scan(S, R, method).transpose(1, 2).to(q.dtype))
        S = c.decay_C * S + c.kL.mT @ c.u
        R = None if R is None else c.decay_C * R + c.kL.mT @ c.w
    return torch.cat(o, 1)


def multiply_adds(contender: Contender, T: int, d: int, which: Pass) -> int | None:
    """Per token and head; None where there is no formula."""
    if contender.method == "softmax":
        return T * d if which == "forward" else None
    method = get_method(contender.method)
    delta = method.rule == "delta"
    cd, dd = {
        "none": (4, 3) if delta else (2, 2),
        "token": (5, 3) if delta else (4, 3),
        "fitted": (7, 6) if delta else (5, 5),
    }[method.correction]
    if which == "both":
        if delta or method.correction != "fitted":
            return None
        cd, dd = cd + 13, dd + 11
    return cd * CHUNK * d + dd * d * d
