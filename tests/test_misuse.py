"""Every misuse gets an error that names the argument, what was expected and what came, before anything is computed."""

import re

import pytest
import torch

import rla
from common import NAMES, Case, make

CASE = Case(B=2, T=10, H=3, K=4, V=5)
PACKED = Case(lengths=(4, 6), H=3, K=4, V=5)


def arguments(like="rdn", case=CASE, **changes):
    """A good call of the method `like`, with changes."""
    x = {n: t.detach() for n, t in make(rla.METHODS[like], case, torch.float32).items()}
    return {"method": like, **x, **changes}


def randn(*shape, **options):
    return torch.randn(*shape, **options)


def state(S=(2, 3, 4, 5), R=(2, 3, 4, 5), **options):
    return rla.State(None if S is None else torch.zeros(S, **options), None if R is None else torch.zeros(R, **options))


def cu(*bounds, dtype=torch.int64):
    return torch.tensor(bounds, dtype=dtype)


# What is changed in a good call; the error; words of the message, in order.
MISUSE = {
    "q of rank 3": ({"q": randn(2, 10, 12)}, ValueError, "q: expected 4 dimensions [B, T, H, K]; got 3, shape [2, 10, 12]"),
    "k of rank 5": ({"k": randn(2, 10, 3, 4, 1)}, ValueError, "k: expected 4 dimensions [B, T, H, K]; got 5"),
    "v of rank 2": ({"v": randn(10, 5)}, ValueError, "v: expected 4 dimensions [B, T, H, V]; got 2"),
    "k of another K": ({"k": randn(2, 10, 3, 6)}, ValueError, "k: expected the shape of q, [B, T, H, K] = [2, 10, 3, 4]; got [2, 10, 3, 6]"),
    "k of another B": ({"k": randn(1, 10, 3, 4)}, ValueError, "k: expected the shape of q ... ; got [1, 10, 3, 4]"),
    "k of another H": ({"k": randn(2, 10, 1, 4)}, ValueError, "k: expected the shape of q ... ; got [2, 10, 1, 4]"),
    "v of another T": ({"v": randn(2, 9, 3, 5)}, ValueError, "v: expected [B, T, ...] = [2, 10, ...] as in q; got [2, 9, 3, 5]"),
    "v of another B": ({"v": randn(1, 10, 3, 5)}, ValueError, "v: expected [B, T, ...] = [2, 10, ...] as in q; got [1, 10, 3, 5]"),
    "v heads no multiple": ({"v": randn(2, 10, 4, 5), "beta": None, "gamma": None, "log_alpha": None}, ValueError, "v: expected a multiple of the 3 heads of q and k; got 4 heads"),
    "fewer v heads": ({"q": randn(2, 10, 6, 4), "k": randn(2, 10, 6, 4)}, ValueError, "v: expected a multiple of the 6 heads of q and k; got 3 heads"),
    "no channel": ({"q": randn(2, 10, 3, 0), "k": randn(2, 10, 3, 0)}, ValueError, "q: expected at least one head and one channel; got shape [2, 10, 3, 0]"),
    "head-first q, k, v": ({"q": randn(2, 3, 10, 4), "k": randn(2, 3, 10, 4), "v": randn(2, 3, 10, 5)}, ValueError, "log_alpha: ... head-first ... [B, T, H, D]: use transpose(1, 2)"),
    "head-first beta": ({"beta": torch.rand(2, 3, 10)}, ValueError, "beta: expected [B, T, H] = [2, 10, 3] ... ; got [2, 3, 10] ... head-first"),
    "head-first by the state": ({"q": randn(2, 3, 10, 4), "k": randn(2, 3, 10, 4), "v": randn(2, 3, 10, 5), "log_alpha": None, "beta": None, "gamma": None, "state": state()}, ValueError, "q, k, v: expected [B, T, H, D]; got v of shape [2, 3, 10, 5] for a state of 3 heads ... head-first ... transpose(1, 2)"),
    "a list": ({"q": [[1.0]]}, TypeError, "q: expected a torch.Tensor; got list"),
    "v missing": ({"v": None}, TypeError, "v: expected a torch.Tensor; got NoneType"),
    "integer q": ({"q": torch.ones(2, 10, 3, 4, dtype=torch.int64)}, TypeError, "q: expected float64, float32, bfloat16 or float16; got int64"),
    "complex v": ({"v": torch.ones(2, 10, 3, 5, dtype=torch.complex64)}, TypeError, "v: expected float64, float32 ... ; got complex64"),
    "bool beta": ({"beta": torch.ones(2, 10, 3, dtype=torch.bool)}, TypeError, "beta: expected float64 ... ; got bool"),
    "v of another dtype": ({"v": randn(2, 10, 3, 5).half()}, TypeError, "v: expected float32, the dtype of q; got float16"),
    "k of another dtype": ({"k": randn(2, 10, 3, 4).double()}, TypeError, "k: expected float32, the dtype of q; got float64"),
    "gamma in half": ({"gamma": torch.rand(2, 10, 3).half()}, TypeError, "gamma: expected float32; got float16"),
    "v on another device": ({"v": torch.empty(2, 10, 3, 5, device="meta")}, ValueError, "v: expected device cpu, that of q; got meta"),
    "beta on another device": ({"beta": torch.empty(2, 10, 3, device="meta")}, ValueError, "beta: expected device cpu, that of q; got meta"),
    "positive log_alpha": ({"log_alpha": torch.full((2, 10, 3), 0.9)}, ValueError, "log_alpha: expected values <= 0 ... ; got a maximum of 0.9 (is it alpha rather than its logarithm?)"),
    "one positive log_alpha": ({"log_alpha": torch.zeros(2, 10, 3).index_fill_(1, torch.tensor([7]), 1e-3)}, ValueError, "log_alpha: ... got a maximum of 0.001"),
    "gamma without a residual": ({"like": "gdn", "gamma": torch.rand(2, 10, 3)}, ValueError, "gamma: expected None, this method has no residual (Method.correction='none'); got a tensor"),
    "gamma where it is tied": ({"method": "rdn-tied"}, ValueError, "gamma: expected None, this method ties gamma to beta ... ; got a tensor"),
    "beta where the rate is 1": ({"like": "gla", "beta": torch.rand(2, 10, 3)}, ValueError, "beta: expected None, this method's rate is 1 (Method.rate='one'); got a tensor"),
    "log_alpha without decay": ({"like": "deltanet", "log_alpha": torch.zeros(2, 10, 3)}, ValueError, "log_alpha: expected None, this method has no decay (Method.decay='none'); got a tensor"),
    "beta of rank 4": ({"beta": torch.rand(2, 10, 3, 1)}, ValueError, "beta: expected 3 dimensions [B, T, H]; got shape [2, 10, 3, 1]"),
    "beta of rank 1": ({"beta": torch.rand(3)}, ValueError, "beta: expected 3 dimensions [B, T, H]; got shape [3]"),
    "beta of other heads": ({"beta": torch.rand(2, 10, 6)}, ValueError, "beta: expected shape [2, 10, 3], with the heads of v; got [2, 10, 6]"),
    "gamma of another T": ({"gamma": torch.rand(2, 1, 3)}, ValueError, "gamma: expected shape [2, 10, 3] ... ; got [2, 1, 3]"),
    "vector decay for a scalar method": ({"log_alpha": -torch.rand(2, 10, 3, 4)}, ValueError, "log_alpha: expected 3 dimensions [B, T, H]; got shape [2, 10, 3, 4] ... Method.decay='vector'"),
    "scalar decay for a vector method": ({"like": "gla", "log_alpha": -torch.rand(2, 10, 3)}, ValueError, "log_alpha: expected 4 dimensions [B, T, H, K] ... ; got shape [2, 10, 3]"),
    "vector decay of another K": ({"like": "gla", "log_alpha": -torch.rand(2, 10, 3, 5)}, ValueError, "log_alpha: expected shape [2, 10, 3, 4] ... ; got [2, 10, 3, 5]"),
    "state of another batch": ({"state": state((1, 3, 4, 5))}, ValueError, "state.S: expected shape [N, H, K, V] = [2, 3, 4, 5]; got [1, 3, 4, 5]"),
    "state transposed": ({"state": state(R=(2, 3, 5, 4))}, ValueError, "state.R: expected shape [N, H, K, V] = [2, 3, 4, 5]; got [2, 3, 5, 4]"),
    "state without R": ({"state": state(R=None)}, ValueError, "state.R: expected a tensor ... ; got None"),
    "state with R for a method without": ({"like": "gdn", "gamma": None, "state": state()}, ValueError, "state.R: expected None ... ; got a tensor"),
    "state in half": ({"state": state(dtype=torch.bfloat16)}, TypeError, "state.S: expected float32 for float32 inputs; got bfloat16"),
    "state in double": ({"state": state(dtype=torch.float64)}, TypeError, "state.S: expected float32 for float32 inputs; got float64"),
    "state on another device": ({"state": state(device="meta")}, ValueError, "state.S: expected device cpu, that of q; got meta"),
    "state without S": ({"state": state(S=None)}, TypeError, "state.S: expected a torch.Tensor; got NoneType"),
    "state a tensor": ({"state": torch.zeros(2, 3, 4, 5)}, TypeError, "state: expected a rla.State(S, R); got Tensor"),
    "unknown method": ({"method": "rnd"}, ValueError, "method: unknown name 'rnd'. Did you mean 'rdn'? Known: linear, retnet"),
    "method a number": ({"method": 3}, TypeError, "method: expected a name in rla.METHODS or a rla.Method; got int"),
    "unknown backend": ({"backend": "cuda"}, ValueError, "backend: expected one of ... chunked ... reference or None; got 'cuda'"),
    "unknown keyword": ({"scale": 1.0}, TypeError, "unexpected keyword argument 'scale'"),
    "cu_seqlens with a batch": ({"cu_seqlens": cu(0, 10)}, ValueError, "cu_seqlens: expected B == 1 ... ; got B = 2"),
}  # fmt: skip
PACKED_MISUSE = {
    "not from 0": ({"cu_seqlens": cu(1, 10)}, ValueError, "cu_seqlens: expected the first value to be 0; got 1"),
    "not to T": ({"cu_seqlens": cu(0, 4, 9)}, ValueError, "cu_seqlens: expected the last value to be T = 10; got 9"),
    "beyond T": ({"cu_seqlens": cu(0, 4, 11)}, ValueError, "cu_seqlens: expected the last value to be T = 10; got 11"),
    "falling": ({"cu_seqlens": cu(0, 6, 4, 10)}, ValueError, "cu_seqlens: expected values that never fall; got 4 after 6 at position 2"),
    "float": ({"cu_seqlens": torch.tensor([0.0, 10.0])}, TypeError, "cu_seqlens: expected int32 or int64; got float32"),
    "a list": ({"cu_seqlens": [0, 10]}, TypeError, "cu_seqlens: expected an integer tensor; got list"),
    "no sequence": ({"cu_seqlens": cu(0)}, ValueError, "cu_seqlens: expected shape [N + 1] ... ; got [1]"),
    "rank 2": ({"cu_seqlens": cu(0, 10)[None]}, ValueError, "cu_seqlens: expected shape [N + 1] ... ; got [1, 2]"),
    "on another device": ({"cu_seqlens": torch.empty(2, dtype=torch.int64, device="meta")}, ValueError, "cu_seqlens: expected device cpu or cpu; got meta"),
    "state for one sequence": ({"cu_seqlens": cu(0, 4, 10), "state": state((1, 3, 4, 5), (1, 3, 4, 5))}, ValueError, "state.S: expected shape [N, H, K, V] = [2, 3, 4, 5]; got [1, 3, 4, 5]"),
}  # fmt: skip


