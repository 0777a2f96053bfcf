"""Question tasks through lm-eval: its prompts, its targets, its likelihoods. Accuracy with a binomial interval.

The model that answers is the one that is handed over, quantized or not. What lm-eval would take from the hub can come
from local files (task_data.py), and then nothing asks the network. MMLU (Hendrycks et al., arXiv:2009.03300) is 5
shots from the dev split, the likeliest letter, over all questions of its 57 subjects, so each weighs by its size.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import itertools
import logging
import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from scipy import stats

from fpquant import hub
from fpquant.errors import FpquantError
from fpquant.evaluation import task_data
from fpquant.evaluation.records import Answers, Result
from fpquant.evaluation.statistics import CONFIDENCE
from fpquant.models import LoadedModel, evaluation_mode
from fpquant.progress import Track, no_progress

SHOTS = 5
"""Examples before each question of MMLU; its dev split has no more. The other tasks have none."""
CHUNK = 32
"""Questions between two steps of the progress bar."""
GPU_BATCH = 8

_log = logging.getLogger("fpquant")


@dataclass(frozen=True)
class Source:
    """Where lm-eval defines a task (a folder of lm_eval/tasks, a name), and what turns a local row into the hub's."""

    folder: str
    name: str
    convert: Callable[[task_data.Row], task_data.Row] | None


TASKS = {
    "mmlu": Source("mmlu/default", "mmlu", None),
    "lambada": Source("lambada", "lambada_openai", task_data.lambada),
    "piqa": Source("piqa", "piqa", task_data.piqa),
    "arc_easy": Source("arc", "arc_easy", task_data.arc_easy),
    "winogrande": Source("winogrande", "winogrande", task_data.winogrande),
    "hellaswag": Source("hellaswag", "hellaswag", task_data.hellaswag),
    "boolq": Source("super_glue/boolq", "boolq", task_data.boolq),
    "race": Source("race", "race", task_data.race),
}


