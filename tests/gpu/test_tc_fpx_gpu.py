"""TC-FPx on a GPU against float64, with outputs, shared memory and scratch memory poisoned beforehand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from fpquant.errors import FpquantError
from fpquant.formats import decode
from fpquant.kernels import ops
from fpquant.kernels.tc_fpx import layout, library
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, codes_of, packed_bytes, prepack, stream_bytes
from fpquant.kernels.tc_fpx.tiles import TILES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

FPX = torch.ops.fpquant
CUDA = torch.device("cuda", 0)
DTYPES = [torch.float16, torch.bfloat16]
FP6 = "fp6_e3m2"
BATCHES = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 257, 1000, 4096]
SHAPES = [
    (1, 16),
    (7, 100),
    (64, 64),
    (129, 1001),
    (192, 576),
    (576, 192),
    (1000, 4104),
    (4096, 4096),
    (28672, 16),
    (11008, 4096),
    (8192, 28672),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """All kernels, built side by side into a cache that the whole module shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("kernels")))
        return library.load_all(CUDA)


@pytest.fixture(autouse=True)
def all_built(kernels):
    """No test builds anything in its own cache."""


class Weight:
    """A weight of random codes, none NaN, with a scale a row."""

    def __init__(self, name, out_features, in_features, seed=0):
        draw = torch.Generator(CUDA).manual_seed(seed)
        fmt = KERNEL_FORMATS[name]
        size = stream_bytes(fmt, out_features, in_features)
        self.stream = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw, device=CUDA)
        if fmt.bits == 8:
            self.stream.masked_fill_((self.stream & 0x7F) == 0x7F, 0x01)
        self.name, self.shape, self.fmt = name, (out_features, in_features), fmt
        self.scale = torch.rand(out_features, generator=draw, device=CUDA) * 0.01 + 0.001
        self.packed = FPX.fpx_prepack(self.stream, name, out_features, in_features)

    def codes(self):
        return codes_of(self.packed, self.fmt, *self.shape)[:, : self.shape[1]]

    def double(self):
        return decode(self.codes(), self.fmt).double() * self.scale.double().unsqueeze(1)

    def linear(self, x, bias=None):
        return FPX.fpx_linear(x, self.packed, self.scale, bias, self.name, *self.shape)

    def arguments(self, x, bias=None):
        return x, self.packed, self.scale, bias, self.name, *self.shape


def random_x(dtype, *shape, seed=1):
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def poison(elements, dtype):
    """Fills the memory that the next allocation of this size will get with NaN."""
    torch.full((max(1, elements),), float("nan"), dtype=dtype, device=CUDA)


