"""The estimate of energy against sums worked out by hand."""

import pytest

from fpquant.report.energy import PUBLISHED, Energies, estimate, unit_energy
from fpquant.schemes import get_pair


def test_units_by_hand():
    add, product = 0.03 / 8, 0.2 / 64  # a bit, a pair of bits
    scale = (16 + 192) * product
    assert unit_energy("fp8", "fp8") == pytest.approx(16 * product + 4 * add + 40 * add + 0.9 / 16)
    assert unit_energy("fp4", "fp8") == pytest.approx(8 * product + 4 * add + 26 * add + (0.9 + scale) / 16)
    assert unit_energy("fp8", "fp4") == unit_energy("fp4", "fp8")
    assert unit_energy("fp4", "fp4") == pytest.approx(4 * product + 2 * add + 12 * add + (0.9 + scale) / 16)


def test_all_fp8_is_one_and_a_mixture_is_the_mean_over_units():
    assert estimate(1.0, 8.0, 1.0).energy == 1 and estimate(1.0, 8.0).energy == 1
    got = estimate(0.3, get_pair("nvfp4/fp8").bits_per_weight(0.3), 0.3)
    assert got.units == pytest.approx({"fp4 x fp4": 0.49, "fp4 x fp8": 0.21, "fp8 x fp4": 0.21, "fp8 x fp8": 0.09})
    mean = sum(got.units[u] * got.picojoules[u] for u in got.units)
    assert got.energy == pytest.approx(mean / unit_energy("fp8", "fp8"))
    assert got.weight_memory == pytest.approx(0.7016, abs=1e-4), "the paper's 30%"
    assert got.energy < estimate(0.3, 5.6).energy < 1, "FP8 activations use two units, and save less"


def test_it_says_what_it_is_and_whence_its_inputs_are():
    record = estimate(0.3, 5.6125).to_dict()
    assert record["is"].startswith("an estimate") and "ISSCC 2014" in record["energies_source"]
    assert record["inputs"] == {"int8_add": 0.03, "int8_multiply": 0.2, "fp32_add": 0.9}
    assert Energies() == PUBLISHED
    assert estimate(0.0, 4.5, 0.0, Energies(fp32_add=0.0)).energy < estimate(0.0, 4.5, 0.0).energy
