"""The operators on a CPU: what they compute, what they refuse, and torch's own checks of an operator."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from fpquant.errors import FpquantError
from fpquant.kernels import ops
from fpquant.packing import pack, unpack
from fpquant.schemes import SCHEMES, Pair

FPX = torch.ops.fpquant
SCHEME_NAMES = ["fp6", "fp6_e2m3", "fp5", "fp5_e3m1", "fp8"]


def quantized(scheme="fp6", out_features=70, in_features=100, seed=0):
    """(packed, scale, format, the dense weight) of a random weight."""
    draw = torch.Generator().manual_seed(seed)
    weight = pack(torch.randn(out_features, in_features, generator=draw), Pair(SCHEMES[scheme]))
    name = SCHEMES[scheme].format.name
    packed = FPX.fpx_prepack(weight.weight, name, out_features, in_features)
    scale = weight.weight_scale if weight.weight_scale is not None else weight.weight_global_scale.expand(out_features)
    return packed, scale.contiguous(), name, unpack(weight)


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_linear_is_that_of_the_dense_weight(scheme, dtype):
    packed, scale, name, weight = quantized(scheme)
    x, bias = torch.randn(3, 5, 100, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(70, dtype=dtype)
    y = FPX.fpx_linear(x, packed, scale, bias, name, 70, 100)
    expected = x.double() @ weight.double().T + 1
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert y.dtype == dtype
    assert y.shape == (3, 5, 70)
    assert (y.double() - expected).abs().max() <= rounding * expected.abs().max()


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_dequantize_is_unpack(scheme):
    packed, scale, name, weight = quantized(scheme)
    dense = FPX.fpx_dequantize(packed, scale, name, 70, 100, torch.float32)
    torch.testing.assert_close(dense, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(100,), (0, 100), (2, 3, 100)], ids=str)
def test_leading_dimensions_are_any(shape):
    packed, scale, name, _ = quantized()
    assert FPX.fpx_linear(torch.zeros(shape), packed, scale, None, name, 70, 100).shape == (*shape[:-1], 70)


def test_prepack_and_unprepack_are_inverse():
    weight = pack(torch.randn(70, 100), Pair(SCHEMES["fp5"])).weight
    packed = FPX.fpx_prepack(weight, "fp5_e2m2", 70, 100)
    assert torch.equal(FPX.fpx_unprepack(packed, "fp5_e2m2", 70, 100), weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fp7"}, "unknown kernel format 'fp7'"),
        ({"format": "fp5_e2m2"}, r"packed form of a fp5_e2m2 weight \[70, 100\] must be torch.uint8 \[10240\]"),
        ({"x": torch.zeros(2, 99)}, r"x must be \[..., 100\], got \[2, 99\]"),
        ({"x": torch.zeros(2, 100, dtype=torch.float64)}, "x must be float16, bfloat16 or float32, got torch.float64"),
        ({"scale": torch.ones(70, dtype=torch.float16)}, r"scale must be torch.float32 \[70\], got torch.float16"),
        ({"scale": torch.ones(1)}, r"scale must be torch.float32 \[70\], got torch.float32 \[1\]"),
        ({"bias": torch.ones(70, dtype=torch.float16)}, r"bias must be torch.float32 \[70\] on cpu, got torch.float16"),
        ({"bias": torch.ones(71)}, r"bias must be torch.float32 \[70\] on cpu, got torch.float32 \[71\] on cpu"),
    ],
)
def test_wrong_inputs_are_refused_by_name(change, message):
    packed, scale, name, _ = quantized()
    given = {"x": torch.zeros(2, 100), "packed": packed, "scale": scale, "bias": None, "format": name} | change
    with pytest.raises(FpquantError, match=message):
        FPX.fpx_linear(*given.values(), 70, 100)


def test_gradients_reach_x_and_the_bias():
    packed, scale, name, weight = quantized()
    x, bias = torch.randn(2, 3, 100, requires_grad=True), torch.zeros(70, requires_grad=True)
    grad = torch.randn(2, 3, 70)
    FPX.fpx_linear(x, packed, scale, bias, name, 70, 100).backward(grad)
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck_linear(with_bias, gradient):
    packed, scale, name, _ = quantized()
    x = torch.randn(2, 3, 100, requires_grad=gradient)
    opcheck(FPX.fpx_linear, (x, packed, scale, torch.randn(70) if with_bias else None, name, 70, 100))


def test_opcheck_the_others():
    packed, scale, name, _ = quantized()
    opcheck(FPX.fpx_dequantize, (packed, scale, name, 70, 100, torch.float16))
    opcheck(FPX.fpx_unprepack, (packed, name, 70, 100))
    opcheck(FPX.fpx_prepack, (FPX.fpx_unprepack(packed, name, 70, 100), name, 70, 100))


def test_compiles_whole():
    packed, scale, name, _ = quantized()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def double(x):
        return FPX.fpx_linear(2 * x, packed, scale, None, name, 70, 100)

    for rows in (2, 5):
        x = torch.randn(rows, 100)
        torch.testing.assert_close(double(x), FPX.fpx_linear(2 * x, packed, scale, None, name, 70, 100))


def test_a_missing_kernel_is_said_once():
    ops.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="uses PyTorch instead of its kernel, which is slower: no nvcc"):
        ops.warn_once("no nvcc")
    ops.warn_once("no nvcc")  # another warning would be an error here