def assert_says(error, text):
    """The parts of `text` between dots come in order in the message."""
    pattern = ".*".join(re.escape(part) for part in text.split(" ... "))
    assert re.search(pattern, str(error), re.DOTALL), str(error)


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case):
    changes, error, says = MISUSE[case]
    with pytest.raises(error) as caught:
        rla.attend(**arguments(**changes))
    assert_says(caught.value, says)


@pytest.mark.parametrize("case", PACKED_MISUSE)
def test_misuse_of_packed_sequences(case):
    changes, error, says = PACKED_MISUSE[case]
    with pytest.raises(error) as caught:
        rla.attend(**arguments(case=PACKED, **changes))
    assert_says(caught.value, says)


def test_the_good_calls_are_good():
    rla.attend(**arguments())
    rla.attend(**arguments(case=PACKED, cu_seqlens=cu(0, 4, 10, dtype=torch.int32)))
    rla.attend(**arguments(state=state()))
    rla.attend(**arguments("gla"))


def test_values_are_read_elsewhere_on_request_only():
    """On another device than the CPU values are not read, unless `rla.check(values=True)` asks for it."""
    x = {n: t.detach().to("meta") for n, t in make(rla.METHODS["gdn"], CASE, torch.float32).items()}
    x["log_alpha"] = torch.ones_like(x["log_alpha"])
    args = [x.get(n) for n in NAMES[:6]]
    rla.check(*args, method=rla.METHODS["gdn"], state=None, cu_seqlens=None)
    cpu = [None if t is None else torch.ones(t.shape) for t in args]
    with pytest.raises(ValueError, match="log_alpha: expected values <= 0"):
        rla.check(*cpu, method=rla.METHODS["gdn"], state=None, cu_seqlens=None, values=True)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({}, ValueError, r"q: expected T = 1, one token for each sequence; got T = 10"),
        ({"state": None}, TypeError, r"state: expected a rla\.State to update; got None"),
    ],
)
def test_misuse_of_step(changes, error, says):
    with pytest.raises(error, match=says):
        rla.step(**{**arguments(state=state()), **changes})


