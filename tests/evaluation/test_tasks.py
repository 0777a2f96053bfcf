"""Tasks against lm-eval's own run of its tasks, fed the same rows by another way; and what cannot be measured."""

import csv
import json
import logging
import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fpquant
from fpquant.errors import FpquantError
from fpquant.evaluation import task_data, tasks
from fpquant.evaluation.tasks import load_task, measure
from fpquant.models import load_model

pytest.importorskip("lm_eval")

SHARED = Path(__file__).resolve().parents[3] / "shared"
STORIES, DATA = SHARED / "models/stories260k", SHARED / "data"
needs_shared = pytest.mark.skipif(not (STORIES.is_dir() and (DATA / "mmlu").is_dir()), reason="no ../shared")
SUBJECTS = ("abstract_algebra", "high_school_psychology", "sociology")


@pytest.fixture(scope="module", autouse=True)
def no_network():
    """Nothing here may so much as look for a name."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(scope="module")
def stories():
    return load_model(str(STORIES), device=torch.device("cpu"))


@pytest.fixture
def tiny(tiny_model):
    return load_model(str(tiny_model), device=torch.device("cpu"))


def own_run(loaded, config, limit):
    """lm-eval's own evaluation of one of its tasks: {name: its samples in order}."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    return lm_eval.simple_evaluate(lm, tasks=[config], num_fewshot=config.pop("shots", None), limit=limit)["samples"]


def likeliest(sample):
    values = [r[0][0] for r in sample["resps"]]
    return values.index(max(values))


@needs_shared
def test_mmlu_gives_lm_evals_choices_question_by_question(stories, tmp_path):
    limit = 8
    members = []
    for subject in SUBJECTS:  # the rows as JSON files, through lm-eval's and datasets' own loading
        for split in ("dev", "test"):
            with (DATA / f"mmlu/{split}/{subject}_{split}.csv").open(newline="") as lines:
                rows = [
                    {"question": q, "choices": [a, b, c, d], "answer": "ABCD".index(x)}
                    for q, a, b, c, d, x in csv.reader(lines)
                ]
            (tmp_path / f"{subject}_{split}.json").write_text("\n".join(map(json.dumps, rows)))
        files = {split: str(tmp_path / f"{subject}_{split}.json") for split in ("dev", "test")}
        members.append(
            {
                "task": f"mmlu_{subject}",
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")},
            }
        )
    theirs = own_run(stories, {"group": "mine", "task": members, "shots": 5}, limit)
    all_of_it = load_task("mmlu", DATA)
    (ours,) = measure(replace(all_of_it, subjects={s: all_of_it.subjects[s] for s in SUBJECTS}), stories, limit=limit)
    assert ours.protocol["questions"] == len(SUBJECTS) * limit and ours.protocol["shots"] == 5
    for subject in SUBJECTS:
        samples = theirs[f"mmlu_{subject}"]
        assert ours.answers[subject].choices == [likeliest(s) for s in samples]
        assert ours.answers[subject].correct == [int(s["acc"]) for s in samples]
    assert len({c for s in SUBJECTS for c in ours.answers[s].choices}) > 1  # a model of one letter would prove little


@needs_shared
def test_mmlu_weighs_subjects_by_size_and_has_all_questions():
    questions = load_task("mmlu", DATA)
    sizes = {name: len(task.eval_docs) for name, task in questions.subjects.items()}
    assert len(sizes) == 57 and sum(sizes.values()) == 14_042 and len(set(sizes.values())) > 1
    asked = [tasks._Question(name, None, []) for name, size in sizes.items() for _ in range(size)]
    scored = [{"acc": (0, q.subject == "professional_law")} for q in asked]
    assert tasks._result("mmlu", "acc", asked, scored, {}).value == sizes["professional_law"] / 14_042


# Rows of the hub's layout, and of the local one, of the same question.
PAIRS = {
    "lambada": (
        {"text": "he said that he had seen the dog"},
        {"context": "he said that he had seen the", "continuation": "dog"},
    ),
    "piqa": (
        {"goal": "open a jar", "sol1": "twist the lid", "sol2": "sing to the lid", "label": 0},
        {"query": "Question: open a jar\n", "choices": ["twist the lid", "sing to the lid"], "gold": 0},
    ),
    "arc_easy": (
        {"question": "What is hot?", "choices": {"text": ["ice", "the sun", "snow"], "label": list("ABC")},
         "answerKey": "B"},
        {"query": "Question: What is hot?", "choices": ["ice", "the sun", "snow"], "gold": 1},
    ),
    "winogrande": (
        {"sentence": "Ann met Sam so _ was happy.", "option1": "Ann", "option2": "Sam", "answer": "2"},
        {"context_options": ["Ann met Sam so Ann", "Ann met Sam so Sam"], "continuation": "was happy.", "gold": 1},
    ),
    "hellaswag": (
        {"activity_label": "Baking", "ctx_a": "A man mixes flour.", "ctx_b": "he",
         "endings": ["bakes [step] it.", "flies off.", "sleeps.", "sings."], "label": "0"},
        {"query": "Baking: A man mixes flour. He", "choices": ["bakes it.", "flies off.", "sleeps.", "sings."],
         "gold": 0},
    ),
    "boolq": (
        {"passage": "Ice is cold.", "question": "is ice cold", "label": 1},
        {"query": "Passage: Ice is cold.\nQuestion: is ice cold?\n", "choices": ["no", "yes"], "gold": 1},
    ),
    "race": (
        {"article": "Tom has a cat.\n\nIt is old.",
         "problems": repr([{"question": "What has Tom?", "answer": "A", "options": ["a cat", "a dog", "tea", "me"]},
                           {"question": "The cat is  _  .", "answer": "C", "options": ["new", "red", "old", "big"]}])},
        {"query": "Article: Tom has a cat.\n\nIt is old.\n\nQuestion: What has Tom?\nAnswer: a cat\nThe cat is  _  .",
         "choices": ["new", "red", "old", "big"], "gold": 2},
    ),
}  # fmt: skip


