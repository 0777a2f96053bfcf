"""What a comparison measures: its settings, and the rows that follow from them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fpquant.calibration.data import check_calibration, check_evaluation
from fpquant.errors import FpquantError, unknown
from fpquant.evaluation.tasks import SHOTS, TASKS
from fpquant.recipe import Recipe
from fpquant.schemes import SCHEMES, get_pair

BASELINES = ("nvfp4", "fp5", "fp6_e2m3", "fp8")
"""Uniform schemes that a mixed row must beat at its own size, fewest bits first."""
ACTIVATIONS = "with activations"
"""How rows are called whose layers' inputs are quantized too."""
REFERENCE = "fisher"
"""The policy that the others are compared with."""

_KEY = ("pair", "policy", "ratio", "threshold", "clip", "seed", "activations")
_LISTS = ("policies", "ratios", "thresholds", "clips", "datasets", "tasks", "include", "exclude")


@dataclass(frozen=True)
class Cell:
    """One row. recipe: None for the original. axes: what tells it from the rows of other policies; equal axes are
    rows that differ in policy alone."""

    name: str
    recipe: Recipe | None = None
    axes: tuple[Any, ...] = ()

    @property
    def is_mixed(self) -> bool:
        return self.recipe is not None and not self.recipe.weights.is_uniform

    @property
    def settings(self) -> dict[str, Any] | None:
        """What decides the weights, given the calibration data. None for the original."""
        r = self.recipe
        if r is None:
            return None
        mixed = {"ratio": r.ratio, "policy": r.policy, "threshold": r.threshold} if self.is_mixed else {}
        inputs = {"activations": "activations"} if r.activations else {}
        return {"pair": r.pair, "clip": r.clip, "seed": r.seed, **mixed, **inputs}

    @property
    def key(self) -> str:
        """A file name that says what decides the weights, whatever the row is called."""
        if self.settings is None:
            return "original"
        return slug("-".join(str(self.settings[k]) for k in _KEY if k in self.settings))


def slug(name: str) -> str:
    """A row's name as part of a file name."""
    return re.sub(r"[^a-z0-9_.]+", "-", name.lower()).strip("-")


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison; the rows are policies x ratios x thresholds x clips, and uniform ones to judge them by.

    thresholds, clips: empty for what goes with each policy (each weight has a tensor scale of its own in every row, so
    that rows differ in what their names say). activations: each mixed row, and the two uniform ends, also
    with the layers' inputs quantized. datasets: what perplexity is measured on. limit: only the
    first windows of each, and the first questions of each task. kl_windows: of each data set, 0 for no distances.
    Raises FpquantError for a setting that makes no sense.
    """

    policies: tuple[str, ...] = ("fisher", "output-error", "quantization-error")
    ratios: tuple[float, ...] = (0.5, 0.7, 0.9)
    thresholds: tuple[str, ...] = ()
    clips: tuple[str, ...] = ()
    activations: bool = False
    pair: str = "nvfp4/fp8"
    datasets: tuple[str, ...] = ("wikitext",)
    calibration_dataset: str = "wikitext"
    samples: int = 512
    seq_len: int = 512
    seed: int = 0
    window: int = 2048
    limit: int | None = None
    kl_windows: int = 8
    tasks: tuple[str, ...] = ()
    shots: int = SHOTS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str | int | float) else tuple(value)
            object.__setattr__(self, name, tuple(dict.fromkeys(listed)))
        for name in ("policies", "ratios", "datasets"):
            if not getattr(self, name):
                raise FpquantError(f"a comparison needs at least one of {name}, got none; give one")
        if get_pair(self.pair).is_uniform:
            raise FpquantError(
                f"a comparison needs a pair of two schemes, got {self.pair!r}; use nvfp4/fp8 or fp6/fp16"
            )
        for task in self.tasks:
            if task not in TASKS:
                raise unknown("task", task, TASKS)
        if self.kl_windows < 0:
            raise FpquantError(f"--kl-windows must be 0 or more, got {self.kl_windows}")
        self.mixed()

    def check_data(self) -> None:
        """Raise FpquantError, in seconds, for data that is not to be had."""
        check_calibration(self.calibration_dataset, self.samples, self.seq_len)
        for dataset in self.datasets:
            check_evaluation(dataset, self.window, self.limit)

    def recipe(self, **settings: Any) -> Recipe:
        """A recipe on the plan's calibration data."""
        return Recipe(
            dataset=self.calibration_dataset,
            samples=self.samples,
            seq_len=self.seq_len,
            seed=self.seed,
            include=self.include,
            exclude=self.exclude,
            **settings,
        )

    def mixed(self) -> list[Cell]:
        """The rows asked for, those together that share scores."""
        return [
            self._mixed(*settings)
            for settings in itertools.product(
                self.policies, self.clips or (None,), self.thresholds or (None,), self._inputs, self.ratios
            )
        ]

    @property
    def _inputs(self) -> tuple[bool, ...]:
        return (False, True) if self.activations else (False,)

    def _mixed(self, policy: str, clip: str | None, threshold: str | None, inputs: bool, ratio: float) -> Cell:
        recipe = self.recipe(
            pair=self.pair,
            policy=policy,
            clip=clip,
            threshold=threshold,
            portable_scales=False,
            ratio=ratio,
            activations=inputs,
        )
        parts = [f"{policy} {100 * ratio:g}%", threshold, clip and f"clip {clip}", inputs and ACTIVATIONS]
        return Cell(", ".join(p for p in parts if p), recipe, (ratio, threshold, clip, inputs))

    def uniform(self, bits: float, stored: Mapping[str, float]) -> list[Cell]:
        """The low and the high scheme of the pair alone, and the baselines that need no more than `bits` a weight.

        stored: {scheme: bits a weight as stored in this model}.
        """
        pair = get_pair(self.pair)
        assert pair.high is not None
        wanted = [(pair.low.name, "none"), (pair.high.name, "none")]
        wanted += [
            (s, "fisher" if SCHEMES[s].has_block_scale else "none") for s in BASELINES if stored[s] <= bits + 1e-9
        ]
        found = [
            Cell(_uniform_name(s, clip), self.recipe(pair=s, clip=clip))
            for s, clip in sorted(dict.fromkeys(wanted), key=lambda each: stored[each[0]])
        ]
        if self.activations:
            ends = [(s, clip) for s, clip in dict.fromkeys(wanted) if s in (pair.low.name, pair.high.name)]
            found += [
                Cell(f"{_uniform_name(s, clip)}, {ACTIVATIONS}", self.recipe(pair=s, clip=clip, activations=True))
                for s, clip in ends
            ]
        return found


def _uniform_name(scheme: str, clip: str) -> str:
    return scheme if clip == "none" else f"{scheme}, clip {clip}"


PLAN_SETTINGS = tuple(f.name for f in fields(Plan))


def make_plan(plan: Plan | None = None, **settings: Any) -> Plan:
    """A plan with these settings instead; None leaves one as it is."""
    given = {k: v for k, v in settings.items() if v is not None}
    if wrong := [k for k in given if k not in PLAN_SETTINGS]:
        raise unknown("setting", wrong[0], PLAN_SETTINGS)
    base = {name: getattr(plan, name) for name in PLAN_SETTINGS} if plan else {}
    return Plan(**base | given)