ONE = Case(B=2, T=1, H=3, K=4, V=5)


def one_token(x):
    """The misuse of a whole sequence as that of its first token."""

    def first(t):
        if isinstance(t, torch.Tensor) and t.dim() > 1:
            t = t[:, :, :1] if tuple(t.shape[1:3]) == (3, 10) else t[:, :1] if t.shape[1] == 10 else t
        return t

    return {n: t if n == "state" else first(t) for n, t in x.items()}


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in MISUSE
        if not c.startswith(("head-first", "cu_seqlens", "v of another T", "gamma of another T", "one positive"))
    ],
)
def test_a_step_checks_what_attend_checks(case):
    """With or without gradients, whose absence opens the quick way."""
    changes, error, _ = MISUSE[case]
    x = one_token(arguments(**changes))
    x.setdefault("state", state() if rla.METHODS.get(x["method"], rla.Method()).has_R else state(R=None))
    with torch.no_grad(), pytest.raises(error) as quick:
        rla.step(**x)
    with torch.enable_grad(), pytest.raises(error) as full:
        rla.step(**x)
    if "log_alpha" not in case:  # the kernel doesn't tell the value
        assert str(quick.value) == str(full.value)


def test_a_refused_step_changes_nothing():
    x = arguments(case=ONE, state=rla.State(torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5)))
    x["log_alpha"][1, 0, 2] = 0.5
    with torch.no_grad(), pytest.raises(ValueError, match="log_alpha: expected values <= 0"):
        rla.step(**x)
    assert all((M == 1).all() for M in x["state"])


def test_step_refuses_gradients():
    x = arguments(case=ONE, state=state())
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match="step: not differentiable"):
        rla.step(**x)
    with torch.no_grad():
        rla.step(**x)
