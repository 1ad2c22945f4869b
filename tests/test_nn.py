"""The layers by themselves: gates, convolution, mixers with their states; no Transformers."""

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rla
from rla.nn import Gates, MixerState, Packing, ResidualAttention, ShortConvolution, SoftmaxAttention, rotate
from rla.nn.attention import faithful_conv_size


def layer(method="rdn", **options) -> Any:
    torch.manual_seed(0)
    return ResidualAttention(24, 2, 8, method, **options).double()


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("method", rla.METHODS)
def test_state_carries_on(method):
    mixer, x = layer(method), inputs(2, 19, 24)
    want, final = mixer(x)
    state: Any = None
    positions, got, at = torch.arange(19)[None], [], 0
    for n in (1, 6, 2, 1, 1, 8):
        y, state = mixer(x[:, at : at + n], state=state, position_ids=positions[:, at : at + n])
        got.append(y)
        at += n
    assert torch.allclose(torch.cat(got, 1), want, atol=1e-10)
    assert torch.allclose(state.memory.S, final.memory.S, atol=1e-10)


@pytest.mark.parametrize("method", ["rdn", "gla", "mamba2", "retnet"])
def test_steps_update_the_memory_in_place(method):
    mixer, x = layer(method), inputs(2, 6, 24)
    position = torch.tensor([[5]])
    want = mixer(x)[0][:, 5:]
    _, state = mixer(x[:, :5])
    before = state.memory.S.detach()
    with torch.no_grad():
        y, after = mixer(x[:, 5:], state=MixerState(state.conv, rla.State(before, state.memory.R)), position_ids=position)
    assert after.memory.S.data_ptr() == before.data_ptr()
    assert torch.allclose(y, want, atol=1e-10)


@pytest.mark.parametrize("method", ["rdn", "gla", "mamba2", "retnet", "linear"])
def test_packed_sequences_do_not_leak(method):
    mixer, x = layer(method), inputs(1, 12, 24)
    y, state = mixer(x, cu_seqlens=torch.tensor([0, 5, 5, 6, 12]))
    for n, (a, b) in enumerate(((0, 5), (5, 5), (5, 6), (6, 12))):
        alone, end = mixer(x[:, a:b])
        assert torch.allclose(y[:, a:b], alone, atol=1e-10)
        assert torch.allclose(state.memory.S[n : n + 1], end.memory.S, atol=1e-10)
        if state.conv is not None:
            assert torch.allclose(state.conv[n : n + 1], end.conv, atol=1e-10)


def test_short_convolution_is_torchs_and_its_gradient_too():
    torch.manual_seed(0)
    conv, x = ShortConvolution(5, 3).double(), inputs(2, 7, 5).requires_grad_()
    y, past = conv(x)
    want = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), conv.weight.T[:, None], groups=5).transpose(1, 2)
    assert torch.allclose(y, want)
    assert torch.equal(past, x[:, -2:])
    weight, earlier = conv.weight.detach().requires_grad_(), inputs(2, 2, 5).requires_grad_()

    def run(x, past, weight):
        return torch.func.functional_call(conv, {"weight": weight}, (x, past))

    def run_packed(x, past, weight):
        bounds = torch.tensor([0, 4, 7])
        return torch.func.functional_call(conv, {"weight": weight}, (x[:1], past, bounds))

    assert torch.autograd.gradcheck(run, (x, earlier, weight))
    assert torch.autograd.gradcheck(run_packed, (x, earlier, weight))


def test_convolution_keeps_no_sequence_alive():
    _, past = ShortConvolution(4)(torch.randn(1, 100, 4))
    assert past.untyped_storage().nbytes() == past.nbytes


@pytest.mark.parametrize("method", rla.METHODS)
def test_gates_are_what_the_method_says(method):
    m, x = rla.METHODS[method], torch.randn(2, 3, 24)
    torch.manual_seed(0)
    log_alpha, beta, gamma = Gates(24, 2, 8, m).bfloat16()(x.bfloat16())
    assert (log_alpha is None) == (m.decay == "none")
    assert (beta is None) == (m.rate == "one")
    assert (gamma is None) == (not m.has_residual or m.gamma == "tied")
    for gate in (log_alpha, beta, gamma):
        assert gate is None or gate.dtype == torch.float32
    if log_alpha is not None:
        assert log_alpha.shape == ((2, 3, 2, 8) if m.decay == "vector" else (2, 3, 2))
        assert (log_alpha <= 0).all()


def test_fixed_decays_are_retnets():
    log_alpha, _, _ = Gates(8, 4, 2, rla.METHODS["retnet"])(torch.randn(1, 1, 8))
    assert torch.allclose(log_alpha[0, 0].exp(), torch.tensor([1 - 2.0 ** (-5 - h) for h in range(4)]))


