"""Recipes: the ones that come along, strictness, and what a policy brings with it."""

from importlib.resources import files

import numpy as np
import pytest

from fpquant.errors import FpquantError
from fpquant.recipe import Recipe, load_recipe, override, parse_recipe, recipe_names


def test_the_recipes_that_come_along():
    assert recipe_names() == [
        *("fgmp-70", "fgmp-70-w4a4", "fgmp-90", "fgmp-90-w4a4", "fp6", "fp6-fp16-95", "fp8", "fp8-w8a8"),
        *("nvfp4", "nvfp4-clipped", "nvfp4-w4a4"),
    ]
    for name in recipe_names():
        text = files("fpquant.recipes").joinpath(f"{name}.yaml").read_text()
        assert text.startswith("# Why:") and "# When:" in text
        assert load_recipe(name).name == name


@pytest.mark.parametrize(
    ("name", "pair", "ratio", "clip", "needs"),
    [
        ("fgmp-70", "nvfp4/fp8", 0.7, "fisher", True),
        ("fgmp-90", "nvfp4/fp8", 0.9, "fisher", True),
        ("nvfp4", "nvfp4", None, "none", False),
        ("nvfp4-clipped", "nvfp4", None, "fisher", True),
        ("fp8", "fp8", None, "none", False),
        ("fp6", "fp6", None, "none", False),
        ("fp6-fp16-95", "fp6/fp16", 0.95, "none", True),
    ],
)
def test_what_they_say(name, pair, ratio, clip, needs):
    recipe = load_recipe(name)
    assert (recipe.pair, recipe.clip, recipe.needs_sensitivity) == (pair, clip, needs)
    assert ratio is None or recipe.ratio == ratio


def test_a_policy_brings_its_threshold_and_clipping():
    assert (Recipe().threshold, Recipe().clip) == ("global", "fisher")
    assert (Recipe(policy="output-error").threshold, Recipe(policy="output-error").clip) == ("local", "none")
    changed = override(load_recipe("fgmp-70"), policy="quantization-error")
    assert (changed.threshold, changed.clip) == ("local", "none")
    kept = override(load_recipe("fgmp-70"), policy="quantization-error", clip="unweighted", threshold="global")
    assert (kept.threshold, kept.clip) == ("global", "unweighted")


def test_layers_share_the_scales_of_siblings_unless_told_not_to():
    assert not load_recipe("fgmp-70").has_portable_scales
    assert override(load_recipe("fgmp-70"), threshold="layer").has_portable_scales
    assert not override(load_recipe("fgmp-70"), threshold="layer", portable_scales=False).has_portable_scales
    assert override(load_recipe("nvfp4"), portable_scales=True).has_portable_scales
    assert not Recipe(pair="fp6/fp16", threshold="layer").has_portable_scales
    with pytest.raises(FpquantError, match="portable_scales needs a scheme with a scale a tensor"):
        Recipe(pair="fp6", portable_scales=True)
    with pytest.raises(FpquantError, match="activation_ratio does nothing with threshold layer"):
        Recipe(activations=True, activation_ratio=0.5, threshold="layer")


def test_flags_override_and_none_leaves_alone():
    recipe = override(load_recipe("fgmp-90"), ratio=0.5, samples=None)
    assert (recipe.ratio, recipe.samples, recipe.clip) == (0.5, 512, "fisher")
    assert override(load_recipe("fgmp-70"), pair="fp6/fp16").clip == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratoi: 0.7", "mine.yaml: unknown key 'ratoi'; did you mean 'ratio'"),
        ("name: x", "unknown key 'name'"),
        ("ratio: 2", "mine.yaml: ratio must be a number"),
        ("ratio: lots", "ratio must be a number"),
        ("policy: fischer", "did you mean 'fisher'"),
        ("pair: nvfp4/fp9", "did you mean 'nvfp4/fp8'"),
        ("threshold: globl", "did you mean 'global'"),
        ("samples: many", "samples must be a whole number"),
        ("pair: 8", "pair must be a word"),
        ("include: model.*", "include must be a list"),
        ("pair: fp6\nclip: fisher", "needs a scheme with a scale a block"),
        ("- pair", "must hold `key: value` lines"),
        ("pair: [", "is not valid YAML"),
        ("ratio: 0.5\nratio: 0.6", "key 'ratio' stands twice"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(FpquantError) as error:
        parse_recipe(text, "mine.yaml", "mine")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_recipes_name_the_nearest():
    with pytest.raises(FpquantError, match="did you mean 'fgmp-70'"):
        load_recipe("fgmp-71")


def test_a_recipe_that_was_changed_loses_its_name():
    assert override(load_recipe("fgmp-70"), ratio=0.6, samples=8).name == "fgmp-70"
    assert override(load_recipe("fgmp-70"), policy="random").name is None


def test_settings_that_do_nothing_and_settings_that_are_none_are_errors():
    with pytest.raises(FpquantError, match="ratio does nothing with the one scheme fp8"):
        override(load_recipe("fp8"), ratio=0.2)
    with pytest.raises(FpquantError, match="unknown setting 'ratoi'; did you mean 'ratio'"):
        override(Recipe(), ratoi=0.2)


def test_numbers_of_numpy_and_a_single_pattern_are_taken():
    recipe = Recipe(ratio=np.float32(0.5), samples=np.int64(4), include="up_proj")
    assert recipe == Recipe(ratio=0.5, samples=4, include=("up_proj",))
