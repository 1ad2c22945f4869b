"""Transformers' own tests of models (`ModelTesterMixin`, and `GenerationTesterMixin` where it is found) on ours.

They are not part of the installed package, and not copied here. To run them:

    pip download --no-binary :all: --no-deps transformers==5.22.2 && tar xzf transformers-*.tar.gz
    pip install parameterized
    TRANSFORMERS_SOURCE=transformers-5.22.2 python -m pytest -o addopts=-q tests/test_models_transformers.py

An sdist has `tests/test_modeling_common.py` alone; with a git checkout the generation tests run too. (`addopts` without
--strict-markers: that file has markers of its own.)

Of 5.22.2's tests, for rdn, softmax and a hybrid of them: 232 pass, none fail, 276 are skipped by the mixin itself, because they
need attention weights as output (90: SDPA has none, linear layers neither), Flash Attention (42), a GPU, MPS or several (30),
deepspeed (12), the kernels library (6), or something that the model doesn't have: experts, RoPE scaling, position embeddings,
a tensor-parallel plan, weight conversions, sub-configs, modules kept in float32, Transformers' output-capturing decorator.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import unittest
import unittest.mock
import warnings
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from model_common import MIXERS, tiny_config, tokens
from rla.models import RLAForCausalLM, RLAModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SOURCE = Path(os.environ.get("TRANSFORMERS_SOURCE", "/nowhere"))

SKIPPED = {
    "test_generation_tester_mixin_inheritance": "asks for GenerationTesterMixin, which an sdist does not have",
}


def _mixins() -> tuple[type, ...]:
    """The mixins found; nothing where there is no source."""
    if not (SOURCE / "tests" / "test_modeling_common.py").exists() or importlib.util.find_spec("parameterized") is None:
        return ()
    # A package of its own name, so that it does not meet this directory's modules.
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(SOURCE / "tests")]
    sys.modules["transformers_tests"] = package
    found = []
    for module, name in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
        try:
            found.append(getattr(importlib.import_module(f"transformers_tests.{module}"), name))
        except ImportError:
            stub = types.ModuleType(f"transformers_tests.{module}")
            setattr(stub, name, type(name, (), {}))
            sys.modules[f"transformers_tests.{module.split('.')[0]}"] = types.ModuleType(module.split(".")[0])
            sys.modules[stub.__name__] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # markers that this project does not know
        common = importlib.import_module("transformers_tests.test_modeling_common")
    generation = [mixin for mixin in found if mixin.__name__ == "GenerationTesterMixin"]
    return (common.ModelTesterMixin, *generation)


class ModelFacts:
    """What the mixins ask about the model under test."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 24, 2, 2, 61
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, parent: unittest.TestCase, mixer: str) -> None:
        self.parent, self.mixer = parent, mixer

    def get_config(self):
        return tiny_config(self.mixer, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.05)

    def prepare_config_and_inputs_for_common(self):
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.int64)
        return self.get_config(), {"input_ids": tokens(self.batch_size, self.seq_length), "attention_mask": mask}


MIXINS = _mixins()


def _suite(mixer: str) -> type:
    """A test case of the mixins for one mixer."""

    def skip(why: str):
        def test(self, *args, **kwargs):
            self.skipTest(why)

        return test

    def set_up(self) -> None:
        # The mixins look up by class name which models take labels; a registered model is not in those tables.
        for table, name in ((MODEL_MAPPING_NAMES, "RLAModel"), (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "RLAForCausalLM")):
            patch = unittest.mock.patch.dict(table, {"rla": name})
            patch.start()
            self.addCleanup(patch.stop)
        self.model_tester = ModelFacts(self, mixer)

    body = {
        "all_model_classes": (RLAModel, RLAForCausalLM),
        "all_generative_model_classes": (RLAForCausalLM,),
        "has_attentions": False,
        "test_resize_embeddings": True,
        "setUp": set_up,
        "__module__": __name__,
    }
    names = {name for mixin in MIXINS for name in dir(mixin) if name.startswith("test_")}
    body |= {name: skip(why) for name, why in SKIPPED.items() if name in names}
    return type(f"Test_{mixer.replace('+', '_')}", (*MIXINS, unittest.TestCase), body)


if MIXINS:
    for _mixer in ("rdn", "softmax", "rdn+softmax"):
        globals()[f"Test_{_mixer.replace('+', '_')}"] = _suite(_mixer)
else:

    def test_transformers_own_tests():
        pytest.skip("set TRANSFORMERS_SOURCE to an unpacked sdist or a checkout of Transformers, and install parameterized")


def test_suites_name_known_mixers():
    assert {"rdn", "softmax", "rdn+softmax"} <= set(MIXERS)