def write(directory, task, *rows):
    file = directory / task / f"{task}.foundry.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize("task", PAIRS)
def test_a_local_row_makes_the_prompts_and_answers_of_the_hubs_row(task, tiny, tmp_path):
    hubs, local = PAIRS[task]
    name = tasks.TASKS[task].name
    (tmp_path / "hub.json").write_text(json.dumps(hubs))
    files = {split: str(tmp_path / "hub.json") for split in ("train", "validation", "test")}
    data = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    member = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": data}
    (theirs,) = own_run(tiny, {"group": "mine", "task": [member]}, None)[name]

    write(tmp_path, task, local)
    questions = load_task(task, tmp_path)
    results = measure(questions, tiny)
    (asked,) = tasks._requests(questions.subjects[name], None)
    assert [r.args for r in asked] == [tuple(a) for a in theirs["arguments"]]
    for result in results:
        assert result.answers[name].correct == [int(theirs[result.metric])]
    if task != "lambada":
        assert results[0].answers[name].choices == [likeliest(theirs)]
    assert {r.metric for r in results} == {m for m in theirs["metrics"] if m.startswith("acc")}


@needs_shared
@pytest.mark.parametrize("task", ["lambada", "piqa", "arc_easy", "winogrande"])
def test_every_row_at_hand_is_read(task):
    count = {"lambada": 5153, "piqa": 1838, "arc_easy": 2376, "winogrande": 1267}[task]
    (subject,) = load_task(task, DATA).subjects.values()
    assert len(subject.eval_docs) == count


def test_a_quantized_model_answers_itself(tiny_model, text_file, tmp_path):
    """Not the original, nor a stand-in: with the weights of a QuantLinear changed its likelihoods change."""
    fpquant.calibrate(str(tiny_model), "nvfp4", out=tmp_path / "q", dataset=str(text_file), samples=2, seq_len=64)
    loaded = load_model(str(tmp_path / "q"), device=torch.device("cpu"))
    write(tmp_path, "arc_easy", *[{"query": f"w{i} w9", "choices": [f"w{i + 1}", "w5"], "gold": 0} for i in range(40)])
    before = fpquant.evaluate(loaded, tasks=("arc_easy",), data_dir=tmp_path)[0]
    layer = loaded.model.model.layers[0].mlp.down_proj
    assert type(layer).__name__ == "QuantLinear" and not layer.has_cached_dense  # kept only within
    for module in loaded.model.modules():
        if type(module).__name__ == "QuantLinear":
            module.weight_global_scale.data.mul_(-3)
    after = fpquant.evaluate(loaded, tasks=("arc_easy",), data_dir=tmp_path)[0]
    assert before.answers != after.answers and before.protocol == after.protocol


def test_the_result_has_a_binomial_interval_chance_and_the_answers(tiny, tmp_path):
    rows = [{"query": f"w{i} w9", "choices": [f"w{i + 1}", "w5", "w7", "w8"], "gold": i % 4} for i in range(50)]
    write(tmp_path, "arc_easy", *rows)
    result = fpquant.evaluate(tiny, tasks=("arc_easy",), data_dir=tmp_path, limit=40)[0]
    n, p, z = 40, result.value, 1.959963984540054
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert result.interval == pytest.approx(((middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)))
    answers = result.to_dict()["answers"]["arc_easy"]
    assert answers["correct"] == [int(c == i % 4) for i, c in enumerate(answers["choices"])]
    assert p == sum(answers["correct"]) / n and result.protocol["chance"] == 0.25
    fewer = fpquant.evaluate(tiny, tasks=("arc_easy",), data_dir=tmp_path, limit=39)[0]
    assert fewer.protocol["data_fingerprint"] != result.protocol["data_fingerprint"]
    assert fewer.answers["arc_easy"].choices == answers["choices"][:39]
    together = fpquant.evaluate(tiny, tasks=("arc_easy",), data_dir=tmp_path, limit=40, batch_size=7)[0]
    assert together.answers == result.answers
    assert tiny.tokenizer.pad_token is None  # HFLM's pad token stays its own


