"""Calibration and the packed weights on a GPU against the CPU."""

import pytest
import torch

import fpquant
from fpquant.activations import InputQuantizer, scale_for
from fpquant.calibration import fisher
from fpquant.calibration.clipping import clip_scales
from fpquant.calibration.data import calibration_data
from fpquant.calibration.fisher import fisher_pass
from fpquant.kernels.reference import quantize_input
from fpquant.models import find_modules, load_model
from fpquant.packing import pack, unpack
from fpquant.schemes import NVFP4, PAIRS, SCHEMES, get_pair, matrix_scale, round_blocks, to_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")


def run(tiny_model, text_file, device, dtype):
    loaded = load_model(str(tiny_model), device=device, dtype=dtype)
    modules, _ = find_modules(loaded.model)
    ids = calibration_data(str(text_file), loaded.tokenizer, samples=8, seq_len=64, seed=0).ids
    return fisher_pass(loaded.model, modules, ids)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1), ("float16", 0.02)])
def test_fisher_pass_agrees_with_fp32_on_the_cpu(dtype, tolerance, tiny_model, text_file):
    expected = run(tiny_model, text_file, torch.device("cpu"), "float32")
    got = run(tiny_model, text_file, CUDA, dtype)
    assert not got.nonfinite and not got.saturated
    assert (got.loss_scale > 1) == (dtype == "float16")
    for name, module in expected.modules.items():
        for field in ("fisher", "input_sq", "grad_sq", "input_max"):
            a, b = getattr(got.modules[name], field).double(), getattr(module, field).double()
            assert (a - b).norm() <= tolerance * b.norm(), (name, field)


@pytest.mark.parametrize("pair", [*PAIRS, *SCHEMES])
@pytest.mark.parametrize("shape", [(33, 100), (64, 256), (1, 16), (7, 5)])
def test_packed_streams_are_those_of_the_cpu_bit_for_bit(pair, shape):
    torch.manual_seed(0)
    w, p = torch.randn(shape), get_pair(pair)
    high = None if p.is_uniform else torch.rand(shape[0], -(-shape[1] // 16)) > 0.5
    cpu = pack(w, p, high)
    gpu = pack(w.cuda(), p, None if high is None else high.cuda())
    for name, stream in cpu.streams.items():
        assert torch.equal(stream, gpu.streams[name].cpu()), name
    assert torch.equal(unpack(cpu), unpack(gpu).cpu())


def test_clipping_finds_errors_as_small_as_on_the_cpu():
    torch.manual_seed(0)
    w, g2 = torch.randn(64, 512), torch.rand(64, 512) ** 4
    scale = matrix_scale(w, get_pair("nvfp4/fp8"))
    blocks, weights = to_blocks(w), to_blocks(g2).double()

    def error(codes):
        return ((round_blocks(blocks, NVFP4, scale, codes) - blocks).double().square() * weights).sum(-1)

    cpu, gpu = clip_scales(w, scale, g2), clip_scales(w.cuda(), scale.cuda(), g2.cuda()).cpu()
    torch.testing.assert_close(error(gpu), error(cpu), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pair", ["nvfp4/fp8", "fp6"])
def test_a_calibrated_directory_runs_on_the_gpu_as_on_the_cpu(pair, tiny_model, text_file, tmp_path):
    fpquant.calibrate(
        str(tiny_model), out=tmp_path / "q", pair=pair, dataset=str(text_file), samples=4, seq_len=64, device="cuda"
    )
    ids = torch.arange(2, 66).reshape(1, 64)
    with torch.inference_mode():
        cpu = fpquant.load(tmp_path / "q", device="cpu")(input_ids=ids).logits
        gpu = fpquant.load(tmp_path / "q", device="cuda")(input_ids=ids.cuda()).logits
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pair", ["nvfp4/fp8", "nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_are_quantized_as_on_the_cpu_bit_for_bit(pair, dtype):
    torch.manual_seed(0)
    x = (torch.randn(3, 70, 200) * torch.logspace(-3, 2, 200)).to(dtype)
    scale = scale_for(x.abs().amax())
    more = (torch.rand(200), torch.tensor([0.5])) if pair == "nvfp4/fp8" else ()
    cpu = quantize_input(x, InputQuantizer(get_pair(pair), scale, *more))
    gpu = quantize_input(x.cuda(), InputQuantizer(get_pair(pair), scale.cuda(), *(t.cuda() for t in more)))
    assert torch.equal(gpu.values.cpu(), cpu.values) and torch.equal(gpu.saturated.cpu(), cpu.saturated)
    assert (gpu.high is None) == (cpu.high is None) == (pair != "nvfp4/fp8")
    assert cpu.high is None or (torch.equal(gpu.high.cpu(), cpu.high) and 0 < cpu.high.float().mean() < 1)


def test_statistics_come_back_whole(monkeypatch):
    monkeypatch.setattr(fisher, "_STAGED_ELEMENTS", 1000)
    x = torch.randn(70, 45, device="cuda")
    for each in (x, x.T, x[0, :0]):
        assert torch.equal(fisher.to_cpu(each), each.cpu())
