"""Recipes: what a file may say, what is said of a mistake, and the paper's numbers."""

import dataclasses
from pathlib import Path

import pytest

from rla.train.command import main, parse
from rla.train.recipe import Recipe, RecipeError, load_recipe, recipe_from_dict

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_load(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe_from_dict(recipe.to_dict()) == recipe
    recipe.model.config(256 if recipe.data.path != "mqar" else recipe.data.mqar.vocab_size)


def test_the_papers_recipe():
    """Tables 6 and 7."""
    recipe = load_recipe(RECIPES / "paper-1.5b.toml")
    config = recipe.model.config(200064)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (2048, 8192, 16)
    assert (config.num_attention_heads, config.resolved_head_dim) == (16, 128)
    assert config.initializer_range == 0.006
    o, s = recipe.optimizer, recipe.schedule
    assert (o.lr, o.min_lr, o.weight_decay, o.clip) == (3e-4, 3e-5, 0.1, 1.0)
    assert (s.batch_tokens, s.warmup_tokens, s.total_tokens) == (4 * 2**20, 500_000_000, 100_000_000_000)
    softmax = dataclasses.replace(recipe.model, mixer=("softmax",)).config(200064)
    assert (softmax.num_attention_heads, softmax.num_key_value_heads) == (32, 4)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimzer": {}}, "optimzer: unknown field. Did you mean optimizer?"),
        ({"optimizer": {"weight_decy": 1}}, "optimizer.weight_decy: unknown field. Did you mean optimizer.weight_decay?"),
        ({"model": {"lr": 1}}, "model.lr: unknown field. Did you mean optimizer.lr?"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: expected a number; got 'fast'"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr: expected a number above 0; got -1.0"),
        ({"optimizer": {"lr": True}}, "optimizer.lr: expected a number; got True"),
        ({"optimizer": {"min_lr": 1}}, "optimizer.min_lr: expected at most lr = 0.0003; got 1.0"),
        ({"optimizer": {"beta2": 1}}, "optimizer.beta2: expected a number from 0 up to, not including, 1; got 1.0"),
        ({"optimizer": 3}, "optimizer: expected a section; got 3"),
        ({"seed": 1.5}, "seed: expected a whole number; got 1.5"),
        ({"log": {"tracker": "wandbb"}}, "log.tracker: expected one of none, tensorboard, trackio, wandb; got 'wandbb'"),
        ({"schedule": {"batch_tokens": 1000}}, "schedule.batch_tokens: expected a multiple of the length of a sequence, 512"),
        ({"schedule": {"warmup_tokens": 10**9}}, "schedule.warmup_tokens: expected at most total_tokens"),
        ({"model": {"mixer": []}}, "model.mixer: expected at least one value; got none"),
        ({"parallel": {"micro_sequences": 0}}, "parallel.micro_sequences: expected a number above 0; got 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tree, message):
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(tree)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": ("rdnn",)}, "model.mixer: unknown name 'rdnn'. Did you mean 'rdn'?"),
        ({"preset": "huge"}, "model.preset: expected one of tiny, small, 340m, 1.5b, paper; got 'huge'"),
        ({"vocab_size": 8}, "model.vocab_size: the data has 257 tokens; got 8"),
    ],
)
def test_models_that_can_not_be(changes, message):
    model = dataclasses.replace(Recipe().model, **changes)
    with pytest.raises(RecipeError) as caught:
        model.config(257)
    assert str(caught.value).startswith(message)


def test_options_change_fields():
    recipe = parse(
        [str(RECIPES / "tiny.toml"), "--optimizer.lr", "1e-3", "--model.mixer", "gdn", "softmax", "--log.every", "3"]
    )
    assert recipe.optimizer.lr == 1e-3
    assert recipe.model.mixer == ("gdn", "softmax")
    assert recipe.log.every == 3
    assert recipe.schedule == load_recipe(RECIPES / "tiny.toml").schedule


def test_an_unknown_option_says_so(capsys):
    with pytest.raises(SystemExit) as caught:
        parse([str(RECIPES / "tiny.toml"), "--optimizer.learning-rate", "1"])
    assert caught.value.code == 2
    assert "--optimizer.learning-rate" in capsys.readouterr().err


def test_files_that_are_no_recipes(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml")]) == 2
    assert "no such recipe" in capsys.readouterr().err
    (tmp_path / "broken.toml").write_text("[model\n")
    assert main([str(tmp_path / "broken.toml")]) == 2
    assert "not TOML" in capsys.readouterr().err
    (tmp_path / "typo.toml").write_text("[optimizer]\nlearningrate = 1\n")
    assert main([str(tmp_path / "typo.toml")]) == 2
    assert "typo.toml: optimizer.learningrate: unknown field." in capsys.readouterr().err


def test_data_that_is_not_there(tmp_path, capsys):
    (tmp_path / "r.toml").write_text(f'out = "{tmp_path / "run"}"\n[data]\npath = "{tmp_path / "tokens"}"\n')
    assert main([str(tmp_path / "r.toml")]) == 2
    assert str(tmp_path / "tokens") in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_help_has_an_example(capsys):
    assert main(["--help"]) == 0
    assert "rla train recipes/tiny.toml" in capsys.readouterr().out