def test_prompts_that_the_window_cuts_are_counted_and_said(tiny, tmp_path, caplog):
    write(tmp_path, "piqa", {"query": "w3 " * 300, "choices": ["w4", "w5"], "gold": 0}, PAIRS["piqa"][1])
    with caplog.at_level(logging.WARNING, "fpquant"):
        result = fpquant.evaluate(tiny, tasks=("piqa",), data_dir=tmp_path)[0]
    assert result.protocol["truncated"] == 1
    assert [r.getMessage() for r in caplog.records if r.name == "fpquant"] == [
        "piqa: 1 of 2 prompts are longer than the model's window of 256 tokens and lost their beginning"
    ]


def test_an_answer_longer_than_the_window_is_an_error(tiny, tmp_path):
    write(tmp_path, "piqa", {"query": "w3", "choices": ["w4 " * 300, "w5"], "gold": 0})
    with pytest.raises(FpquantError, match=r"must be 1 to 256 tokens .* got 300"):
        fpquant.evaluate(tiny, tasks=("piqa",), data_dir=tmp_path)


def test_likelihoods_that_are_not_finite_are_an_error(tiny, tmp_path):
    write(tmp_path, "piqa", PAIRS["piqa"][1])
    tiny.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FpquantError, match="not finite in 1 of 1 questions"):
        fpquant.evaluate(tiny, tasks=("piqa",), data_dir=tmp_path)


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("piqa", "{", "Expecting property name"),
        ("piqa", "[1]", "must be a JSON object"),
        ("piqa", {"choices": ["a", "b"], "gold": 0}, "`query` must be a string"),
        ("piqa", {"query": "q", "choices": ["a"], "gold": 0}, "`choices` must be a list of two"),
        ("piqa", {"query": "q", "choices": ["a", "b", "c"], "gold": 0}, "must have 2 strings, got 3"),
        ("arc_easy", {"query": "q", "choices": ["a", "b"], "gold": 2}, "from 0 to 1, got 2"),
        ("arc_easy", {"query": "q", "choices": ["a", "b"], "gold": True}, "from 0 to 1, got True"),
        ("hellaswag", {"query": "q", "choices": ["a", ""], "gold": 0}, "`choices` must be"),
        ("boolq", {"query": "q", "choices": ["no", "yes"], "gold": 0}, "Question: "),
        ("boolq", {"query": "p\nQuestion: q?", "choices": ["a", "b"], "gold": 0}, "must be no and yes"),
        ("race", {"query": "q", "choices": list("abcd"), "gold": 0}, "`query` must hold"),
        ("lambada", {"context": "a", "continuation": "b c"}, "must be one word"),
        ("winogrande", {"context_options": ["a", "b"], "gold": 0}, "`continuation` must be"),
    ],
)
def test_a_malformed_row_is_named(task, row, says, tmp_path):
    file = write(tmp_path, task, PAIRS[task][1], row)
    with pytest.raises(FpquantError) as error:
        load_task(task, tmp_path)
    assert str(error.value).startswith(f"{file} line 2: ") and says in str(error.value)


@pytest.mark.parametrize("row", ["q,a,b,c,A", "q,a,b,c,d,E", "q,a,b,c,d,AB", '"q,a,b,c,d,A', "q,a,b,c,d,"])
def test_a_malformed_row_of_mmlu_is_named(row, tmp_path):
    for split in ("dev", "test"):
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        (tmp_path / f"mmlu/{split}/virology_{split}.csv").write_text(f'"q, of two\nlines",a,b,c,d,A\n{row}\n')
    with pytest.raises(FpquantError, match=r"virology_dev.csv line [23]: .*; mend or remove the row"):
        task_data.read_mmlu(tmp_path, "virology")


def test_what_is_not_there_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    def told(says, task="mmlu", data_dir=tmp_path, **settings):
        with pytest.raises(FpquantError, match=says):
            fpquant.evaluate("demo", tasks=(task,), data_dir=data_dir, **settings)

    monkeypatch.setattr("fpquant.api.open_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("fpquant.models.check_model", lambda _: None)
    told("unknown task 'mmul'; did you mean 'mmlu'", "mmul")
    told("task mmlu needs the file .*mmlu/dev/abstract_algebra_dev.csv, which is not there")
    told(r"task boolq needs one file .*boolq/\*.foundry.jsonl, got 0", "boolq")
    told("no such directory: .*/x; give --data-dir", data_dir=tmp_path / "x")
    told("data set cais/mmlu is not in the local cache and HF_HUB_OFFLINE is set; give --data-dir", data_dir=None)
    told("--shots must be from 0 to 5, got 6", shots=6)
    told("--limit must be at least 1, got 0", limit=0)
    told("--batch-size must be at least 1, got 0", batch_size=0)
    write(tmp_path, "boolq")
    told("boolq.foundry.jsonl is empty: 0 rows", "boolq")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda _: None)
    told(r"needs lm-eval, which is not installed; run: pip install 'fpquant\[eval\]'")
