"""Method: one point in the family of linear attentions that `rla.attend` computes.

A method says how a state M (S, the memory, or R, the memory of S's errors) absorbs a pair (k_t, x_t), how fast
it forgets, and how the output is read:

    additive   M_t = alpha_t M_{t-1} + rate_t k_t^T x_t
    delta      M_t = alpha_t M_{t-1} + rate_t k_t^T (x_t - alpha_t k_t M_{t-1})

    none       o_t = q_t S_t
    token      o_t = alpha_t q_t S_{t-1} + gamma_t (q_t . k_t) r_t       r_t = psi(v_t - k_t S_{t-1})
    fitted     o_t = alpha_t q_t S_{t-1} + gamma_t q_t R_t               R absorbs (k_t, r_t) at rate gamma_t

Every row of the paper's Table 1, RLA, RDN and the ablations are values of this class, named in `METHODS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Rule = Literal["additive", "delta"]
Correction = Literal["none", "token", "fitted"]
Decay = Literal["none", "fixed", "scalar", "vector"]
Rate = Literal["one", "sigmoid", "dt"]
Gamma = Literal["own", "tied"]
Loss = Literal["l2", "huber", "logcosh"]

_WORDS = {"rule": Rule, "correction": Correction, "decay": Decay, "rate": Rate, "gamma": Gamma, "loss": Loss}


@dataclass(frozen=True)
class Method:
    """One linear attention. The default is RDN; `dataclasses.replace` makes variants.

    `decay` and `rate` say where a layer's gates come from; to the op they say which gates there are (`decay="none"`:
    no log_alpha, `"vector"`: one per key channel, `rate="one"`: no beta). `gamma`, `gate_output`, `loss` and `clip`
    matter only to methods with a correction.
    """

    rule: Rule = "delta"  # how a state absorbs a key-value pair
    correction: Correction = "fitted"  # o = q S_t | base + r_t (k_t.q_t) | base + q R_t
    decay: Decay = "scalar"  # alpha: 1 | RetNet's constants | Mamba-2's | GLA's, one per key channel
    rate: Rate = "sigmoid"  # beta: 1 | sigmoid(W x) | Mamba-2's step dt
    gamma: Gamma = "own"  # tied: gamma = beta
    gate_output: bool = True  # alpha S q + gamma R q, or the plain sum S q + R q
    loss: Loss = "huber"  # pseudo-residual psi: identity | clip to [-c, c] | tanh
    clip: float = 1.0  # c
    qk_norm: bool = True  # L2-normalise q and k

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in get_args(words):
                raise ValueError(f"Method.{name}: expected one of {', '.join(get_args(words))}; got {value!r}")
        for name in ("gate_output", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Method.{name}: expected True or False; got {getattr(self, name)!r}")
        if isinstance(self.clip, bool) or not isinstance(self.clip, (int, float)):
            raise ValueError(f"Method.clip: expected a positive number; got {self.clip!r}")
        if not (self.clip > 0 and math.isfinite(self.clip)):
            raise ValueError(f"Method.clip: expected a positive finite number; got {self.clip!r} (loss='l2' clips nothing)")

    @property
    def has_residual(self) -> bool:
        """Whether the output is corrected by a residual, so that there is a gamma."""
        return self.correction != "none"

    @property
    def has_R(self) -> bool:
        """Whether there is a second recurrent state."""
        return self.correction == "fitted"


def _methods() -> dict[str, Method]:
    plain = Method(rule="additive", correction="none", qk_norm=False)
    rla, rdn = Method(rule="additive"), Method(rule="delta")
    change = dataclasses.replace
    methods = {
        "linear": change(plain, decay="none", rate="one"),
        "retnet": change(plain, decay="fixed", rate="one"),
        "mamba2": change(plain, decay="scalar", rate="dt"),
        "gla": change(plain, decay="vector", rate="one"),
        "sgla": change(rla, correction="none"),
        "deltanet": change(rdn, correction="none", decay="none"),
        "gdn": change(rdn, correction="none"),
        "rla": rla,
        "rdn": rdn,
    }
    for name, base in (("rla", rla), ("rdn", rdn)):
        methods[f"{name}-nofit"] = change(base, correction="token", loss="l2")
        methods[f"{name}-tied"] = change(base, gamma="tied")
        methods[f"{name}-sum"] = change(base, gate_output=False)
        methods[f"{name}-noclip"] = change(base, loss="l2")
        methods[f"{name}-logcosh"] = change(base, loss="logcosh")
    methods["rla-nonorm"] = change(rla, qk_norm=False)
    return methods


METHODS: Mapping[str, Method] = MappingProxyType(_methods())
"""The methods by name, read-only: the paper's baselines, RLA, RDN and their ablations."""


_CLIP = re.compile(r"(?P<name>.+)-clip(?P<clip>\d+(\.\d+)?)")


def get_method(method: str | Method) -> Method:
    """The Method of a name in `METHODS`; a Method is returned as it is.

    A name may go on with a threshold: "rla-clip0.5" is rla with clip = 0.5.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name in rla.METHODS or a rla.Method; got {type(method).__name__}")
    found = _CLIP.fullmatch(method)
    name = found["name"] if found else method
    if name not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"method: unknown name {method!r}.{hint} Known: {', '.join(METHODS)}")
    return dataclasses.replace(METHODS[name], clip=float(found["clip"])) if found else METHODS[name]


def is_method(name: str) -> bool:
    """Whether `get_method` knows the name."""
    try:
        get_method(name)
    except (TypeError, ValueError):
        return False
    return True
