"""Scores against the formula written out in float64."""

import pytest
import torch

from fpquant.calibration.policy import POLICIES, BlockErrors, get_policy
from fpquant.errors import FpquantError


@pytest.fixture
def errors():
    draw = torch.Generator().manual_seed(0)
    return BlockErrors(
        name="layer.0",
        change=torch.randn(6, 3, 16, generator=draw).square(),
        fisher=torch.rand(6, 41, generator=draw),  # a tail block of 9
        input_sq=torch.rand(41, generator=draw),
        seed=0,
    )


def by_hand(e, weight):
    """sum of weight[o, i] * change over the elements that exist, one at a time."""
    out = torch.zeros(6, 3, dtype=torch.float64)
    for o in range(6):
        for i in range(41):
            out[o, i // 16] += weight(o, i) * float(e.change[o, i // 16, i % 16])
    return out


def test_fisher_weighs_each_element_by_its_squared_gradient(errors):
    expected = by_hand(errors, lambda o, i: float(errors.fisher[o, i]))
    torch.testing.assert_close(POLICIES["fisher"].score(errors).double(), expected, rtol=1e-5, atol=0)


def test_output_error_weighs_by_the_mean_squared_input_of_the_channel(errors):
    expected = by_hand(errors, lambda o, i: float(errors.input_sq[i]))
    torch.testing.assert_close(POLICIES["output-error"].score(errors).double(), expected, rtol=1e-5, atol=0)


def test_quantization_error_weighs_nothing(errors):
    expected = errors.change.double().sum(-1)
    torch.testing.assert_close(POLICIES["quantization-error"].score(errors).double(), expected, rtol=1e-5, atol=0)


def test_random_depends_on_seed_and_module_and_on_nothing_else(errors):
    from dataclasses import replace

    score = POLICIES["random"].score
    first = score(errors)
    assert torch.equal(first, score(replace(errors, change=errors.change * 0)))
    assert not torch.equal(first, score(replace(errors, seed=1)))
    assert not torch.equal(first, score(replace(errors, name="layer.1")))
    assert first.min() >= 0 and first.max() < 1


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(FpquantError, match="did you mean 'fisher'"):
        get_policy("fischer")
