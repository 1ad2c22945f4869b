"""Saving, loading, exporting and upgrading; and what a broken checkpoint says."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from model_common import FEW, tiny, tokens
from rla.models import RLAConfig, RLAForCausalLM, RLAModel


@pytest.mark.parametrize("mixer", FEW)
def test_round_trip_through_auto_classes(mixer, tmp_path):
    model, ids = tiny(mixer), tokens(2, 6)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RLAConfig)
    assert config.mixer == model.config.mixer
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, RLAForCausalLM)
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, RLAModel)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    marks = {name for name, p in again.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marks == {name for name, p in model.named_parameters() if p.ndim < 2}


def test_folder_holds_card_shim_and_one_copy_of_tied_weights(tmp_path):
    from safetensors import safe_open

    model = tiny("rdn+softmax")
    model.save_pretrained(tmp_path / "my-model")
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "# my-model" in card
    assert "2 layers of rdn and softmax" in card
    assert (tmp_path / "my-model" / "modeling_shim.py").read_text().startswith("from rla.models import")
    assert json.loads((tmp_path / "my-model" / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    with safe_open(tmp_path / "my-model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    (tmp_path / "my-model" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "my-model")
    assert (tmp_path / "my-model" / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_shim_opens_without_the_import(tmp_path):
    tiny("rla").save_pretrained(tmp_path / "m")
    code = f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "m")!r}, trust_remote_code=True)
assert type(model).__name__ == "RLAForCausalLM", type(model)
model.save_pretrained({str(tmp_path / "n")!r})
"""
    env = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "hf")}
    import os

    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **env})
    assert (tmp_path / "n" / "modeling_shim.py").read_text() == (tmp_path / "m" / "modeling_shim.py").read_text()
    assert not list((tmp_path / "n").glob("configuration*.py"))


@pytest.mark.parametrize(("old", "new"), [("gdn", "rdn"), ("sgla", "rla")])
def test_upgrade_initialises_and_names_gamma(old, new, tmp_path):
    model = tiny(old)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"no model.layers.0.mixer.gates.gamma_proj.weight, model.layers.1.*: initialised"):
        upgraded = RLAForCausalLM.from_pretrained(tmp_path, mixer=new)
    assert upgraded.config.mixer == new
    before, after = model.state_dict(), upgraded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(set(after) - set(before)) == [f"model.layers.{i}.mixer.gates.gamma_proj.weight" for i in range(2)]
    gamma = after["model.layers.0.mixer.gates.gamma_proj.weight"]
    assert 0.2 < gamma.std() < 0.6  # initializer_range is 0.4 here
    assert upgraded(tokens(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize("kept", [0, 5, 100, -100])
def test_cut_off_weights_are_named(kept, tmp_path):
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(OSError, match=r"model\.safetensors: not a whole safetensors file.*fetch it again"):
        RLAForCausalLM.from_pretrained(tmp_path)


def test_corrupted_header_is_named(tmp_path):
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\0" * 32
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"model\.safetensors: not a whole safetensors file"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_config_from_a_newer_version_says_what_to_do(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "config_version": 2}))
    with pytest.raises(ValueError, match="pip install -U residual-linear-attention"):
        RLAForCausalLM.from_pretrained(tmp_path)
