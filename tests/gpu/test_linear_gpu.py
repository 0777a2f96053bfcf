"""QuantLinear on a GPU: through the kernel against the PyTorch path over the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import fpquant
from fpquant.checkpoint import quant_modules
from fpquant.kernels import ops
from fpquant.linear import QuantLinear
from fpquant.models import load_model
from fpquant.packing import pack
from fpquant.schemes import get_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DTYPES = [torch.float16, torch.bfloat16]
PAIRS = ["fp6", "fp6_e2m3", "fp5", "fp5_e3m1", "fp8", "nvfp4", "nvfp4/fp8"]


def quant_linear(pair="fp6", shape=(70, 100), dtype=torch.float16):
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=draw) / 10, torch.randn(shape[0], generator=draw)
    high = None if get_pair(pair).is_uniform else torch.rand(shape[0], -(-shape[1] // 16), generator=draw) < 0.3
    return QuantLinear.from_packed(pack(weight, get_pair(pair), high), bias.to(dtype))


def random_x(module, dtype=torch.float16, seed=1):
    return torch.randn(2, 3, module.in_features, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def assert_near(kernel, plain, exact):
    """As near to what is exact as PyTorch comes, by the norm of the error."""

    def error(y):
        return float((y.double() - exact.double()).norm())

    assert kernel.isfinite().all()
    assert error(kernel) <= 1.5 * error(plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_through_the_kernel_it_computes_the_same(pair, dtype):
    cpu = quant_linear(pair, dtype=dtype)
    module = copy.deepcopy(cpu).cuda()
    assert module.is_prepacked
    x = random_x(module, dtype)
    kernel, wide = module(x), copy.deepcopy(module).float()(x.float())
    plain_module = copy.deepcopy(module).unprepack_()
    assert_near(kernel, plain_module(x), wide)
    assert torch.equal(plain_module.float()(x.float()), wide), "float32 takes the PyTorch path"
    back = module.cpu()
    assert not back.is_prepacked
    for name, stream in back.packed.streams.items():
        assert torch.equal(stream, cpu.packed.streams[name]), name


def test_one_copy_of_the_weight_lies_on_the_gpu():
    module = quant_linear(shape=(4096, 4096))
    quant_linear().cuda()
    before = torch.cuda.memory_allocated()
    module.cuda()
    assert module.is_prepacked
    assert torch.cuda.memory_allocated() - before <= 4096 * 4096 * 6 / 8 + 4096 * (4 + 2) + 4096


def test_without_a_kernel_the_streams_stay(monkeypatch):
    monkeypatch.setattr(ops, "has_kernel", lambda *_: False)
    assert not quant_linear().cuda().is_prepacked


@pytest.mark.parametrize("pair", ["fp6", "nvfp4/fp8"])
def test_adapters_train_through_it(pair):
    module = quant_linear(pair).cuda()
    gradients = []
    for layer in (module, copy.deepcopy(module).unprepack_(), copy.deepcopy(module).float()):
        x = random_x(module, layer.bias.dtype).requires_grad_()
        layer(x).float().square().sum().backward()
        gradients.append(x.grad)
    assert_near(*gradients)


@pytest.mark.parametrize("pair", ["fp6", "nvfp4/fp8"])
def test_compiles_whole(pair):
    module = quant_linear(pair).cuda()
    function = torch.compile(module, fullgraph=True)
    for seed in range(2):
        x = random_x(module, seed=seed)
        with torch.inference_mode():
            assert torch.equal(function(x), module(x))


@pytest.mark.parametrize("pair", ["fp6", "fp8", "nvfp4/fp8"])
def test_in_a_graph_with_new_inputs(pair):
    module = quant_linear(pair).cuda()
    x = random_x(module)
    with torch.inference_mode():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        for seed in range(3):
            x.copy_(random_x(module, seed=seed))
            graph.replay()
            assert torch.equal(y, module(x))


def test_offloaded_weights_come_as_streams():
    plain = quant_linear()
    model = nn.Sequential(copy.deepcopy(plain))
    cpu_offload(model, torch.device("cuda", 0))
    x = random_x(plain)
    assert torch.equal(model(x), plain.cuda().unprepack_()(x))


@pytest.fixture(scope="module")
def quantized(tiny_model, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "q"
    fpquant.calibrate(str(tiny_model), "fp6", out=out, dataset=str(text_file), device="cpu")
    return out


def logits(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(2, 66, device=model.device).reshape(1, 64)).logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_through_the_kernel(dtype, quantized, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(quantized, device_map="cuda", dtype=dtype)
    assert all(m.is_prepacked for m in quant_modules(model).values())
    model.save_pretrained(tmp_path / "again")
    saved, read = (load_file(d / "model.safetensors") for d in (tmp_path / "again", quantized))
    for name, module in quant_modules(model).items():
        for stream in module.packed.streams:
            assert torch.equal(saved[f"{name}.{stream}"], read[f"{name}.{stream}"])
    kernel = logits(model)
    made = model.generate(torch.arange(2, 18, device="cuda").reshape(1, 16), max_new_tokens=16, do_sample=False)
    for module in quant_modules(model).values():
        module.unprepack_()
    assert_near(kernel, logits(model), logits(fpquant.load(quantized, device="cuda", dtype="float32")))
    with torch.inference_mode():
        expected = model(input_ids=made).logits[0, 15:-1].float()
    chosen = expected.gather(1, made[0, 16:, None])[:, 0]
    assert (chosen >= expected.amax(1) - 0.1).all(), "greedy by the PyTorch path too, but for near ties"


def test_a_model_quantized_on_the_gpu_is_prepacked(tiny_model):
    loaded = load_model(str(tiny_model), device=torch.device("cuda"), dtype="float16")
    result = fpquant.quantize(loaded, fpquant.Recipe(pair="fp8"))
    assert all(m.is_prepacked for m in quant_modules(result.model).values())
    assert logits(result.model).isfinite().all()
