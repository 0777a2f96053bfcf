"""Local files as the rows that lm-eval's tasks take from the hub.

MMLU lies as DIR/mmlu/{dev,test}/SUBJECT_{dev,test}.csv without header: question, A, B, C, D, letter of the answer (as
its authors distribute it, github.com/hendrycks/test). Every other task lies as one DIR/TASK/*.foundry.jsonl, an object
a line in the layout of MosaicML's llm-foundry: query, choices and gold (the index of the right choice); for LAMBADA
context and continuation; for WinoGrande context_options, continuation and gold. Each row is turned into one that makes
lm-eval's own template write the prompt that it writes for the hub's row of the same question.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fpquant.errors import FpquantError

Row = dict[str, Any]
LETTERS = "ABCD"


def _fields(row: Row, choices: str = "choices", count: int | None = None) -> tuple[list[str], int]:
    """The choices and the index of the right one. Raises ValueError where a row has no such."""
    options, gold = row.get(choices), row.get("gold")
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(o, str) and o for o in options):
        raise ValueError(f"`{choices}` must be a list of two or more strings, got {options!r}")
    if count is not None and len(options) != count:
        raise ValueError(f"`{choices}` must have {count} strings, got {len(options)}")
    if type(gold) is not int or not 0 <= gold < len(options):
        raise ValueError(f"`gold` must be a whole number from 0 to {len(options) - 1}, got {gold!r}")
    return options, gold


def _text(row: Row, name: str) -> str:
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"`{name}` must be a string that is not empty, got {text!r}")
    return text


def _split(query: str, separator: str) -> list[str]:
    parts = query.rsplit(separator, 1)
    if len(parts) < 2:
        raise ValueError(f"`query` must hold {separator!r}, got {query!r:.60}")
    return parts


def _question(query: str) -> str:
    return query.removesuffix("\n").removeprefix("Question: ")


def lambada(row: Row) -> Row:
    word = _text(row, "continuation")
    if " " in word:
        raise ValueError(f"`continuation` must be one word, got {word!r}")
    return {"text": f"{_text(row, 'context')} {word}"}


def piqa(row: Row) -> Row:
    (first, second), gold = _fields(row, count=2)
    return {"goal": _question(_text(row, "query")), "sol1": first, "sol2": second, "label": gold}


def arc_easy(row: Row) -> Row:
    choices, gold = _fields(row)
    labels = [str(i) for i in range(len(choices))]
    return {
        "question": _question(_text(row, "query")),
        "choices": {"text": choices, "label": labels},
        "answerKey": labels[gold],
    }


def winogrande(row: Row) -> Row:
    # lm-eval puts what stands before the blank in front of each option: nothing here, since the options hold it
    (first, second), gold = _fields(row, "context_options", count=2)
    return {
        "sentence": f"_ {_text(row, 'continuation')}",
        "option1": first,
        "option2": second,
        "answer": str(gold + 1),
    }


def hellaswag(row: Row) -> Row:
    # as lm-eval's process_docs leaves it
    choices, gold = _fields(row)
    return {"query": _text(row, "query"), "choices": choices, "label": str(gold)}


def boolq(row: Row) -> Row:
    choices, gold = _fields(row, count=2)
    if sorted(choices) != ["no", "yes"]:
        raise ValueError(f"`choices` must be no and yes, got {choices!r}")
    passage, question = _split(_text(row, "query"), "\nQuestion: ")
    return {
        "passage": passage.removeprefix("Passage: "),
        "question": question.removesuffix("\n").removesuffix("?"),
        "label": ["no", "yes"].index(choices[gold]),
    }


def race(row: Row) -> Row:
    # any questions that are answered in the query stay in it, as part of the article
    choices, gold = _fields(row, count=len(LETTERS))
    article, question = _split(_text(row, "query").removesuffix("\n"), "\n\n")
    problem = {"question": question, "answer": LETTERS[gold], "options": choices}
    return {"article": article.removeprefix("Article: "), "problems": repr([problem])}


def read_jsonl(directory: Path, task: str, convert: Callable[[Row], Row]) -> dict[str, list[Row]]:
    """The rows of directory/task, as the split `test`. Raises FpquantError where there are none, or a line is none."""
    files = sorted((directory / task).glob("*.foundry.jsonl"))
    if len(files) != 1:
        raise FpquantError(
            f"task {task} needs one file {directory / task}/*.foundry.jsonl, got {len(files)}; "
            "put it there, give another --data-dir, or leave the task out"
        )

    def rows() -> Iterator[tuple[int, Row]]:
        with files[0].open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise ValueError(f"each line must be a JSON object, got {line.strip()!r:.60}")
                        yield number, convert(row)
                    except ValueError as error:
                        raise _malformed(files[0], number, error) from error

    return {"test": _whole(files[0], rows())}


def read_mmlu(directory: Path, subject: str) -> dict[str, list[Row]]:
    """The splits `dev` (the examples) and `test` of one subject. Raises FpquantError for a missing file or bad row."""

    def rows(file: Path) -> Iterator[tuple[int, Row]]:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            try:
                for fields in reader:
                    if len(fields) != 6 or fields[5] not in list(LETTERS):
                        raise ValueError(
                            f"a row must be question, four choices and a letter A to D, got {fields!r:.80}"
                        )
                    question, *choices, letter = fields
                    row = {"question": question, "choices": choices, "answer": LETTERS.index(letter)}
                    yield reader.line_num, {"subject": subject, **row}
            except (ValueError, csv.Error) as error:
                raise _malformed(file, reader.line_num, error) from error

    files = {split: directory / "mmlu" / split / f"{subject}_{split}.csv" for split in ("dev", "test")}
    for file in files.values():
        if not file.is_file():
            raise FpquantError(
                f"task mmlu needs the file {file}, which is not there; "
                "put it there, give another --data-dir, or leave the task out"
            )
    return {split: _whole(file, rows(file)) for split, file in files.items()}


def _whole(file: Path, rows: Iterator[tuple[int, Row]]) -> list[Row]:
    try:
        found = [row for _, row in rows]
    except OSError as error:
        raise FpquantError(f"cannot read {file}: {error.strerror}; check it and its permissions") from error
    if not found:
        raise FpquantError(f"{file} is empty: 0 rows; give a file with questions")
    return found


def _malformed(file: Path, number: int, error: Exception) -> FpquantError:
    return FpquantError(f"{file} line {number}: {error}; mend or remove the row")
