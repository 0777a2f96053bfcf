"""The block-mixed kernel on a GPU against float64, over maps, shapes, batches and every tile."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from fpquant.kernels.block_mixed import library, ops
from fpquant.kernels.block_mixed.layout import NestedTensor, nest, unnest
from fpquant.kernels.ops import dependent_launch
from fpquant.kernels.tc_fpx.library import Plan
from fpquant.packing import pack, unpack
from fpquant.schemes import PAIRS, SCHEMES, Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

OPS = torch.ops.fpquant
CUDA = torch.device("cuda", 0)
DTYPES = [torch.float16, torch.bfloat16]
MIXED, PURE = PAIRS["nvfp4/fp8"], Pair(SCHEMES["nvfp4"])
MAPS = ["low", "high", "alternating", "random", "one", "first rows", "pure"]
BATCHES = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 257, 1000, 4097]
SHAPES = [(1, 16), (7, 100), (64, 64), (129, 1001), (576, 192), (1000, 4104), (4096, 4096), (28672, 16), (11008, 4096)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("kernels")))
        return {(mixed, dtype): library.load(mixed, dtype, CUDA) for mixed in (True, False) for dtype in DTYPES}


@pytest.fixture(autouse=True)
def all_built(kernels):
    """No test builds anything in its own cache."""


def high_of(kind, rows, blocks):
    draw = torch.Generator(CUDA).manual_seed(1)
    high = torch.zeros(rows, blocks, dtype=torch.bool, device=CUDA)
    if kind == "high":
        high[:] = True
    elif kind == "alternating":
        high.view(-1)[1::2] = True
    elif kind == "random":
        high = torch.rand(rows, blocks, generator=draw, device=CUDA) < 0.3
    elif kind == "one":
        high[rows // 2, blocks // 2] = True
    elif kind == "first rows":
        high[: rows // 3] = True
    return high


class Weight:
    def __init__(self, shape, kind="random", seed=0):
        w = torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA)
        w *= torch.logspace(-2, 2, shape[1], device=CUDA)
        pair = PURE if kind == "pure" else MIXED
        self.t = pack(w, pair, None if kind == "pure" else high_of(kind, shape[0], -(-shape[1] // 16)))
        self.shape, self.high = shape, self.t.high_blocks
        self.nested = self.nest()
        self.scale = (self.t.weight_global_scale / 4).expand(shape[0]).contiguous()

    def nest(self):
        t = self.t
        return OPS.mixed_nest(t.weight, t.weight_scale, t.weight_high, t.weight_map, self.high, *self.shape)

    def arguments(self, x, bias=None):
        return x, *self.nested, self.scale, bias, *self.shape

    def linear(self, x, bias=None):
        return OPS.mixed_linear(*self.arguments(x, bias))

    def double(self):
        return unpack(self.t).double()


def random_x(dtype, *shape, seed=1):
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def assert_close(y, x, w, bias=None, peer=None):
    """|y - y64| / (|x| |W|) is at most 1.5 times cuBLAS's on the dense weight, or the rounding of the result."""
    exact = x.double() @ w.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.abs().T + (0 if bias is None else bias.double().abs())

    def error(result):
        assert result.isfinite().all()
        return float(((result.double() - exact).abs() / size.clamp_min(1e-30)).max())

    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[y.dtype] * 1.01
    allowed = max(rounding, 1.5 * error(peer)) if peer is not None else 1.5 * rounding
    assert error(y) <= allowed, (error(y), allowed)


