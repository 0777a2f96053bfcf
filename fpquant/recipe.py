"""Recipe: every setting that decides what a calibration produces. Frozen, and read from strict YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fpquant.activations import check_input_pair
from fpquant.calibration.clipping import check_clip
from fpquant.calibration.policy import get_policy
from fpquant.calibration.threshold import THRESHOLDS, check_ratio
from fpquant.errors import FpquantError, unknown
from fpquant.schemes import Pair, get_pair


@dataclass(frozen=True)
class Recipe:
    """Settings of a calibration; see README's concepts. `threshold` and `clip` of None mean what goes with the policy.

    pair: `nvfp4/fp8`, `fp6/fp16`, or one scheme for all blocks (`fp8`, `nvfp4`, `fp6`, ...).
    ratio: the fraction of blocks in low precision, 0 to 1; it has no meaning for one scheme.
    activations: whether the layers' inputs are quantized too, while the model runs, to the same pair or scheme and by
    the same policy. activation_ratio: theirs, where it is another. signed: scores of weights count by how much more the
    low scheme errs than the high one, not by how far apart they are. portable_scales: tensor scales are
    powers of two, one for siblings (q, k and v): engines that fuse those read the very values that were measured here,
    in any dtype. None means where the threshold is `layer`.
    """

    pair: str = "nvfp4/fp8"
    ratio: float = 0.7
    policy: str = "fisher"
    threshold: str | None = None
    clip: str | None = None
    activations: bool = False
    activation_ratio: float | None = None
    signed: bool = False
    portable_scales: bool | None = None
    dataset: str = "wikitext"
    samples: int = 512
    seq_len: int = 512
    seed: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        get_pair(self.pair)
        check_ratio(self.ratio)
        defaults = get_policy(self.policy)
        if self.threshold is None:
            object.__setattr__(self, "threshold", defaults.threshold)
        if self.threshold not in THRESHOLDS:
            raise unknown("threshold", self.threshold, THRESHOLDS)
        if self.clip is None:
            object.__setattr__(self, "clip", defaults.clip if self.weights.low.has_block_scale else "none")
        assert self.clip is not None
        check_clip(self.clip)
        if self.clip != "none" and not self.weights.low.has_block_scale:
            raise FpquantError(
                f"clip {self.clip!r} needs a scheme with a scale a block, got pair {self.pair!r}; use none"
            )
        for flag in ("activations", "signed", "portable_scales"):
            if not isinstance(getattr(self, flag), bool) and (flag, getattr(self, flag)) != ("portable_scales", None):
                raise FpquantError(f"{flag} must be true or false, got {getattr(self, flag)!r}")
        if self.portable_scales and self.weights.low.scale != "tensor":
            raise FpquantError(
                f"portable_scales needs a scheme with a scale a tensor, got pair {self.pair!r}; leave it out"
            )
        if self.activations:
            check_input_pair(self.weights)
        if self.activation_ratio is not None:
            check_ratio(self.activation_ratio)
            if self.threshold == "layer":
                raise FpquantError("activation_ratio does nothing with threshold layer; leave it out")
            if not self.activations or self.weights.is_uniform:
                raise FpquantError("activation_ratio does nothing without activations of a pair; leave it out")
            object.__setattr__(self, "activation_ratio", float(self.activation_ratio))
        for number in ("samples", "seq_len", "seed"):
            value: Any = getattr(self, number)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 <= value < 1 << 63:
                raise FpquantError(f"{number} must be a whole number from 0 to 2^63 - 1, got {value!r}")
            object.__setattr__(self, number, int(value))
        object.__setattr__(self, "ratio", float(self.ratio))
        for patterns in ("include", "exclude"):
            value = getattr(self, patterns)
            object.__setattr__(self, patterns, (value,) if isinstance(value, str) else tuple(value))

    @property
    def weights(self) -> Pair:
        return get_pair(self.pair)

    @property
    def has_portable_scales(self) -> bool:
        """Whether tensor scales are powers of two, and one for siblings."""
        if self.portable_scales is None:
            return self.threshold == "layer" and self.weights.low.scale == "tensor"
        return self.portable_scales

    @property
    def needs_sensitivity(self) -> bool:
        """Whether anything in it looks at the calibration data."""
        scores = not self.weights.is_uniform and (bool(get_policy(self.policy).needs) or self.activations)
        return scores or self.clip == "fisher"

    @property
    def needs_data(self) -> bool:
        """Whether anything in it looks at the calibration text: ranges of activations do without gradients."""
        return self.needs_sensitivity or self.activations

    @property
    def inputs(self) -> Pair | None:
        """What the layers' inputs are quantized to."""
        return self.weights if self.activations else None

    @property
    def input_ratio(self) -> float:
        """The fraction of the inputs' blocks in low precision."""
        return self.ratio if self.activation_ratio is None else self.activation_ratio

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_KEYS = tuple(f.name for f in fields(Recipe))
_KEEP_NAME = {"ratio", "dataset", "samples", "seq_len", "seed"}
"""What can change in a recipe that keeps its name."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would quietly take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [k for k in keys if keys.count(k) > 1]:
            raise yaml.YAMLError(f"key {twice[0]!r} stands twice")
        return super().construct_mapping(node, deep)


def recipe_names() -> list[str]:
    """The recipes that come with fpquant."""
    return sorted(f.name.removesuffix(".yaml") for f in files("fpquant.recipes").iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe by name or from a YAML file.

    Raises FpquantError for an unknown name, a file that cannot be read, an unknown key (naming file, key and the
    nearest valid one) and a value of the wrong kind.
    """
    if name_or_file.endswith((".yaml", ".yml")):
        path = Path(name_or_file).expanduser()
        if not path.is_file():
            raise FpquantError(
                f"no such recipe file: {name_or_file}; give a .yaml file or one of {', '.join(recipe_names())}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FpquantError(f"cannot read recipe file {path}: {error}; give a text file in UTF-8") from error
        return parse_recipe(text, str(path), path.stem)
    if name_or_file not in recipe_names():
        raise unknown("recipe", name_or_file, recipe_names())
    text = files("fpquant.recipes").joinpath(f"{name_or_file}.yaml").read_text(encoding="utf-8")
    return parse_recipe(text, f"{name_or_file}.yaml", name_or_file)


def parse_recipe(text: str, source: str, name: str) -> Recipe:
    """A recipe from YAML text; `source` is what errors call it."""
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise FpquantError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise FpquantError(f"{source} must hold `key: value` lines, got {type(values).__name__}")
    for key in values:
        if key not in _KEYS or key == "name":
            raise FpquantError(f"{source}: {unknown('key', key, [k for k in _KEYS if k != 'name'])}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for key in ("pair", "policy", "threshold", "clip", "dataset"):
        if key in values and not isinstance(values[key], str):
            raise FpquantError(f"{source}: {key} must be a word, got {values[key]!r}")
    for key in ("include", "exclude"):
        patterns = values.get(key, ())
        if not isinstance(patterns, tuple) or not all(isinstance(v, str) for v in patterns):
            raise FpquantError(f"{source}: {key} must be a list of patterns, got {values[key]!r}")
    try:
        return Recipe(name=name, **values)
    except FpquantError as error:
        raise FpquantError(f"{source}: {error}") from error


def override(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with these settings instead; None leaves a setting as it is.

    Another policy or pair brings its own threshold and clipping, unless these are given too.
    """
    given = {k: v for k, v in changes.items() if v is not None}
    if wrong := [k for k in given if k not in _KEYS]:
        raise unknown("setting", wrong[0], _KEYS)
    if not given.keys() <= _KEEP_NAME:
        given = {"name": None} | given
    if given.get("policy", recipe.policy) != recipe.policy or given.get("pair", recipe.pair) != recipe.pair:
        given = {"threshold": None, "clip": None} | given
    changed = replace(recipe, **given)
    idle = [k for k in ("ratio", "threshold") if given.get(k) is not None]
    if idle and changed.weights.is_uniform:
        raise FpquantError(f"{idle[0]} does nothing with the one scheme {changed.pair}; leave it out or give a pair")
    return changed
