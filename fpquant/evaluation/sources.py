"""Whether two data sets are of one source: text like the calibration's flatters what was calibrated on it."""

from __future__ import annotations

import re
from pathlib import Path

_SPLITS = re.compile(r"train(ing)?|valid(ation)?|val|test|dev|eval(uation)?|calib(ration)?|prefix|held|out|\d+[kmg]?b?")
_WIKIPEDIA = re.compile(r"wiki|vital-articles", re.IGNORECASE)


def source_warning(calibration: str, evaluation: str) -> str | None:
    """One line that says why results on `evaluation` flatter what was calibrated on `calibration`, or None."""
    if calibration == evaluation and calibration in ("wikitext", "vital-articles"):
        kind = f"both are parts of {calibration}"
    elif _resolved(calibration) == _resolved(evaluation):
        kind = "they are the same file: the model is measured on what it was calibrated on"
    elif _family(calibration) == _family(evaluation):
        kind = f"both are {_family(calibration)}"
    else:
        return None
    texts = f"Calibration ({short_name(calibration)}) and evaluation ({short_name(evaluation)})"
    return f"{texts} come from one source ({kind}), which flatters the calibrated rows; measure on other text too."


def _family(dataset: str) -> str:
    """`Wikipedia`, or a file's folder and name without the words that tell a data set's splits apart."""
    path = Path(dataset).expanduser()
    if _WIKIPEDIA.search("/".join(path.parts[-2:])):
        return "Wikipedia"
    words = [w for w in re.split(r"[^a-z0-9]+", path.stem.lower()) if w and not _SPLITS.fullmatch(w)]
    return f"{'-'.join(words) or 'splits'} in {path.resolve().parent}"


def _resolved(dataset: str) -> str:
    path = Path(dataset).expanduser()
    return str(path.resolve()) if path.exists() else dataset


def short_name(dataset: str) -> str:
    """A data set for people: a file by its own name and its folder's."""
    return "/".join(Path(dataset).parts[-2:]) if Path(dataset).suffix else dataset