def poison(elements, dtype):
    torch.full((max(1, elements),), float("nan"), dtype=dtype, device=CUDA)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nest_is_that_of_the_cpu(shape, kind):
    weight = Weight(shape, kind)
    wanted = nest(weight.t)
    base, overflow, starts = weight.nested
    assert torch.equal(base, wanted.base)
    assert torch.equal(starts, wanted.starts)
    assert overflow.numel() == wanted.overflow.numel()
    back = unnest(NestedTensor(shape, base, overflow, starts, weight.t.weight_global_scale), weight.t.pair)
    assert all(torch.equal(back.streams[name], stream) for name, stream in weight.t.streams.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_against_float64(shape, dtype):
    weight = Weight(shape)
    double, bias = weight.double(), random_x(dtype, shape[0], seed=2)
    dense = double.to(dtype)
    for batch in BATCHES:
        x = random_x(dtype, batch, shape[1])
        poison(batch * shape[0], dtype)
        assert_close(weight.linear(x), x, double, peer=x @ dense.T)
        if batch in (1, 17, 1000):
            assert_close(weight.linear(x, bias), x, double, bias, peer=torch.nn.functional.linear(x, dense, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MAPS)
def test_every_tile_with_every_map(kind, dtype, kernels):
    weight = Weight((1000, 2504), kind)
    kernel = kernels[weight.high > 0, dtype]
    double, (base, overflow, starts) = weight.double(), weight.nested
    plans = [{}, {"blocks_per_sm": 2}, {"max_workers": 7}, {"max_stages": 1}, {"dependent": True}]
    plans += [{"cluster": 2}, {"cluster": 5, "sharers": 2}, {"cluster": 8, "dependent": True}]
    tried = 0
    for variant in kernel.variants:
        for options in plans:
            plan = Plan(variant, **options)
            if not kernel.stages(plan):
                continue
            tried += 1
            for batch in (1, variant.batch, variant.batch + 3):
                x = torch.nn.functional.pad(random_x(dtype, batch, 2504), (0, -2504 % 64))
                poison(batch * 1000, dtype)
                y = kernel.linear(x, base, weight.scale, None, 1000, plan, overflow, starts)
                try:
                    assert_close(y, x[:, :2504], double)
                except AssertionError as error:
                    raise AssertionError(f"{variant} {options} batch={batch}: {error}") from None
    assert tried >= 2 * len(kernel.variants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_with_every_scale_is_exact(dtype):
    """One input at a time: y is the weight itself, which both types hold exactly."""
    w = torch.randn(127, 64, device=CUDA)
    t = pack(w, MIXED, torch.arange(4, device=CUDA).expand(127, 4) % 2 == 1)
    scales = torch.arange(127, dtype=torch.uint8, device=CUDA).repeat_interleave(2)
    codes = torch.arange(127 * 32, device=CUDA) % 255
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes).to(torch.uint8)
    nested = OPS.mixed_nest(t.weight, scales, codes, t.weight_map, t.high_blocks, 127, 64)
    exact = ops._in_units(*nested, 127, 64)
    scale = torch.full((127,), 2.0**-3, device=CUDA)
    for batch in (64, 8):
        eye = torch.eye(64, dtype=dtype, device=CUDA)
        y = torch.cat([OPS.mixed_linear(part, *nested, scale, None, 127, 64) for part in eye.split(batch)])
        assert torch.equal(y.T.float(), exact * 2.0**-3)


def test_equal_inputs_give_equal_bits_early_and_in_graphs():
    weight = Weight((4096, 4096))
    for batch in (1, 16, 40, 130):
        x = random_x(torch.float16, batch, 4096)
        first = weight.linear(x)
        assert all(torch.equal(weight.linear(x), first) for _ in range(10))
        with dependent_launch():
            assert all(torch.equal(weight.linear(x), first) for _ in range(10))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weight.linear(x)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, first)


def test_it_compiles_and_is_what_torch_expects():
    weight = Weight((70, 100))
    x = random_x(torch.float16, 2, 3, 100)
    opcheck(OPS.mixed_linear, weight.arguments(x))
    compiled = torch.compile(lambda x: weight.linear(2 * x) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), weight.linear(2 * x) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", [(1, 16), (129, 1001), (1000, 2504), (4096, 4096)], ids=str)
def test_the_dense_weight_is_that_of_the_cpu(shape, kind, dtype, kernels):
    weight = Weight(shape, kind)
    dense = torch.full(shape, float("nan"), dtype=dtype, device=CUDA)
    kernels[weight.high > 0, dtype].dequantize(*weight.nested, weight.scale, dense=dense, first_row=0)
    assert torch.equal(dense, unpack(weight.t, dtype))
    if shape[0] > 128:
        part = torch.full((shape[0] - 128, shape[1]), float("nan"), dtype=dtype, device=CUDA)
        kernels[weight.high > 0, dtype].dequantize(*weight.nested, weight.scale, dense=part, first_row=128)
        assert torch.equal(part, dense[128:])