@dataclass
class _Tokens:
    """Prompts, and answers after their prompts, as a tokenizer has them."""

    prompts: dict[str, np.ndarray] = field(default_factory=dict)  # int32: lists take ten times the memory
    answers: dict[tuple[str, str], list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Questions:
    """A task with its data: lm-eval's task object of each subject (of MMLU; otherwise the task is its own).

    tokens: what a tokenizer has made of it already. A comparison asks every row the same, and MMLU takes a minute.
    """

    task: str
    source: str
    shots: int
    subjects: dict[str, Any]
    tokens: MutableMapping[Any, _Tokens] = field(default_factory=WeakKeyDictionary, compare=False, repr=False)


def load_task(task: str, data_dir: str | Path | None = None, *, shots: int = SHOTS) -> Questions:
    """A task of TASKS with its data, from data_dir or, without one, from the hub.

    Raises FpquantError where lm-eval is not installed, the data is not to be had, or a row is malformed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise FpquantError(f"task {task} needs lm-eval, which is not installed; run: pip install 'fpquant[eval]'")
    if not 0 <= shots <= SHOTS:
        raise FpquantError(f"--shots must be from 0 to {SHOTS}, got {shots}")
    import lm_eval.tasks

    where = TASKS[task]
    folder = Path(lm_eval.tasks.__file__).parent / where.folder  # the index of all of lm-eval's tasks takes 8 s
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[str(folder)])
    names = manager.all_subtasks if task == "mmlu" else [where.name]
    if data_dir is None:
        source = manager.task_index[names[0]].cfg["dataset_path"]
        loaded = _from_hub(manager, names, task, source)
    else:
        directory = Path(data_dir).expanduser()
        if not directory.is_dir():
            raise FpquantError(f"no such directory: {data_dir}; give --data-dir the one that holds {task}/")
        source = str(data_dir)
        with hub.offline():
            loaded = _build(manager, [{"task": name, **_local(task, name, directory)} for name in names])
    used = shots if task == "mmlu" else 0
    for each in loaded.values():
        each.set_config("num_fewshot", used)
        each.set_fewshot_seed(0)
    return Questions(task, source, used, {name.removeprefix("mmlu_"): loaded[name] for name in names})


def _local(task: str, name: str, directory: Path) -> dict[str, Any]:
    """What replaces the hub in the definition of a task: its rows, and the names of its splits."""
    convert = TASKS[task].convert
    if convert is None:
        splits = task_data.read_mmlu(directory, name.removeprefix("mmlu_"))
        return {"custom_dataset": partial(_dataset, splits)}
    splits = task_data.read_jsonl(directory, task, convert)
    changes = {"training_split": None, "validation_split": None, "test_split": "test", "process_docs": None}
    return {"custom_dataset": partial(_dataset, splits), **changes}


def _dataset(splits: dict[str, list[task_data.Row]], **_: Any) -> Any:
    import datasets

    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})


def _build(manager: Any, members: list[dict[str, Any]]) -> dict[str, Any]:
    with _quiet():
        found: dict[str, Any] = manager.load([{"group": "fpquant", "task": members}])["tasks"]
    return found


def _from_hub(manager: Any, names: list[str], task: str, repository: str) -> dict[str, Any]:
    import huggingface_hub

    silence = hub.silence(lambda: huggingface_hub.HfApi().dataset_info(repository))
    try:
        with hub.offline(silence is not None):
            return _build(manager, [{"task": name} for name in names])
    except Exception as error:  # datasets and the hub's client each raise their own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"is not in the local cache and {silence}" if silence else f"cannot be read ({first})"
        raise FpquantError(
            f"task {task}: data set {repository} {reason}; give --data-dir a directory that holds {task}/"
        ) from error


def measure(
    questions: Questions,
    loaded: LoadedModel,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    track: Track = no_progress,
) -> list[Result]:
    """Accuracy of a model, and where lm-eval's task has it accuracy by likelihood a character (acc_norm).

    limit: only the first questions, of MMLU of each subject. batch_size: prompts a forward pass, by default 1 on a CPU
    and GPU_BATCH on a GPU. A prompt longer than the model's window loses its beginning, as in lm-eval, which is said.
    Raises FpquantError for a likelihood that is not finite.
    """
    batch = batch_size or (1 if loaded.model.device.type == "cpu" else GPU_BATCH)
    with _quiet(), evaluation_mode(loaded.model):
        lm = _language_model(loaded, batch, questions.tokens.setdefault(loaded.tokenizer, _Tokens()))
        asked = [
            _Question(subject, task, requests)
            for subject, task in questions.subjects.items()
            for requests in _requests(task, limit)
        ]
        found = _likelihoods(lm, [q.requests for q in asked], questions.task, track)
    scored = [_score(q, likelihoods) for q, likelihoods in zip(asked, found, strict=True)]
    if lm.truncated:
        _log.warning(
            "%s: %d of %d prompts are longer than the model's window of %d tokens and lost their beginning",
            *(questions.task, len(lm.truncated), len({r.args[0] for q in asked for r in q.requests}), lm.max_length),
        )
    import lm_eval

    bos = loaded.tokenizer.bos_token_id
    protocol = {
        "dataset": questions.source,
        "definition": f"{TASKS[questions.task].name} of lm-eval {lm_eval.__version__}",
        "shots": questions.shots,
        "questions": len(asked),
        "limit": limit,
        "bos": "once, at the start of a prompt" if bos is not None and lm.tok_encode("A")[0] == bos else "none added",
        "truncated": len(lm.truncated),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "batch_size": batch,
        "data_fingerprint": _fingerprint(asked),
        "interval": f"{CONFIDENCE:.0%} binomial, Wilson's",
    }
    if questions.task == "mmlu":
        protocol["subjects"] = len(questions.subjects)
    if all(len(q.requests) > 1 for q in asked):
        protocol["chance"] = float(np.mean([1 / len(q.requests) for q in asked]))
    return [_result(questions.task, metric, asked, scored, protocol) for metric in scored[0]]


@dataclass(frozen=True)
class _Question:
    subject: str
    task: Any
    requests: list[Any]  # one a choice; of LAMBADA one


def _requests(task: Any, limit: int | None) -> Iterator[list[Any]]:
    """What lm-eval asks the model, question by question."""
    task.build_all_requests(limit=limit)
    for _, requests in itertools.groupby(task.instances, key=lambda r: r.doc_id):
        yield list(requests)


def _likelihoods(lm: Any, questions: list[list[Any]], label: str, track: Track) -> list[list[tuple[float, bool]]]:
    """(log-likelihood, whether greedy decoding gives it) of each request, longest questions first as in lm-eval."""
    order = sorted(range(len(questions)), key=lambda i: -len(questions[i][0].args[0]))
    chunks = [order[i : i + CHUNK] for i in range(0, len(order), CHUNK)]
    found: list[list[tuple[float, bool]]] = [[] for _ in questions]
    for chunk in track(chunks, label, len(chunks)):
        answers = iter(lm.loglikelihood([r for i in chunk for r in questions[i]], disable_tqdm=True))
        for i in chunk:
            found[i] = list(itertools.islice(answers, len(questions[i])))
    if bad := sum(not all(math.isfinite(value) for value, _ in each) for each in found):
        raise FpquantError(
            f"{label}: the model's likelihoods are not finite in {bad} of {len(found)} questions; "
            "try --dtype bfloat16 or float32"
        )
    return found


def _score(question: _Question, found: list[tuple[float, bool]]) -> dict[str, tuple[int, bool]]:
    """{metric: (the choice taken, whether it is right)}, where right is lm-eval's word. Of LAMBADA the choice is 1
    where greedy decoding gives the word, else 0."""
    doc = question.requests[0].doc
    verdict = question.task.process_results(doc, found)
    if len(found) == 1:
        return {"acc": (int(found[0][1]), bool(verdict["acc"]))}
    values = np.array([value for value, _ in found])
    lengths = np.array([float(len(choice)) for choice in question.task.doc_to_choice(doc)])
    taken = {"acc": int(np.argmax(values)), "acc_norm": int(np.argmax(values / lengths))}
    return {metric: (choice, bool(verdict[metric])) for metric, choice in taken.items() if metric in verdict}


def _result(
    task: str,
    metric: str,
    asked: list[_Question],
    scored: list[dict[str, tuple[int, bool]]],
    protocol: dict[str, Any],
) -> Result:
    answers: dict[str, Answers] = {}
    for question, score in zip(asked, scored, strict=True):
        choice, right = score[metric]
        of_subject = answers.setdefault(question.subject, Answers([], []))
        of_subject.choices.append(choice)
        of_subject.correct.append(int(right))
    total = sum(sum(a.correct) for a in answers.values())
    interval = stats.binomtest(total, len(asked)).proportion_ci(CONFIDENCE, method="wilson")
    return Result(task, metric, total / len(asked), (float(interval.low), float(interval.high)), protocol, answers)


def _fingerprint(asked: list[_Question]) -> str:
    """Of every prompt, target and right answer: equal where two models were asked the same."""
    digest = hashlib.sha256()
    for question in asked:
        parts = [question.requests[0].args[0], *(r.args[-1] for r in question.requests)]
        digest.update(repr((parts, question.task.doc_to_target(question.requests[0].doc))).encode())
    return digest.hexdigest()


def _language_model(loaded: LoadedModel, batch_size: int, tokens: _Tokens) -> Any:
    """lm-eval's view of a live model, which also keeps the prompts that the model's window cuts (`truncated`).

    Special tokens are those that the tokenizer adds itself, as for perplexity: HFLM only doubles BOS in its rolling
    likelihoods, which no task here uses. Likelihoods are summed in fp32: in bf16 the letters of MMLU tie.
    """
    from lm_eval.models.huggingface import HFLM

    if loaded.tokenizer.bos_token_id is None and loaded.tokenizer.eos_token_id is None:
        raise FpquantError(
            "tasks need a tokenizer with a BOS or EOS token, got neither; give the model's own tokenizer"
        )

    class Model(HFLM):
        truncated: set[str]

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            if (context, continuation) not in tokens.answers:
                prompt, answer = super()._encode_pair(context, continuation)
                tokens.prompts.setdefault(context, np.array(prompt, dtype=np.int32))
                tokens.answers[context, continuation] = answer
            return tokens.prompts[context].tolist(), tokens.answers[context, continuation]

        def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **options: Any) -> Any:
            for (prompt, answer), context, continuation in requests:
                if not 0 < len(continuation) <= self.max_length:
                    raise FpquantError(
                        f"an answer must be 1 to {self.max_length} tokens (the model's window), got "
                        f"{len(continuation)} for {answer!r:.60}; leave the row or the task out"
                    )
                if len(context) + len(continuation) > self.max_length + 1:
                    self.truncated.add(prompt)
            return super()._loglikelihood_tokens(requests, *arguments, **options)

    lm = Model(
        pretrained=loaded.model,
        tokenizer=copy.deepcopy(loaded.tokenizer),  # HFLM gives it a pad token
        backend="causal",
        batch_size=batch_size,
        softmax_dtype="float32",
    )
    lm.truncated = set()
    return lm


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval warns of what is meant here (a live model, local rows) and of each prompt that is cut."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
