"""Method and METHODS."""

import dataclasses

import pytest

import rla
from rla.method import get_method

NAMES = (
    *("linear", "retnet", "mamba2", "gla", "sgla", "deltanet", "gdn", "rla", "rdn", "rla-nofit", "rdn-nofit", "rla-tied"),
    *("rdn-tied", "rla-sum", "rdn-sum", "rla-noclip", "rdn-noclip", "rla-nonorm", "rla-logcosh", "rdn-logcosh"),
)


def test_every_name_is_there():
    assert set(rla.METHODS) == set(NAMES)
    assert len(set(rla.METHODS.values())) == len(NAMES), "two names for one method"


def test_default_is_rdn():
    assert rla.Method() == rla.METHODS["rdn"]


@pytest.mark.parametrize(
    ("name", "base", "change"),
    [
        ("sgla", "rla", {"correction": "none"}),
        ("gdn", "rdn", {"correction": "none"}),
        ("deltanet", "gdn", {"decay": "none"}),
        ("rla", "rdn", {"rule": "additive"}),
        ("rla-nofit", "rla", {"correction": "token", "loss": "l2"}),
        ("rdn-tied", "rdn", {"gamma": "tied"}),
        ("rla-sum", "rla", {"gate_output": False}),
        ("rdn-noclip", "rdn", {"loss": "l2"}),
        ("rla-nonorm", "rla", {"qk_norm": False}),
        ("rdn-logcosh", "rdn", {"loss": "logcosh"}),
        ("mamba2", "linear", {"decay": "scalar", "rate": "dt"}),
        ("gla", "linear", {"decay": "vector"}),
        ("retnet", "linear", {"decay": "fixed"}),
    ],
)
def test_a_variant_is_one_change_away(name, base, change):
    assert rla.METHODS[name] == dataclasses.replace(rla.METHODS[base], **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rule": "oja"}, r"Method\.rule: expected one of additive, delta; got 'oja'"),
        ({"correction": None}, r"Method\.correction: .*got None"),
        ({"decay": "matrix"}, r"Method\.decay: .*vector; got 'matrix'"),
        ({"rate": 1.0}, r"Method\.rate: .*got 1\.0"),
        ({"gamma": "beta"}, r"Method\.gamma: expected one of own, tied; got 'beta'"),
        ({"loss": "l1"}, r"Method\.loss: expected one of l2, huber, logcosh; got 'l1'"),
        ({"clip": 0.0}, r"Method\.clip: expected a positive finite number; got 0\.0"),
        ({"clip": -1}, r"Method\.clip: .*got -1"),
        ({"clip": float("inf")}, r"Method\.clip: .*got inf .*l2"),
        ({"clip": float("nan")}, r"Method\.clip: .*got nan"),
        ({"clip": "1"}, r"Method\.clip: expected a positive number; got '1'"),
        ({"gate_output": 1}, r"Method\.gate_output: expected True or False; got 1"),
        ({"qk_norm": "no"}, r"Method\.qk_norm: .*got 'no'"),
    ],
)
def test_a_method_that_makes_no_sense(change, says):
    with pytest.raises(ValueError, match=says):
        rla.Method(**change)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        rla.METHODS["rdn"].rule = "additive"
    with pytest.raises(TypeError):
        rla.METHODS["mine"] = rla.Method()


def test_get_method_names_the_near_miss():
    with pytest.raises(ValueError, match=r"method: unknown name 'rdn-sume'\. Did you mean 'rdn-sum'\?"):
        get_method("rdn-sume")


def test_a_name_may_have_a_threshold():
    assert get_method("rla-clip0.5") == dataclasses.replace(rla.METHODS["rla"], clip=0.5)
    assert get_method("rdn-sum-clip4").clip == 4
    for name in ("rlaa-clip0.5", "rla-clip", "rla-clip-1", "rla-clip0.5x"):
        with pytest.raises(ValueError, match="method: unknown name"):
            get_method(name)
    with pytest.raises(ValueError, match=r"Method.clip: expected a positive finite number; got 0\.0"):
        get_method("rla-clip0")