def test_first_decays_are_mamba2s():
    torch.manual_seed(0)
    gates = Gates(8, 1000, 2, rla.METHODS["mamba2"])
    dt = F.softplus(gates.dt_bias)
    assert dt.min() > 0.9e-3
    assert dt.max() < 0.11
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert gates.A_log.exp().min() >= 1
    assert gates.A_log.exp().max() <= 16


def test_mamba2_scales_its_input_by_dt_and_skips():
    mixer, x = layer("mamba2"), inputs(1, 4, 24)
    with torch.no_grad():
        mixer.g_proj.weight.zero_().add_(1)
        full = mixer(x)[0]
        mixer.D.zero_()
        assert not torch.allclose(mixer(x)[0], full)
    log_alpha, beta, _ = mixer.gates(x)
    assert torch.allclose(log_alpha, -mixer.gates.A_log.exp() * beta)


def test_own_methods_have_layers_too():
    mine = dataclasses.replace(rla.METHODS["rdn"], decay="vector", loss="logcosh")
    y, _ = layer(mine)(inputs(1, 5, 24))
    assert y.isfinite().all()
    dt_without_decay = dataclasses.replace(rla.METHODS["mamba2"], decay="none")
    assert layer(dt_without_decay)(inputs(1, 5, 24))[0].isfinite().all()


def test_convolutions_are_faithful():
    without = [name for name in rla.METHODS if faithful_conv_size(name) == 0]
    assert without == ["linear", "retnet", "gla"]
    assert layer("gdn").conv.width == 4
    assert layer("gdn", conv_size=0).conv is None


@pytest.mark.parametrize("method", rla.METHODS)
def test_every_parameter_gets_a_gradient_and_vectors_no_decay(method):
    mixer = layer(method)
    mixer(inputs(2, 9, 24))[0].square().sum().backward()
    for name, p in mixer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
        assert getattr(p, "_no_weight_decay", False) == (p.ndim < 2), name


def test_rotary_turns_by_differences():
    q, k = inputs(1, 1, 1, 8), inputs(1, 2, 1, 8)[:, 1:]

    def product(i, j):
        return (rotate(q, torch.tensor([[i]])) * rotate(k, torch.tensor([[j]]))).sum()

    assert torch.allclose(product(3, 1), product(13, 11), atol=1e-5)
    assert not torch.allclose(product(3, 1), product(3, 2), atol=1e-3)
    assert torch.allclose(rotate(q, torch.tensor([[0]])), q)


def test_softmax_attention_groups_and_goes_on():
    torch.manual_seed(0)
    mixer, x = SoftmaxAttention(24, 4, 2, 6).double(), inputs(2, 9, 24)
    want, state = mixer(x)
    assert state.k.shape == (2, 9, 2, 6)
    first, state = mixer(x[:, :4])
    rest, state = mixer(x[:, 4:8], state=state)
    last, _ = mixer(x[:, 8:], state=state)
    assert torch.allclose(torch.cat((first, rest, last), 1), want, atol=1e-6)


def test_packing_round_trip():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]])
    packing, x = Packing.from_mask(mask), torch.randn(3, 3, 2)
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 5]
    assert torch.equal(packing.unpack(packing.pack(x), x.shape), x * mask[..., None])
    assert Packing.from_positions(torch.tensor([[4, 5, 6]])) is None
    documents = Packing.from_positions(torch.tensor([[0, 1, 0], [0, 0, 1]]))
    assert documents is not None
    assert documents.cu_seqlens.tolist() == [0, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResidualAttention(24, 5), "head_dim: hidden_size = 24 is not a multiple of num_heads = 5; give head_dim"),
        (lambda: ResidualAttention(24, 2, -1), "head_dim: expected at least 1; got -1"),
        (lambda: ResidualAttention(24, 0), "num_heads: expected at least 1; got 0"),
        (lambda: ResidualAttention(24, 2, method="rdm"), "method: unknown name 'rdm'. Did you mean 'rdn'?"),
        (lambda: ResidualAttention(24, 2, 7, "retnet"), "expected an even number; got 7"),
        (lambda: ResidualAttention(24, 2, conv_size=1), "width: expected at least 2"),
        (lambda: SoftmaxAttention(24, 4, 3), "num_kv_heads: expected a divisor of num_heads = 4; got 3"),
        (lambda: SoftmaxAttention(24, 4, 4, 3), "expected an even number; got 3"),
        (lambda: _retnet_goes_on(), "position_ids: a rotary method (decay='fixed') that goes on from a state needs them"),
    ],
)
def test_misuse(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def _retnet_goes_on():
    mixer = layer("retnet")
    _, state = mixer(inputs(1, 3, 24))
    return mixer(inputs(1, 1, 24), state=state)
