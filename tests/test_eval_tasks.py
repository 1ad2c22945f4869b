"""Every task of the table on small files in its dataset's schema: prompts, targets, metrics; reading files; needles."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest

from eval_common import FIXTURES, fixtures_with_mmlu
from rla.eval import functions, needle, results, sources
from rla.eval.sources import BrokenData, MissingData, Source
from rla.eval.tasks import TASKS, build, choose, files, manager, subjects

GRID = {"lengths": [500, 900], "depths": 3, "samples": 2, "seed": 0}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    from rla.data.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def known(tokenizer_folder):
    metadata = {"pretrained": tokenizer_folder, "data": str(FIXTURES), "needle": GRID}
    return manager(TASKS.values(), metadata)


# Name: the first document's context, what follows it, and the metrics of a harness that is right about it.
FIRST = {
    "lambada_openai": ("She looked for the key under the mat, behind the pot and in the shed, and at last found the", " key"),
    "arc_challenge": ("Question: Why does ice float on water?\nAnswer:", " It is less dense."),
    "arc_easy": ("Question: Which of these is a liquid at room temperature?\nAnswer:", " water"),
    "hellaswag": ("Cleaning windows: A man stands on a ladder. He", " wipes the glass with a cloth."),
    "piqa": ("Question: To open a jar,\nAnswer:", " turn the lid."),
    "social_iqa": ("Q: Kim gave her seat to an old man. How would others describe Kim?\nA:", " kind"),
    "winogrande": ("The cup did not fit in the box because the cup", " was too big."),
    "based_drop": (
        "The home team scored 14 points in the first half and 7 in the second. In the second half the home team scored",
        " It was 7 POINTS, they say",
    ),
    "fda": ("510(k) summary. Device name: Alpha pump. Regulation number: 880.5725. Device name:", " ALPHA PUMP of"),
    "based_nq": ("The bridge was opened in 1932 by the mayor. The bridge was opened in", " 1932"),
    "squad_completion": ("The tower was built in 1889 and is 330 metres high. The tower was built in", " the year 1889"),
    "swde": ("Title The Long Road Director Jane Doe Year 1999 Director:", " jane doe"),
    "based_triviaqa": ("Rivers  The Nile flows through Egypt. The Nile flows through", " egypt"),
    "squad_questions": (
        "The Tower\nThe tower was built in 1889.\n\nQuestion: When was the tower built?\nAnswer:",
        " It was built in 1889.",
    ),
    "nq_oracle": ("The Song\nThe song was written by Ada Park.\n\nQuestion: who wrote the song\nAnswer:", " ada park"),
}


METRICS = {column.task: column.metric for column in results.COLUMNS[5]}


def first_requests(task):
    task.build_all_requests(limit=1)
    return task.instances


@pytest.mark.parametrize("name", FIRST)
def test_prompts_and_metrics(name, known):
    context, right = FIRST[name]
    (task,) = build(TASKS[name], known, FIXTURES).values()
    task.set_config(key="num_fewshot", value=0)
    asked = first_requests(task)
    doc = task.eval_docs[0]
    assert len(task.eval_docs) == 2
    assert asked[0].args[0] == context
    metric = METRICS.get(name, "contains")
    if asked[0].request_type == "generate_until":
        assert asked[0].args[1]["max_gen_toks"] == 48
        assert asked[0].args[1]["until"] == ["\n"]
        assert task.process_results(doc, [right])[metric] == 1
        assert task.process_results(doc, [" nothing of the kind"])[metric] == 0
        return
    endings = [request.args for request in asked]
    assert (context, right) in endings
    if name == "lambada_openai":
        assert task.process_results(doc, [(-0.5, True)]) == {"perplexity": -0.5, "acc": 1}
        return
    scores = [(-1.0 if pair == (context, right) else -99.0, False) for pair in endings]
    assert task.process_results(doc, scores)[metric] == 1
    assert task.process_results(doc, [(-100 - score, False) for score, _ in scores])[metric] == 0


def test_the_table_is_tested_whole():
    others = {"wikitext", "gsm8k_ppl", "humaneval_ppl", "mmlu_continuation", "needle", "needle_pairs"}
    assert set(FIRST) | others == set(TASKS)
    used = {(column.task, column.metric) for columns in results.COLUMNS.values() for column in columns}
    assert {task for task, _ in used} | {"squad_questions", "nq_oracle", "needle_pairs"} == set(TASKS)


def test_the_harness_s_definitions_name_the_same_data(known, monkeypatch):
    """Without a folder of files: what a task asks the hub for, answered with the files of the fixtures."""
    asked = []

    def load_dataset(path, name=None, split=None, **_):
        asked.append((path, name))
        (source,) = (t.source for t in TASKS.values() if t.source and (t.source.dataset, t.source.config) == (path, name))
        rows = sources.load(FIXTURES, source)
        return rows if split else {source.split: rows, "train": rows, "dev": rows}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    online = manager(TASKS.values(), {key: value for key, value in known.metadata.items() if key != "data"})
    for task in TASKS.values():
        if task.source is not None and not task.source.is_local:
            (built,) = build(task, online, None).values()
            assert len(built.eval_docs) == 2
            assert asked[-1] == (task.source.dataset, task.source.config)
    assert len(asked) == 16


def test_perplexity_documents(known):
    (task,) = build(TASKS["gsm8k_ppl"], known, FIXTURES).values()
    (request,) = first_requests(task)
    text = "Question: Ann has 3 apples and buys 2 more. How many has she?\nAnswer: Ann has 3+2=<<3+2=5>>5 apples.\n#### 5"
    assert request.args == (text,)
    assert task.process_results(task.eval_docs[0], [-7.0]) == {
        "perplexity": (-7.0, len(text)),
        "bits_per_byte": (-7.0, len(text)),
    }
    assert task.aggregation()["perplexity"]([(-6.0, 2), (-3.0, 1)]) == pytest.approx(math.exp(3))
    (task,) = build(TASKS["humaneval_ppl"], known, FIXTURES).values()
    (request,) = first_requests(task)
    assert request.args == ('def add(a, b):\n    """ Sum of two numbers. """\n    return a + b\n',)
    (task,) = build(TASKS["wikitext"], known, FIXTURES).values()
    (request,) = first_requests(task)
    assert request.args == (" = A small page =\n\nThe page has a well-known beginning, and an end.\n",)


def test_mmlu_needs_every_subject(known, tmp_path):
    task = TASKS["mmlu_continuation"]
    assert len(subjects(task, known)) == 57
    with pytest.raises(MissingData, match=r"56 of 57 subjects are missing, the first: no .*abstract_algebra/test\.jsonl\.gz"):
        files(task, known, FIXTURES)
    whole = fixtures_with_mmlu(tmp_path / "data")
    assert len(files(task, known, whole)) == 57
    built = build(task, known, whole)
    assert len(built) == 57
    one = built["mmlu_astronomy_continuation"]
    one.set_config(key="num_fewshot", value=0)
    asked = [request.args for request in first_requests(one)]
    start = "The following are questions (with answers) about astronomy.\n\nQuestion: Which body does the Earth orbit?\nAnswer:"
    assert asked[1] == (start, " the Sun")
    assert one.process_results(one.eval_docs[0], [(-9.0, False), (-1.0, False), (-9.0, False), (-9.0, False)]) == {
        "acc": 1.0,
        "acc_norm": 1.0,
    }


def test_cloze_prompts_drop_what_the_passage_repeats():
    doc = {"context": "The river is long. Its length is", "question": "Its length is", "answers": ["300 km"]}
    assert functions.cloze_prompt(doc) == "The river is long. Its length is"
    assert functions.first_answer(doc) == " 300 km"
    assert functions.contains(doc, ["about 300 KM"]) == {"contains": 1}
    assert functions.contains({"answers": ["a+b"]}, ["aab"]) == {"contains": 0}


def test_choosing_tasks():
    assert [task.name for task in choose("language", [], data=False)] == [
        "wikitext",
        "lambada_openai",
        "gsm8k_ppl",
        "humaneval_ppl",
    ]
    assert [task.name for task in choose(None, ["piqa", "wikitext"], data=False)] == ["piqa", "wikitext"]
    recall = {task.name for task in choose("recall", [], data=False)}
    assert {task.name for task in choose("recall", [], data=True)} - recall == {"squad_questions", "nq_oracle"}
    assert len(choose("paper", [], data=True)) == len(TASKS)
    with pytest.raises(ValueError, match=r"unknown task 'hellswag'. Did you mean hellaswag"):
        choose(None, ["hellswag"], data=False)
    with pytest.raises(ValueError, match="expected a suite"):
        choose(None, [], data=False)


ROW = {"page": "a text"}
PAGES = Source("owner/name", "config", "test", ("page",))


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def parquet(path: Path, rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_layouts_and_formats(tmp_path):
    line = json.dumps(ROW).encode() + b"\n"
    base = tmp_path / "hub/owner/name"
    for path in (base / "data/config/test.jsonl", base / "config/test.jsonl"):
        put(path, line + b"\n" + line)
        assert sources.load(tmp_path, PAGES)["page"][:] == ["a text"] * 2
        shutil.rmtree(base)
    put(base / "data/config/test.jsonl.gz", gzip.compress(line))
    assert sources.load(tmp_path, PAGES)["page"][:] == ["a text"]
    shutil.rmtree(base)
    for i in (0, 1):
        parquet(base / f"config/test-0000{i}-of-00002.parquet", [{"page": str(i)}])
    assert sources.load(tmp_path, PAGES)["page"][:] == ["0", "1"]
    put(base / "data/test.jsonl", line)
    with pytest.raises(MissingData, match="configuration other"):  # files of no configuration are not those of another one
        sources.find(tmp_path, Source("owner/name", "other", "test"))
    assert sources.find(tmp_path, Source("owner/name", None, "test")) == [base / "data/test.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"page": "a"}\n{"page": \n', r"test\.jsonl, line 2: not JSON"),
        (b'{"page": "a"}\n\n["a"]\n', r"test\.jsonl, line 3: expected a JSON object; got list"),
        (b'{"page": "a"}\n{"text": "a"}\n', r"line 2: no 'page'; got the columns text"),
        (b'{"text": "a"}\n', r"line 1: no 'page'"),
        (b'{"page": "a"}\n{"page": "a", "x": 1}\n', r"line 2: 'x' is in no line before"),
        (b'{"page": "a"}\n{"page": ["a"]}\n', r"test\.jsonl: columns of mixed types"),
        (b'{"page": "\xff"}\n', r"line 1: not JSON"),
        (b"", r"test\.jsonl: no rows"),
    ],
)
def test_broken_lines_are_named(tmp_path, content, message):
    put(tmp_path / "hub/owner/name/config/test.jsonl", content)
    with pytest.raises(BrokenData, match=message):
        sources.load(tmp_path, PAGES)


def test_broken_files_are_named(tmp_path):
    whole = gzip.compress(json.dumps(ROW).encode() * 99)
    path = put(tmp_path / "hub/owner/name/config/test.jsonl.gz", whole[: len(whole) // 2])
    with pytest.raises(BrokenData, match=r"test\.jsonl\.gz: not a whole gzip file"):
        sources.load(tmp_path, PAGES)
    path.unlink()
    put(tmp_path / "hub/owner/name/config/test.parquet", b"PAR1 but no more")
    with pytest.raises(BrokenData, match=r"test\.parquet: not a whole parquet file"):
        sources.load(tmp_path, PAGES)


def test_missing_files_are_described(tmp_path):
    with pytest.raises(MissingData) as error:
        sources.find(tmp_path, PAGES)
    assert f"{tmp_path}/hub/owner/name/data/config/test.jsonl.gz" in str(error.value)
    assert "with page" in str(error.value)
    with pytest.raises(MissingData, match=r"recall/squad_1000\.jsonl\.gz"):
        sources.find(tmp_path, functions.SQUAD_QUESTIONS)


@pytest.mark.parametrize("name", ["needle", "needle_pairs"])
def test_needles_lie_where_they_should(name, known):
    (task,) = build(TASKS[name], known, FIXTURES).values()
    docs = list(task.eval_docs)
    assert len(docs) == 2 * 3 * 2
    for doc in docs:
        prompt = task.doc_to_text(doc)
        assert doc["length"] - 80 < len(prompt) + needle.ANSWER_TOKENS <= doc["length"]  # bytes are the tokens here
        text, query = prompt.split("\n\n")
        key = query.removeprefix("The special magic number for ").removesuffix(" is")
        hidden = f"The special magic number for {key} is {doc['value']}."
        assert text.count(hidden) == 1
        assert text.count("magic") == (3 if name == "needle_pairs" else 1)
        assert text.index(hidden) / max(1, len(text) - len(hidden)) == pytest.approx(doc["depth"], abs=0.12)
        assert task.process_results(doc, [f" {doc['value']}."]) == {"acc": 1}
        assert task.process_results(doc, [" 123"]) == {"acc": 0}
    assert len({doc["value"] for doc in docs}) == 2 * 3  # of each sample and depth, the same at all lengths


def test_haystack_of_a_file(tmp_path, tokenizer_folder):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark night. The wind blew. " * 60)
    tokenizer = functions.tokenizer_of(tokenizer_folder)
    rows = needle.documents(needle.Grid((300,), 2, 1, 0, str(path)), tokenizer, together=False)
    assert all("The wind blew." in row["prompt"] for row in rows)
    with pytest.raises(ValueError, match="20 tokens leave no room"):
        needle.documents(needle.Grid((20,), 2, 1), tokenizer, together=False)


@pytest.mark.parametrize(
    ("options", "message"), [({"lengths": ()}, "lengths"), ({"depths": 0}, "depths"), ({"samples": 0}, "samples")]
)
def test_grids_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        needle.Grid(**options)


def test_unknown_field_of_the_grid():
    with pytest.raises(ValueError, match="unknown field 'length'"):
        needle.Grid.from_metadata({"needle": {"length": 3}})


def test_cells_and_heat_map(tmp_path):
    samples = [{"doc": {"length": n, "depth": d}, "acc": int(n == 8)} for n in (8, 16) for d in (0.0, 1.0) for _ in range(3)]
    cells = needle.cells(samples)
    assert cells[0] == {"length": 8, "depth": 0.0, "acc": 1.0, "n": 3}
    assert [cell["acc"] for cell in cells] == [1, 1, 0, 0]
    needle.heat_map(tmp_path / "map.png", cells, "a model")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
