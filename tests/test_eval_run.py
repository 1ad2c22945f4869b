"""`rla eval` on the fixtures: result files, resuming, missing and broken data, other models, bad input; the paper's tables."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import statistics
from pathlib import Path

import pytest
import torch

from eval_common import FIXTURES, fixtures_with_mmlu, save_model
from rla.eval import results
from rla.eval.opened import weights_hash
from rla.eval.run import main

SMALL = {"needle_lengths": (500,), "needle_depths": 2, "needle_samples": 1, "batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny-rdn"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # main sets them; monkeypatch restores them
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment when it was imported


def test_every_task_runs_on_files(model, tmp_path, capsys):
    out = tmp_path / "r.json"
    data = fixtures_with_mmlu(tmp_path / "data")
    assert main(model, suite="paper", data=data, out=out, **SMALL) == 0
    result = results.read(out)
    assert result["model"]["sha256"] == weights_hash(Path(model))
    assert result["model"]["mixers"] == ["rdn"]
    assert result["run"]["data"] == "files"
    assert {"torch", "transformers", "lm_eval", "datasets", "rla", "machine", "date"} <= result["environment"].keys()
    for table in (2, 3, 4):
        for column in results.COLUMNS[table]:
            task = result["tasks"][column.task]
            metric = task["metrics"][column.metric]
            assert math.isfinite(metric["value"])
            assert metric["higher_is_better"] == column.is_share
            assert task["n"] == (114 if column.task == "mmlu_continuation" else 2)
            assert task["num_fewshot"] == 0
            assert task["files"] or column.task == "needle"
            assert 0 < task["tokens"]["computed"] <= task["tokens"]["asked"]
    assert result["tasks"]["needle_pairs"]["tokens"]["saved"] > 0.3
    assert (tmp_path / result["tasks"]["needle"]["figure"]).is_file()
    assert len(result["tasks"]["needle"]["grid"]) == 2
    assert "word_perplexity" in capsys.readouterr().out


def test_wikitext_is_what_a_direct_computation_gives(model, tmp_path):
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    from rla.models import RLAForCausalLM

    out = tmp_path / "r.json"
    assert main(model, tasks="wikitext", data=FIXTURES, out=out) == 0
    net = RLAForCausalLM.from_pretrained(model)
    total, words = 0.0, 0
    path = FIXTURES / "hub/EleutherAI/wikitext_document_level/data/wikitext-2-raw-v1/test.jsonl"
    for line in path.read_text().splitlines():
        doc = json.loads(line)
        tokens = torch.tensor([[256, *wikitext_detokenizer(doc).encode()]])  # 256 ends a text, and begins one
        with torch.no_grad():
            logits = net(tokens).logits[0, :-1].double().log_softmax(-1)
        total += logits.gather(1, tokens[0, 1:, None]).sum().item()
        words += len(re.split(r"\s+", doc["page"]))
    got = results.read(out)["tasks"]["wikitext"]["metrics"]["word_perplexity"]["value"]
    assert got == pytest.approx(math.exp(-total / words), rel=1e-6)


def test_missing_and_broken_data_are_named_and_the_rest_runs(model, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(FIXTURES, data)
    (data / "hub/baber/piqa/data/validation.jsonl").unlink()
    broken = data / "hub/allenai/winogrande/data/winogrande_xl/validation.jsonl"
    broken.write_text(broken.read_text() + "{broken\n")
    out = tmp_path / "r.json"
    assert main(model, tasks="piqa,winogrande,arc_easy", data=data, out=out) == 1
    error = capsys.readouterr().err
    assert f"piqa was not run: no {data}/hub/baber/piqa/data/validation.jsonl.gz" in error
    assert f"winogrande was not run: {broken}, line 3: not JSON" in error
    result = results.read(out)
    assert list(result["tasks"]) == ["arc_easy"]
    assert set(result["missing"]) == {"piqa", "winogrande"}


def test_resume_keeps_what_is_finished(model, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert main(model, tasks="arc_easy", data=FIXTURES, out=out, limit=1) == 0
    result = results.read(out)
    result["tasks"]["arc_easy"]["metrics"]["acc"]["value"] = 0.123
    results.write(out, result)
    assert main(model, tasks="arc_easy,piqa", data=FIXTURES, out=out, limit=1) == 2
    assert "exists; go on with it with --resume" in capsys.readouterr().err
    assert main(model, tasks="arc_easy,piqa", data=FIXTURES, out=out, limit=2, resume=True) == 2
    assert "another run: --limit differ (1, now 2)" in capsys.readouterr().err
    assert main(model, tasks="arc_easy,piqa", data=FIXTURES, out=out, limit=1, resume=True) == 0
    tasks = results.read(out)["tasks"]
    assert tasks["arc_easy"]["metrics"]["acc"]["value"] == 0.123
    assert tasks["piqa"]["n"] == 1


def test_other_models_run_on_the_harness_s_own_code(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from rla.data.tokenizer import load_tokenizer

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).save_pretrained(tmp_path / "llama")
    load_tokenizer("bytes").save_pretrained(tmp_path / "llama")
    out = tmp_path / "r.json"
    assert main(str(tmp_path / "llama"), tasks="wikitext,arc_easy,based_nq", data=FIXTURES, out=out) == 0
    result = results.read(out)
    assert result["model"]["model_type"] == "llama"
    assert all("tokens" not in task for task in result["tasks"].values())
    assert math.isfinite(result["tasks"]["wikitext"]["metrics"]["word_perplexity"]["value"])


def test_bad_input(model, tmp_path, capsys):
    def problem(name=model, **options):
        assert main(name, **{"tasks": "wikitext", "data": FIXTURES, "out": tmp_path / "r.json", **options}) == 2
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert "is not a model: it has no config.json" in problem(str(tmp_path / "empty"))
    assert "there is no folder" in problem(str(tmp_path / "nothing"))
    assert "can't open 'no/such-model-anywhere'" in problem("no/such-model-anywhere")
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer.save_pretrained" in problem(str(bare))
    assert "unknown task 'wikitxt'. Did you mean wikitext" in problem(tasks="wikitxt")
    assert "--data: no folder" in problem(data=tmp_path / "nowhere")
    assert "--limit: expected at least 1" in problem(limit=0)
    assert "expected a suite" in problem(tasks="")
    assert "--needle-haystack: no file" in problem(needle_haystack=tmp_path / "nothing")
    assert "depths: expected at least 1" in problem(needle_depths=0)
    weights = bare / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for path in Path(model).glob("tokenizer*"):
        shutil.copy(path, bare)
    assert "not a whole safetensors file" in problem(str(bare))
    assert not (tmp_path / "r.json").exists()


def fake_result(tasks, limit=None):
    run = {"limit": limit}
    return {"kind": results.KIND, "format": results.FORMAT, "run": run, "tasks": tasks}


def metric(name, value, stderr=None, n=10):
    return {"n": n, "metrics": {name: {"value": value, "stderr": stderr, "higher_is_better": True}}}


def test_tables_put_measured_beside_the_paper_s():
    shares = {c.task: metric(c.metric, 0.25, 0.01) for c in results.COLUMNS[3]}
    table = results.table(3, {"mine": fake_result(shares), "half": fake_result({"fda": metric("contains", 0.5)}, limit=5)})
    assert table.headers[0] == "DROP acc"
    assert table.headers[-1] == "Avg"
    mine, half, *paper = table.rows
    assert [str(cell) for cell in mine.cells] == ["25.0 ±1.0"] * 7 + ["25.00"]
    assert [None if cell is None else str(cell) for cell in half.cells] == [None, "50.0*", *[None] * 6]
    assert {row.source for row in paper} == {"paper"}
    assert {row.source for row in (mine, half)} == {"measured"}
    assert [str(cell) for cell in paper[-1].cells] == ["27.8", "57.5", "26.3", "32.5", "63.4", "43.1", "79.2", "47.11"]
    assert len(results.table(2, {}).rows) == 7
    assert not results.table(2, {}, paper=False).rows
    with pytest.raises(ValueError, match="expected one of 2, 3, 4, 5"):
        results.table(1, {})


@pytest.mark.parametrize("number", [2, 3, 5])
def test_the_paper_s_averages_are_those_of_its_columns(number):
    """A slip in copying would show here; the paper averages numbers it then rounds."""
    for model, values in results.paper_numbers()[str(number)]["models"].items():
        shares = [x for x, column in zip(values, results.COLUMNS[number], strict=False) if column.is_share]
        assert values[-1] == pytest.approx(statistics.mean(shares), abs=0.03), model


def test_files_that_are_no_results(tmp_path):
    path = tmp_path / "x.json"
    for content, message in (
        ("{", "not a result"),
        ("{}", "not a result"),
        ('{"kind": "rla eval", "format": 9}', "format is 9"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            results.read(path)


def test_standard_errors():
    rng = random.Random(0)
    items = [float(rng.random() < 0.3) for _ in range(400)]
    assert results.standard_error(items, "mean") == pytest.approx(statistics.stdev(items) / 20)
    assert results.standard_error([1.0], "mean") is None
    assert results.standard_error(items, "something else") is None
    pairs = [(-rng.uniform(1, 3) * w, w) for w in (rng.randrange(5, 50) for _ in range(300))]
    value = lambda some: math.exp(-sum(x for x, _ in some) / sum(w for _, w in some))  # noqa: E731
    draws = [value(rng.choices(pairs, k=len(pairs))) for _ in range(1500)]
    assert results.standard_error(pairs, "weighted_perplexity") == pytest.approx(statistics.stdev(draws), rel=0.1)
    bits = results.standard_error(pairs, "bits_per_byte")
    assert bits == pytest.approx(results.standard_error(pairs, "weighted_perplexity") / value(pairs) / math.log(2))
    logs = [x / w for x, w in pairs]
    assert results.standard_error(logs, "perplexity") == pytest.approx(
        results.standard_error([(x, 1) for x in logs], "weighted_perplexity")
    )
