"""The records that every measurement is written as."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """One figure of one model, with all that is needed to measure it again."""

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    protocol: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def to_record(model: str, results: Iterable[Result]) -> dict[str, Any]:
    """What `--json` writes: {"model": ..., "results": [...]}."""
    return {"model": model, "results": [r.to_dict() for r in results]}
