"""Slow checks: reuse pays on a long haystack; with RLA_DATA, real data without a network, and `lm_eval run` on the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval_common import harness_model, requests, save_model
from rla.eval import functions, needle, results

pytestmark = pytest.mark.slow
DATA = os.environ.get("RLA_DATA")
STOCK = {
    "wikitext": ("test", "EleutherAI/wikitext_document_level/data/wikitext-2-raw-v1/test.jsonl.gz"),
    "lambada_openai": ("test", "EleutherAI/lambada_openai/data/test.jsonl.gz"),
    "arc_easy": ("test", "allenai/ai2_arc/data/ARC-Easy/test.jsonl.gz"),
    "winogrande": ("validation", "allenai/winogrande/data/winogrande_xl/validation.jsonl.gz"),
}
OURS = ("gsm8k_ppl", "humaneval_ppl", "squad_questions", "nq_oracle", "needle", "needle_pairs")
LIMIT = 2


def test_reuse_on_a_haystack_of_8192_tokens_with_10_needles(tmp_path):
    folder = save_model(tmp_path / "model", hidden_size=128, intermediate_size=256, num_attention_heads=2, head_dim=64)
    rows = needle.documents(needle.Grid((8192,), 10, 1), functions.tokenizer_of(str(folder)), together=True)
    options = {"until": ["\n"], "max_gen_toks": 16, "do_sample": False}
    ask = requests("generate_until", [(row["prompt"], options) for row in rows])
    score = requests("loglikelihood", [(row["prompt"], f" {row['value']}") for row in rows])
    answers, scores, computed = [], [], []
    for reuse in (True, False):
        lm = harness_model(folder, reuse=reuse, batch_size=10)
        answers.append(lm.generate_until(ask))
        scores.append([value for value, _ in lm.loglikelihood(score)])
        computed.append(lm.tokens.computed)
    assert answers[0] == answers[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4, rel=1e-5)
    assert computed[1] > 9 * computed[0]  # what that is in seconds: docs/evaluation.md


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    isolated = ["unshare", "-rn"] if shutil.which("unshare") and not subprocess.call(["unshare", "-rn", "true"]) else []
    return subprocess.run([*isolated, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(DATA is None, reason="RLA_DATA names no folder of data")
def test_real_data_without_a_network_and_the_harness_s_own_figures(tmp_path):
    assert DATA is not None
    folder, out = save_model(tmp_path / "model"), tmp_path / "ours.json"
    grid = {"lengths": [512, 1024], "depths": 2, "samples": 1}
    code = "import sys, tyro; from rla.eval.run import main; sys.exit(tyro.cli(main))"
    arguments = ["--tasks", ",".join((*STOCK, *OURS)), "--data", DATA, "--limit", str(LIMIT), "--out", str(out)]
    arguments += ["--needle-lengths", "512", "1024", "--needle-depths", "2", "--needle-samples", "1"]
    done = run(sys.executable, "-c", code, str(folder), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    include = tmp_path / "tasks"
    shutil.copytree(Path(results.__file__).parent / "yaml", include)
    group: dict = {"group": "files", "task": []}
    for name, (split, path) in STOCK.items():
        files = {"data_files": {split: str(Path(DATA).resolve() / "hub" / path)}}
        change = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": files, "training_split": None}
        group["task"].append(change | ({"validation_split": None} if split == "test" else {}))
    (include / "files.yaml").write_text(json.dumps(group))  # JSON is YAML
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    whole = "max_length=1000000"  # or it would read documents in windows of 2,048 tokens
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True,{whole}", "--tasks", ",".join(("files", *OURS))]
    command += ["--include_path", str(include), "--limit", str(LIMIT), "--output_path", str(tmp_path / "stock")]
    command += ["--metadata", json.dumps({"data": str(Path(DATA).resolve()), "needle": grid})]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "stock").glob("**/*.json")
    stock = json.loads(path.read_text())["results"]
    for name, task in results.read(out)["tasks"].items():
        for metric, found in task["metrics"].items():
            assert found["value"] == pytest.approx(stock[name][f"{metric},none"], rel=1e-5), (name, metric)
