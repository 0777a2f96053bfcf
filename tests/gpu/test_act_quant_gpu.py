"""The kernel that quantizes inputs against its PyTorch reference, to the bit."""

from __future__ import annotations

import pytest
import torch

from fpquant.activations import InputQuantizer, scale_for
from fpquant.kernels import build, reference
from fpquant.kernels.act_quant import library, ops
from fpquant.linear import QuantLinear
from fpquant.packing import pack
from fpquant.schemes import get_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PAIRS = ["nvfp4/fp8", "nvfp4", "fp8"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 16), (1, 1), (3, 1000), (2, 5, 576), (1000, 1536), (7, 8200), (70000, 64), (0, 64)]


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPQUANT_CACHE", str(tmp_path_factory.mktemp("kernels")))
        for dtype in DTYPES:
            library.load(dtype, torch.device("cuda", 0))
        yield


def quantizer(x, pair, scale=None):
    channels = x.shape[-1]
    of_x = scale_for(x.float().abs().amax() / 4) if x.numel() else torch.ones(1)  # so that some saturate
    more = (torch.rand(channels, generator=torch.Generator().manual_seed(2)), torch.tensor([0.2]))
    scale = of_x if scale is None else torch.tensor([scale])
    return InputQuantizer(get_pair(pair), scale, *(more if pair == "nvfp4/fp8" else ()))


def arguments(x, q, device):
    return *(
        None if t is None else t.to(device) for t in (x, q.input_scale, q.input_weight, q.input_threshold)
    ), q.pair.name


def same(a, b):
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_counts_and_codes_are_the_references(shape, pair, dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw) * torch.logspace(-3, 2, shape[-1])
    if x.numel() > 5000:
        x.view(-1, shape[-1])[1::3] = (x.view(-1, shape[-1])[1::3] * 4).round() / 4
        x.view(-1, shape[-1])[:, ::37] = -0.0
    x = x.to(dtype)
    q = quantizer(x, pair)
    cpu = torch.ops.fpquant.act_quant_packed(*arguments(x, q, "cpu"))
    gpu = torch.ops.fpquant.act_quant_packed(*arguments(x, q, "cuda"))
    for name, a, b in zip(("values", "counts", "codes", "scales", "map"), gpu, cpu, strict=True):
        assert same(a.cpu(), b), name
    alone = torch.ops.fpquant.act_quant(*arguments(x, q, "cuda"))
    assert same(alone[0], gpu[0]) and same(alone[1], gpu[1])
    if x.numel() > 5000:
        blocks, high, saturated = gpu[1].tolist()
        assert saturated > 0 and (pair != "nvfp4/fp8" or 0 < high < blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-5])
def test_every_16_bit_number_and_any_scale(scale, dtype):
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = words.view(torch.bfloat16 if dtype == torch.float32 else dtype)
    x = torch.where(x.isfinite(), x, torch.zeros_like(x)).to(dtype).reshape(-1, 256)
    x = x[:, torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    for pair in PAIRS:
        q = quantizer(x, pair, scale)
        cpu, gpu = (torch.ops.fpquant.act_quant(*arguments(x, q, d)) for d in ("cpu", "cuda"))
        assert same(gpu[0].cpu(), cpu[0]) and same(gpu[1].cpu(), cpu[1])


def test_strided_and_misaligned_inputs():
    wide = torch.randn(50, 257).half()
    for x in (wide[:, 1:], wide[::2, :96], wide.T[:100], wide.flatten()[3 : 3 + 640].reshape(10, 64)):
        q = quantizer(x, "nvfp4/fp8")
        on_gpu = wide.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        cpu = torch.ops.fpquant.act_quant(*arguments(x, q, "cpu"))
        gpu = torch.ops.fpquant.act_quant(on_gpu, *arguments(x, q, "cuda")[1:])
        assert same(gpu[0].cpu(), cpu[0]) and same(gpu[1].cpu(), cpu[1])


def test_a_nan_is_seen_and_infinity_saturates():
    x = torch.randn(4, 64)
    x[1, 20], x[2, 40] = torch.nan, torch.inf
    for pair in PAIRS:
        y = torch.ops.fpquant.act_quant(*arguments(x, quantizer(torch.ones(4, 64), pair), "cuda"))[0].cpu()
        assert y[1, 20].isnan() and y[2, 40].isfinite() and y[2, 40] > 0
        assert y[1, 32:].isfinite().all() and y[[0, 2, 3]].isfinite().all()


def test_in_a_graph_compiled_and_counted_in_a_layer():
    torch.manual_seed(0)
    module = QuantLinear.from_packed(pack(torch.randn(48, 80) / 9, get_pair("fp8"))).cuda()
    x = torch.randn(6, 80, device="cuda").half()
    q = quantizer(x.cpu(), "nvfp4/fp8")
    module.quantize_inputs(InputQuantizer(q.pair, *(t.cuda() for t in q.tensors.values())))
    with torch.inference_mode():
        wanted = module(x)
        once = module.counts.clone()
        assert once.tolist()[0] == 6 * 5 and same(
            module.quantized_input(x).cpu(), reference.quantize_input(x.cpu(), q).values
        )
        module.counts = torch.zeros_like(once)
        graph, y = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            y = module(x)
        graph.replay()
        assert torch.equal(y, wanted)
        compiled = torch.compile(lambda t: torch.ops.fpquant.act_quant(t, *arguments(x, q, "cuda")[1:])[0] * 2)
        assert torch.equal(compiled(x), 2 * module.quantized_input(x))


def test_without_a_compiler_it_is_the_same(monkeypatch):
    x = torch.randn(5, 64).half()
    q = quantizer(x, "nvfp4/fp8")
    by_kernel = torch.ops.fpquant.act_quant(*arguments(x, q, "cuda"))

    def unavailable(*_):
        raise build.KernelUnavailable("no compiler")

    monkeypatch.setattr(library, "load", unavailable)
    ops._kernel.cache_clear()
    with pytest.warns(RuntimeWarning, match="no compiler"):
        by_torch = torch.ops.fpquant.act_quant(*arguments(x, q, "cuda"))
    ops._kernel.cache_clear()
    assert same(by_kernel[0], by_torch[0]) and same(by_kernel[1], by_torch[1])