def assert_close(y, x, weight, bias=None, peer=None):
    """|y - y64| / (|x| |W|) is at most 1.5 times cuBLAS's on the dense weight, or the rounding of the result."""
    w = weight.double() if isinstance(weight, Weight) else weight
    exact = x.double() @ w.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.abs().T + (0 if bias is None else bias.double().abs())

    def error(result):
        assert result.isfinite().all()
        return float(((result.double() - exact).abs() / size.clamp_min(1e-30)).max())

    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[y.dtype] * 1.01
    allowed = max(rounding, 1.5 * error(peer)) if peer is not None else 1.5 * rounding
    assert error(y) <= allowed, (error(y), allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_code_decodes_exactly_on_the_device(name, dtype):
    fmt = KERNEL_FORMATS[name]
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8, device=CUDA).repeat(64 * 64 * 3 // (1 << fmt.bits))
    codes = codes[torch.randperm(codes.numel(), device=CUDA)].reshape(64, 192)
    packed = layout.pack_layout(codes, fmt)
    dense = FPX.fpx_dequantize(packed, torch.ones(64, device=CUDA), name, 64, 192, dtype).float()
    wanted = decode(codes, fmt)
    numbers = wanted.isfinite()
    assert torch.equal(dense[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES[:8], ids=str)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_prepack_is_that_of_the_cpu_and_has_an_inverse(name, shape):
    poison(packed_bytes(KERNEL_FORMATS[name], *shape) // 2, torch.float16)
    weight = Weight(name, *shape)
    assert torch.equal(weight.packed.cpu(), prepack(weight.stream.cpu(), weight.fmt, *shape))
    poison(weight.stream.numel() // 2, torch.float16)
    assert torch.equal(FPX.fpx_unprepack(weight.packed, name, *shape), weight.stream)
    shifted = torch.cat((weight.stream[:1], weight.stream))[1:]  # memory that is not aligned
    assert torch.equal(FPX.fpx_prepack(shifted, name, *shape), weight.packed)


@pytest.mark.parametrize("shape", SHAPES[:8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_rounds_once(dtype, shape):
    weight = Weight(FP6, *shape)
    poison(shape[0] * shape[1], dtype)
    dense = FPX.fpx_dequantize(weight.packed, weight.scale, FP6, *shape, dtype)
    assert torch.equal(dense, (decode(weight.codes(), weight.fmt) * weight.scale.unsqueeze(1)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_against_float64(shape, dtype):
    weight = Weight(FP6, *shape)
    dense, double = FPX.fpx_dequantize(weight.packed, weight.scale, FP6, *shape, dtype), weight.double()
    bias = random_x(dtype, shape[0], seed=2)
    for batch in BATCHES:
        x = random_x(dtype, batch, shape[1])
        poison(batch * shape[0], dtype)
        y = weight.linear(x)
        assert_close(y, x, double, peer=x @ dense.T)
        if batch in (1, 17, 1000):
            poison(batch * shape[0], dtype)
            with_bias = weight.linear(x, bias)
            assert_close(with_bias, x, double, bias, peer=torch.nn.functional.linear(x, dense, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_variant_of_every_format(name, dtype, kernels):
    """All tiles, one and two blocks a multiprocessor, runs of units that end anywhere, clusters, few stages."""
    kernel = kernels[name, dtype]
    weight = Weight(name, 1000, 2504)
    double = weight.double()
    plans = [
        {},
        {"blocks_per_sm": 2},
        {"max_workers": 1},
        {"max_workers": 7},
        {"max_workers": 50},
        {"max_stages": 1},
        {"dependent": True},
        {"cluster": 2},
        {"cluster": 5, "sharers": 2},
        {"cluster": 8, "dependent": True},
    ]
    tried = 0
    for variant in kernel.variants:
        for options in plans:
            plan = library.Plan(variant, **options)
            if not kernel.stages(plan):
                continue
            tried += 1
            for batch in (1, variant.batch, variant.batch + 3):
                x = padded(random_x(dtype, batch, 2504))
                kernel.linear(torch.full_like(x, float("nan")), weight.packed, weight.scale, None, 1000, plan)
                poison(batch * 1000, dtype)
                try:
                    y = kernel.linear(x, weight.packed, weight.scale, None, 1000, plan)
                    assert_close(y, x[:, :2504], double)
                except AssertionError as error:
                    raise AssertionError(f"{variant} {options} batch={batch}: {error}") from None
    assert tried >= 5 * len(kernel.variants)


def padded(x):
    """x as the kernel itself takes it: rows of a multiple of 64, zeros at the end."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 64))


def test_the_table_names_tiles_that_there_are(kernels):
    for kernel in kernels.values():
        for batch, weights, tile, blocks, cluster in TILES["fp6_e3m2"]:
            plan = library.plan(kernel, 64, (weights or 1 << 40) // 64, batch)  # 0: any size, so the largest
            assert plan.variant.tile == tile
            assert (plan.blocks_per_sm, plan.cluster) == (blocks, cluster)


def test_a_dependent_launch_waits_for_what_it_needs():
    """A chain in which every call reads what the one before wrote, launched early, in and out of a graph."""
    weight = Weight(FP6, 1024, 1024)

    def chain(x):
        for _ in range(30):
            x = weight.linear(x)
            x = weight.linear(x / x.abs().amax())
        return x

    x = random_x(torch.float16, 5, 1024)
    expected = chain(x)
    torch.cuda.synchronize()
    with ops.dependent_launch():
        assert torch.equal(chain(x), expected)
        straight = [weight.linear(x)]
        for _ in range(20):
            straight.append(weight.linear(straight[-1] * 0.01))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(x)
    for _ in range(10):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
    again = [weight.linear(x)]
    for _ in range(20):
        again.append(weight.linear(again[-1] * 0.01))
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))


def test_equal_inputs_give_equal_bits():
    weight = Weight(FP6, 4096, 4096)
    for batch in (1, 8, 16, 40, 130):
        x = random_x(torch.float16, batch, 4096)
        first = weight.linear(x)
        for _ in range(20):
            assert torch.equal(weight.linear(x), first)


def test_what_x_held_elsewhere_does_not_matter():
    """Rows and columns outside x, and values left in shared memory, never reach y; infinity stays in its row."""
    weight = Weight(FP6, 300, 1000)
    x = random_x(torch.float16, 9, 1000)
    expected = weight.linear(x)
    wide = torch.full((20, 1500), float("nan"), dtype=torch.float16, device=CUDA)
    wide[4:13, 200:1200] = x
    assert torch.equal(weight.linear(wide[4:13, 200:1200]), expected)
    assert weight.linear(wide[:, :1000]).isnan().all()
    assert torch.equal(weight.linear(x), expected)
    x[3] = float("inf")
    y = weight.linear(x)
    rows = [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(y[rows], expected[rows])


@pytest.mark.parametrize("in_features", [1000, 1001])
def test_any_strides_and_dimensions(in_features):
    weight = Weight(FP6, 130, in_features)
    x = random_x(torch.float16, 2, 3, in_features)
    expected = weight.linear(x)
    assert expected.shape == (2, 3, 130)
    assert torch.equal(weight.linear(x.transpose(0, 1)), expected.transpose(0, 1))
    assert torch.equal(weight.linear(x.mT.contiguous().mT), expected)
    assert torch.equal(weight.linear(x[:, 1]), expected[:, 1])
    assert torch.equal(weight.linear(x[0, 0]), expected[0, 0])
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=CUDA)[1:].copy_(x.reshape(-1)).reshape(x.shape)
    assert torch.equal(weight.linear(shifted), expected)
    assert weight.linear(x[:0]).shape == (0, 3, 130)


def test_in_a_graph_with_new_inputs():
    weight = Weight(FP6, 4096, 1024)
    x = random_x(torch.float16, 4, 1024)
    weight.linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = [weight.linear(x) for _ in range(3)]
    for seed in range(3):
        x.copy_(random_x(torch.float16, 4, 1024, seed=seed))
        for result in y:
            result.fill_(float("nan"))
        graph.replay()
        expected = weight.linear(x)
        assert all(torch.equal(result, expected) for result in y)


def test_many_streams_and_graphs_at_once():
    """Split tiles of calls that overlap must not meet: each stream and each graph has its own counters and memory."""
    weight = Weight(FP6, 4096, 4096)
    inputs = [random_x(torch.float16, 1 + i, 4096, seed=i) for i in range(8)]
    expected = [weight.linear(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs, captured = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append([weight.linear(x) for _ in range(5)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for stream, x, graph in zip(streams, inputs, graphs, strict=True):
            with torch.cuda.stream(stream):
                results.append([weight.linear(x) for _ in range(5)])
                graph.replay()
        torch.cuda.synchronize()
        for i, wanted in enumerate(expected):
            assert all(torch.equal(y, wanted) for y in results[i] + captured[i]), i


# torch begins with an empty graph on purpose and records its own warning of that, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_whole(mode):
    weight = Weight(FP6, 512, 1024)
    bias = random_x(torch.float16, 512)

    @torch.compile(fullgraph=True, mode=mode)
    def function(x):
        return torch.relu(weight.linear(2 * x, bias)) + 1

    for seed in range(4):
        x = random_x(torch.float16, 3, 1024, seed=seed)
        torch.testing.assert_close(function(x).clone(), torch.relu(weight.linear(2 * x, bias)) + 1)


def test_opcheck():
    weight = Weight(FP6, 70, 100)
    x = random_x(torch.float16, 2, 3, 100)
    opcheck(FPX.fpx_linear, weight.arguments(x))
    opcheck(FPX.fpx_linear, weight.arguments(x.requires_grad_(), random_x(torch.float16, 70)))
    opcheck(FPX.fpx_prepack, (weight.stream, FP6, 70, 100))
    opcheck(FPX.fpx_unprepack, (weight.packed, FP6, 70, 100))
    opcheck(FPX.fpx_dequantize, (weight.packed, weight.scale, FP6, 70, 100, torch.bfloat16))


def test_wrong_devices_and_types_are_refused():
    weight = Weight(FP6, 70, 100)
    x = random_x(torch.float16, 2, 100)
    with pytest.raises(FpquantError, match=r"x must be float16 or bfloat16, got torch\.float32"):
        weight.linear(x.float())
    with pytest.raises(FpquantError, match="scale is on cpu and the weight on cuda:0"):
        FPX.fpx_linear(x, weight.packed, weight.scale.cpu(), None, FP6, 70, 100)
    with pytest.raises(FpquantError, match="x is on cuda:0 and the weight on cpu"):
        FPX.fpx_linear(x, weight.packed.cpu(), weight.scale.cpu(), None, FP6, 70, 100)


def test_without_a_kernel_torch_does_it(monkeypatch):
    weight = Weight(FP6, 70, 100)
    x = random_x(torch.float16, 2, 100)
    monkeypatch.setattr(ops, "_kernel", lambda *_: None)
    assert torch.equal(FPX.fpx_prepack(weight.stream, FP6, 70, 100), weight.packed)
    assert torch.equal(FPX.fpx_unprepack(weight.packed, FP6, 70, 100), weight.stream)
    assert_close(weight.linear(x), x, weight.double(), peer=x @ weight.double().half().T)


def test_a_plan_that_does_not_fit_is_an_error(kernels):
    kernel, weight = kernels[FP6, torch.float16], Weight(FP6, 64, 64)
    plan = library.Plan(replace(kernel.variants[0], index=99))
    with pytest.raises(RuntimeError, match="could not be launched: invalid argument"):
        kernel.linear(random_x(torch.float16, 1, 64), weight.packed, weight.scale, None, 64, plan)


def test_more_graphs_than_there_are_counters(kernels):
    """Each graph has counters of its own and gives them back; past the last, tiles are not shared and y stays right."""
    weight, kernel = Weight(FP6, 200, 4096), kernels[FP6, torch.float16]
    x = random_x(torch.float16, 2, 4096)
    plan = library.Plan(kernel.variants[0])  # no cluster, which would need no counters

    def linear():
        return kernel.linear(x, weight.packed, weight.scale, None, 200, plan)

    linear()
    before = kernel.free_counter_sets()
    graphs, results = [], []
    for _ in range(before + 3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(linear())
    assert kernel.free_counter_sets() == 0
    double = weight.double()
    for graph, y in [(graphs[0], results[0]), (graphs[-1], results[-1])]:
        graph.replay()
        assert_close(y, x, double)
    graphs.clear()
    results.clear()
    for _ in range(100):
        torch.cuda.synchronize()
        if kernel.free_counter_sets() >= before - 2:
            break
        time.sleep(0.05)
    assert kernel.free_counter_sets() >= before - 2
