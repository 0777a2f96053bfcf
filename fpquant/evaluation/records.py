"""The records that every measurement is written as."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Answers:
    """What a model answered, question by question: the index of the choice, and 1 where it is right, else 0."""

    choices: list[int]
    correct: list[int]


@dataclass(frozen=True)
class Result:
    """One figure of one model, with all that is needed to measure it again.

    answers: of a task, by subject, so that two models can be compared question by question.
    """

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    protocol: dict[str, Any]
    answers: dict[str, Answers] | None = None

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        if self.answers is None:
            del record["answers"]
        return record


def to_record(model: str, results: Iterable[Result]) -> dict[str, Any]:
    """What `--json` writes: {"model": ..., "results": [...]}."""
    return {"model": model, "results": [r.to_dict() for r in results]}
