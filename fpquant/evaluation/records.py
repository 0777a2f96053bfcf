"""The records that every measurement is written as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    activations: of a model whose inputs of layers are quantized, what became of them (linear.activation_counts).
    answers: of a task, by subject, so that two models can be compared question by question. windows: what the figure
    is the mean of (of perplexity: the logarithm's), so that two models can be compared window by window.
    """

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    protocol: dict[str, Any]
    answers: dict[str, Answers] | None = None
    windows: list[float] | None = None
    activations: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        return {k: v for k, v in record.items() if v is not None or k not in ("answers", "windows", "activations")}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Result:
        """The inverse of to_dict, also by way of JSON."""
        answers, interval = record.get("answers"), record["interval"]
        return cls(
            **{k: record[k] for k in ("task", "metric", "value", "protocol")},
            interval=None if interval is None else (interval[0], interval[1]),
            answers=None if answers is None else {k: Answers(**a) for k, a in answers.items()},
            windows=record.get("windows"),
            activations=record.get("activations"),
        )


def to_record(model: str, results: Iterable[Result]) -> dict[str, Any]:
    """What `--json` writes: {"model": ..., "results": [...]}."""
    return {"model": model, "results": [r.to_dict() for r in results]}
