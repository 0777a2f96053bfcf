"""The clipping search against trying all 126 scales in float64."""

import pytest
import torch

from fpquant.calibration.clipping import check_clip, clip_scales
from fpquant.errors import FpquantError
from fpquant.schemes import NVFP4, default_block_scale, get_pair, matrix_scale, round_blocks, to_blocks


def errors(w, scale, g2, codes):
    blocks = to_blocks(w)
    delta = (round_blocks(blocks, NVFP4, scale, codes) - blocks).double()
    weight = 1.0 if g2 is None else to_blocks(g2).double()
    return (delta.square() * weight).sum(dim=-1)


def best_of_all(w, scale, g2):
    shape = to_blocks(w).shape[:2]
    every = [errors(w, scale, g2, torch.full(shape, code, dtype=torch.uint8)) for code in range(1, 127)]
    return torch.stack(every).amin(dim=0)


def example(kind):
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(64, 176, generator=draw) * torch.randn(64, 176, generator=draw).exp()
    g2 = (torch.randn(64, 176, generator=draw) * torch.randn(64, 176, generator=draw).mul(2).exp()).square() * 1e-9
    if kind == "sparse":  # most elements do not matter, the largest least of all
        g2[torch.rand(64, 176, generator=draw) < 0.9] = 0
    if kind == "outliers":
        w[torch.rand(64, 176, generator=draw) < 0.02] *= 100
    if kind == "tiny":  # the lowest scales, where E4M3 is subnormal
        w[1:] *= 1e-4
    return w, None if kind == "unweighted" else g2


@pytest.mark.parametrize("kind", ["plain", "sparse", "outliers", "tiny", "unweighted"])
def test_finds_the_least_error_of_all_scales(kind):
    w, g2 = example(kind)
    scale = matrix_scale(w, get_pair("nvfp4"))
    codes = clip_scales(w, scale, g2)
    found, best = errors(w, scale, g2, codes), best_of_all(w, scale, g2)
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-30)


def test_moves_scales_both_ways_and_far():
    w, g2 = example("plain")
    scale = matrix_scale(w, get_pair("nvfp4"))
    offset = clip_scales(w, scale, g2).int() - default_block_scale(to_blocks(w), scale).int()
    assert offset.min() < -8
    assert offset.max() > 2


def test_ties_keep_the_default():
    w, g2 = example("plain")
    w[3] = 0
    g2[5] = 0
    scale = matrix_scale(w, get_pair("nvfp4"))
    codes, default = clip_scales(w, scale, g2), default_block_scale(to_blocks(w), scale)
    assert torch.equal(codes[[3, 5]], default[[3, 5]])
    assert (codes[3] == 0).all()


def test_an_unknown_clip_names_the_nearest():
    with pytest.raises(FpquantError, match="did you mean 'unweighted'"):
        check_clip("unweigthed")
