"""A method of your own in a few lines: a change of a known one, checked against the reference and used in a layer.

    python examples/own_method.py

A Method says how states learn and how the output is read; the kernels take it from there. What they don't have (another
pseudo-residual psi, say) can be tried first with the recurrence written out, as `huber_then_sign` does here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import rla
from rla.nn import ResidualAttention

Psi = Callable[[Tensor], Tensor]

# RDN that forgets each key channel at its own pace, as GLA does, with tanh in the place of the clip.
MINE = dataclasses.replace(rla.METHODS["rdn"], decay="vector", loss="logcosh")
# RLA that clips residuals sooner.
TIGHT = dataclasses.replace(rla.METHODS["rla"], clip=0.25)


def error(method: rla.Method, T: int = 200) -> float:
    """The chunked form's distance from the float64 reference: what to look at first with a new combination."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, T, 2, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(16), normal(16), normal(16)
    log_alpha = F.logsigmoid(normal(*((16,) if method.decay == "vector" else ())) + 3)
    inputs = (q, k, v, log_alpha, normal().sigmoid(), normal().sigmoid())
    want, _ = rla.attend(*inputs, method=method, backend="reference")
    got, _ = rla.attend(*inputs, method=method, backend="chunked")
    return (got - want).abs().max().item()


def with_psi(psi: Psi, k: Tensor, v: Tensor, q: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """RLA with a pseudo-residual of your own, token by token; one head, [T, d] and [T]."""
    S = R = torch.zeros(k.shape[1], v.shape[1])
    out = []
    for t in range(len(k)):
        r = psi(v[t] - k[t] @ S)
        R = alpha[t] * R + gamma[t] * torch.outer(k[t], r)
        out.append(alpha[t] * q[t] @ S + gamma[t] * q[t] @ R)
        S = alpha[t] * S + beta[t] * torch.outer(k[t], v[t])
    return torch.stack(out)


def huber_then_sign(e: Tensor) -> Tensor:
    """Small errors as they are, large ones by their sign and a tenth of their size."""
    return torch.where(e.abs() <= 1, e, e.sign() * (0.9 + 0.1 * e.abs()))


if __name__ == "__main__":
    for name, method in (("mine", MINE), ("tight", TIGHT)):
        print(f"{name}: chunked form and reference differ by {error(method):.1e}")
    layer = ResidualAttention(64, num_heads=2, method=MINE)
    y, _ = layer(torch.randn(1, 50, 64))
    y.sum().backward()
    print(f"in a layer: {tuple(y.shape)}, {sum(p.numel() for p in layer.parameters()):,} parameters")
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, 30, 8), dim=-1)
    gates = torch.rand(3, 30)
    print("psi of your own:", tuple(with_psi(huber_then_sign, k, torch.randn(30, 8), q, *gates).shape))
