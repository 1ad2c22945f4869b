"""Checks of attend's arguments. Every message names the argument, what was expected and what came.

Shapes, dtypes and devices are always checked. Values (log_alpha <= 0, cu_seqlens in order) are read only where that costs no
device synchronisation and no graph break: on CPU tensors, outside torch.compile. `check(..., values=True)` reads them anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..method import Method, get_method
from .native import any_positive

if TYPE_CHECKING:
    from .attend import State

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gamma: Tensor | None = None,
    *,
    method: str | Method = "rdn",
    state: State | None = None,
    cu_seqlens: Tensor | None = None,
    values: bool | None = None,
) -> None:
    """Raise ValueError or TypeError unless the arguments of `attend` fit together; the message names the argument.

    Args:
        q, k, v, log_alpha, beta, gamma, state, cu_seqlens: those of `attend`; None where there is none.
        method: a name in `rla.METHODS` or a `rla.Method`.
        values: whether to look at values too (`log_alpha <= 0`, the order of `cu_seqlens`), which on a GPU waits for the
            device. None: on CPU tensors outside torch.compile, where it is free.
    """
    method = get_method(method)
    gates = {"log_alpha": log_alpha, "beta": beta, "gamma": gamma}
    for name, x in {"q": q, "k": k, "v": v, **gates}.items():
        if x is None and name in gates:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor; got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16; got {_word(x.dtype)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, that of q; got {x.device}")
    _check_gates_exist(gates, method)
    _check_layout(q, k, v, gates, state, method)
    for name, x in {"k": k, "v": v}.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {_word(q.dtype)}, the dtype of q; got {_word(x.dtype)}")
    for name, x in gates.items():
        if x is not None and x.dtype not in (q.dtype, torch.float32):
            expected = " or ".join(sorted({_word(q.dtype), "float32"}))
            raise TypeError(f"{name}: expected {expected}; got {_word(x.dtype)}")

    N = q.shape[0]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)
        N = cu_seqlens.shape[0] - 1
    if state is not None:
        _check_state(state, q, v, N, method)
    if values is None:
        values = not torch.compiler.is_compiling()
        devices: tuple[str, ...] = ("cpu",)
    else:
        devices = (q.device.type, "cpu")
    if values:
        if log_alpha is not None and log_alpha.device.type in devices and any_positive(log_alpha):
            raise ValueError(
                f"log_alpha: expected values <= 0, natural logarithms of decays in [0, 1]; "
                f"got a maximum of {log_alpha.max().item():.4g} (is it alpha rather than its logarithm?)"
            )
        if cu_seqlens is not None and cu_seqlens.device.type in devices:
            _check_bounds(cu_seqlens.tolist(), q.shape[1])


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _check_gates_exist(gates: dict[str, Tensor | None], method: Method) -> None:
    if gates["log_alpha"] is not None and method.decay == "none":
        raise ValueError("log_alpha: expected None, this method has no decay (Method.decay='none'); got a tensor")
    if gates["beta"] is not None and method.rate == "one":
        raise ValueError("beta: expected None, this method's rate is 1 (Method.rate='one'); got a tensor")
    if gates["gamma"] is not None and not method.has_residual:
        raise ValueError("gamma: expected None, this method has no residual (Method.correction='none'); got a tensor")
    if gates["gamma"] is not None and method.gamma == "tied":
        raise ValueError("gamma: expected None, this method ties gamma to beta (Method.gamma='tied'); got a tensor")


def _check_layout(
    q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None], state: State | None, method: Method
) -> None:
    for name, x, last in (("q", q, "K"), ("k", k, "K"), ("v", v, "V")):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [B, T, H, {last}]; got {x.dim()}, shape {_shape(x)}")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"{name}: expected at least one head and one channel; got shape {_shape(x)}")
    (B, T, H, K), HV = q.shape, v.shape[2]
    given = {name: x for name, x in gates.items() if x is not None}
    for name, x in given.items():
        vector = name == "log_alpha" and method.decay == "vector"
        wanted = "[B, T, H, K], one decay per key channel (Method.decay='vector')" if vector else "[B, T, H]"
        if x.dim() != (4 if vector else 3):
            hint = "; one decay per key channel wants Method.decay='vector'" if x.dim() == 4 and name == "log_alpha" else ""
            raise ValueError(f"{name}: expected {4 if vector else 3} dimensions {wanted}; got shape {_shape(x)}{hint}")
        if _swapped(x.shape[1:3], v.shape[1:3]):
            culprit = "q, k and v" if _swapped_state(state, v) else f"either {name} or q, k and v"
            raise ValueError(
                f"{name}: expected [B, T, H] = {[B, T, HV]} as in v; got {_shape(x)}. "
                f"It looks as if {culprit} were head-first; attend takes time first, [B, T, H, D]: use transpose(1, 2)"
            )
    if _swapped_state(state, v):
        raise ValueError(
            f"q, k, v: expected [B, T, H, D]; got v of shape {_shape(v)} for a state of {state.S.shape[1]} heads. "  # type: ignore[union-attr]
            "It looks head-first, [B, H, T, D]: use transpose(1, 2)"
        )
    if k.shape != q.shape:
        raise ValueError(f"k: expected the shape of q, [B, T, H, K] = {_shape(q)}; got {_shape(k)}")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v: expected [B, T, ...] = [{B}, {T}, ...] as in q; got {_shape(v)}")
    if HV % H:
        raise ValueError(f"v: expected a multiple of the {H} heads of q and k; got {HV} heads, shape {_shape(v)}")
    for name, x in given.items():
        shape = [B, T, HV, K] if x.dim() == 4 else [B, T, HV]
        if list(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, with the heads of v; got {_shape(x)}")


def _swapped(a: torch.Size, b: torch.Size) -> bool:
    return a[0] != a[1] and (a[0], a[1]) == (b[1], b[0])


def _swapped_state(state: State | None, v: Tensor) -> bool:
    S = getattr(state, "S", None)
    return isinstance(S, Tensor) and S.dim() == 4 and S.shape[1] == v.shape[1] != v.shape[2]


def _check_state(state: State, q: Tensor, v: Tensor, N: int, method: Method) -> None:
    if not hasattr(state, "S") or not hasattr(state, "R"):
        raise TypeError(f"state: expected a rla.State(S, R); got {type(state).__name__}")
    if method.has_R and state.R is None:
        raise ValueError("state.R: expected a tensor, this method has a second state (Method.correction='fitted'); got None")
    if not method.has_R and state.R is not None:
        raise ValueError("state.R: expected None, this method has no second state; got a tensor (of another method?)")
    shape, dtype = [N, v.shape[2], q.shape[3], v.shape[3]], state_dtype(q.dtype)
    for name, M in (("state.S", state.S), ("state.R", state.R)):
        if M is None and name == "state.R":
            continue
        if not isinstance(M, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor; got {type(M).__name__}")
        if list(M.shape) != shape:
            raise ValueError(f"{name}: expected shape [N, H, K, V] = {shape}; got {_shape(M)}")
        if M.dtype != dtype:
            raise TypeError(f"{name}: expected {_word(dtype)} for {_word(q.dtype)} inputs; got {_word(M.dtype)}")
        if M.device != q.device:
            raise ValueError(f"{name}: expected device {q.device}, that of q; got {M.device}")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an integer tensor; got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64; got {_word(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1] with N >= 1 sequences; got {_shape(cu_seqlens)}")
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: expected device {q.device} or cpu; got {cu_seqlens.device}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected B == 1, packed sequences lie along T; got B = {q.shape[0]}")


def _check_bounds(bounds: list[int], T: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected the first value to be 0; got {bounds[0]}")
    for n in range(len(bounds) - 1):
        if bounds[n + 1] < bounds[n]:
            raise ValueError(
                f"cu_seqlens: expected values that never fall; got {bounds[n + 1]} after {bounds[n]} at position {n + 1}"
            )
    if bounds[-1] != T:
        raise ValueError(f"cu_seqlens: expected the last value to be T = {T}; got {bounds[-1]}")
