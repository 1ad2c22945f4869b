"""The examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_a_model_of_your_own_learns_to_count(capsys):
    example = load("own_model")
    model = example["train"](120)
    assert example["go_on"](model, torch.tensor([[3, 5, 7, 9]]), 5) == [11, 13, 15, 17, 19]
    whole, _ = model(torch.tensor([[3, 5, 7, 9, 11]]))
    first, states = model(torch.tensor([[3, 5, 7]]))
    rest, _ = model(torch.tensor([[9, 11]]), states)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole, rtol=1e-4, atol=1e-4)


def test_a_method_of_your_own():
    example = load("own_method")
    assert example["error"](example["MINE"]) < 1e-12
    assert example["error"](example["TIGHT"]) < 1e-12
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 40, 6)
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.nn.functional.normalize(q, dim=-1)
    alpha, beta, gamma = torch.rand(3, 40)
    out = example["with_psi"](lambda e: e.clip(-1, 1), k, v, q, alpha, beta, gamma)
    rla = example["rla"]
    x = [t[None, :, None] for t in (q, k, v, alpha.log(), beta, gamma)]
    torch.testing.assert_close(out, rla.attend(*x, method="rla")[0][0, :, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_text_of_your_own(tmp_path):
    books = []
    for i in range(12):
        books.append(str(tmp_path / f"{i}.txt"))
        Path(books[-1]).write_text(f"It was a bright cold day number {i}, and nothing happened.\n" * 60)
    model = load("own_text")["main"](books, tmp_path / "run", tokens=4 * 4096)
    assert (model / "config.json").exists()
    assert (model / "tokenizer.json").exists()


def test_the_recall_table_has_all_methods():
    example = load("recall")
    for name in ("sgla", "rdn"):
        errors = example["best_errors"](example["rla"].METHODS[name], 8)
        assert errors.shape == (example["SEEDS"],)
        assert 0 <= errors.mean() < 0.2
