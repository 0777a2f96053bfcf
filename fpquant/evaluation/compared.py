"""A finished comparison: rows, what they say of one another, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fpquant import __version__
from fpquant.evaluation.compare import Row
from fpquant.evaluation.plan import Plan
from fpquant.evaluation.sources import source_warning
from fpquant.evaluation.verdict import Comparison, Sentence, cautions, compare_rows, headline, verdict


@dataclass(frozen=True)
class Compared:
    """What `fpquant compare` found. warnings: what flatters or weakens the verdict. out: where it was written."""

    model: str
    plan: Plan
    rows: list[Row]
    comparisons: list[Comparison]
    headline: str
    verdict: list[Sentence]
    warnings: list[str]
    versions: Mapping[str, str]
    out: Path

    @classmethod
    def of(cls, model: str, plan: Plan, rows: Sequence[Row], versions: Mapping[str, str], out: Path) -> Compared:
        comparisons = compare_rows(rows)
        sources = [w for d in plan.datasets if (w := source_warning(plan.calibration_dataset, d))]
        return cls(
            model=model,
            plan=plan,
            rows=list(rows),
            comparisons=comparisons,
            headline=headline(rows, comparisons),
            verdict=verdict(rows, comparisons),
            warnings=[*sources, *cautions(rows, comparisons)],
            versions={"fpquant": __version__, **versions},
            out=out,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "versions": dict(self.versions),
            "plan": asdict(self.plan),
            "headline": self.headline,
            "verdict": [asdict(s) for s in self.verdict],
            "warnings": self.warnings,
            "rows": [r.to_dict() for r in self.rows],
            "comparisons": [c.to_dict() for c in self.comparisons],
        }
