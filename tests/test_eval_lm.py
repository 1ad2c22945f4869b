"""Our harness model against the harness's own: log-likelihoods, rolling ones, generation; windows and bounds."""

from __future__ import annotations

import math

import pytest
import torch

from eval_common import harness_model, requests, save_model, stock_model


@pytest.fixture(scope="module", params=["rdn", "rdn+softmax"])
def models(request, tmp_path_factory):
    """Ours with reuse, ours without, the harness's."""
    folder = save_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    options = {"batch_size": 3, "max_length": 64}
    return harness_model(folder, **options), harness_model(folder, reuse=False, **options), stock_model(folder, **options)


CONTEXTS = ["Question: what is it?\nAnswer:", "Question: what is it? No, who?\nAnswer:", "", "x", "long " * 30]
PAIRS = [(context, ending) for context in CONTEXTS for ending in (" yes", " no", " y", " perhaps it is one")]


def test_loglikelihood_agrees_with_the_harness(models):
    ours, plain, stock = (lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True) for lm in models)
    for a, b, c in zip(ours, plain, stock, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-5)
        assert a[0] == pytest.approx(c[0], abs=2e-4)  # float32 sums there
        assert a[1] == b[1] == c[1]
    assert models[0].tokens.computed < models[1].tokens.computed


def test_rolling_windows_agree_with_the_harness(models):
    texts = [("word " * 50,), ("short",), ("Another text, longer than the 64 tokens that the model may see at once.",)]
    ours, plain, stock = (lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for lm in models)
    assert ours == pytest.approx(plain, abs=1e-5)
    assert ours == pytest.approx(stock, rel=1e-6)


@pytest.mark.parametrize("options", [{"until": ["e", "zz"], "max_gen_toks": 12}, {"until": "\n", "max_gen_toks": 5}])
def test_generation_agrees_with_the_harness(models, options):
    contexts = [(context, {**options, "do_sample": False}) for context in CONTEXTS if context]
    ours, plain, stock = (lm.generate_until(requests("generate_until", contexts)) for lm in models)
    assert ours == plain == stock
    assert any(ours)


def test_sampled_generation_is_the_harness_s_own(models):
    options = {"until": ["\n"], "max_gen_toks": 4, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(0)
    ours = models[0].generate_until(requests("generate_until", [("A b c", options)]))
    torch.manual_seed(0)
    assert ours == models[2].generate_until(requests("generate_until", [("A b c", options)]))


def test_a_linear_model_reads_documents_whole(tmp_path):
    """Longer than a segment: the state goes from segment to segment, and nothing is cut into windows."""
    lm = harness_model(save_model(tmp_path / "m", seed=3), segment=100)
    text = "Some words of a document that goes on and on. " * 30
    (got,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    tokens = torch.tensor([[lm.prefix_token_id, *lm.tok_encode(text)]])
    with torch.no_grad():
        logits = lm.model(tokens).logits[0, :-1].double().log_softmax(-1)
    want = logits.gather(1, tokens[0, 1:, None]).sum().item()
    assert tokens.shape[1] > 1000
    assert got == pytest.approx(want, rel=1e-6)
    words = len(text.split())
    assert math.exp(-got / words) == pytest.approx(math.exp(-want / words), rel=1e-6)
    assert lm.tokens.computed == tokens.shape[1] - 1


def test_a_softmax_model_keeps_the_harness_s_bound(tmp_path):
    folder = save_model(tmp_path / "m", "rdn+softmax")
    lm = harness_model(folder)
    assert lm.max_length == stock_model(folder).max_length < 10**7
    assert harness_model(save_model(tmp_path / "linear")).max_length > 10**9


def test_bad_arguments_are_named(tmp_path):
    folder = save_model(tmp_path / "m")
    with pytest.raises(ValueError, match="batch_size: expected a number"):
        harness_model(folder, batch_size="auto")
    lm = harness_model(folder, max_length=8)
    with pytest.raises(ValueError, match="max_gen_toks"):
        lm.generate_until(requests("generate_until", [("a", {"max_gen_toks": 8})]))
    with pytest.raises(ValueError, match="at least one token of context"):
        harness_model(folder).generate_until(requests("generate_until", [("", {"max_gen_toks": 8})]))
