"""QuantLinear in its two forms: streams, and prepacked as the kernel wants it (on a CPU through the ops' reference)."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

import fpquant
from fpquant import checkpoint
from fpquant.activations import InputQuantizer
from fpquant.kernels.tc_fpx.layout import KERNEL_FORMATS, packed_bytes
from fpquant.linear import QuantLinear, prepack_on_gpu
from fpquant.packing import check, join, pack
from fpquant.schemes import SCHEMES, get_pair

MIXED = ["nvfp4/fp8", "nvfp4", "all high"]
PREPACKABLE = [*(name for name, scheme in SCHEMES.items() if scheme.format.name in KERNEL_FORMATS), *MIXED]
SHAPES = [(70, 100), (64, 128)]
"""Padded by the layout, and as large as the stream."""


def packed(weight, pair):
    """Of a pair of two, three in ten blocks are high; of "all high", all."""
    share, pair = (1.0, "nvfp4/fp8") if pair == "all high" else (0.3, pair)
    if get_pair(pair).is_uniform:
        return pack(weight, get_pair(pair))
    blocks = -(-weight.shape[1] // 16)
    high = torch.rand(weight.shape[0], blocks, generator=torch.Generator().manual_seed(2)) < share
    return pack(weight, get_pair(pair), high)


def quant_linear(pair="fp6", shape=(70, 100), bias=True, dtype=torch.float16):
    draw = torch.Generator().manual_seed(0)
    weight = packed(torch.randn(shape, generator=draw) / 10, pair)
    return QuantLinear.from_packed(weight, torch.randn(shape[0], generator=draw).to(dtype) if bias else None)


def random_x(module, dtype=torch.float16):
    return torch.randn(2, 3, module.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same_streams(module, expected):
    streams = expected.packed.streams
    assert module.packed.streams.keys() == streams.keys()
    for name, stream in module.packed.streams.items():
        assert torch.equal(stream, streams[name]), name
    check(module.packed, "module")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PREPACKABLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_prepacked_it_computes_the_same_from_one_copy(pair, shape, dtype):
    plain, module = (quant_linear(pair, shape, dtype=dtype) for _ in range(2))
    assert module.prepack_() is module and module.is_prepacked
    assert module.weight.dim() == 2
    if pair not in MIXED:
        assert module.weight.numel() == packed_bytes(SCHEMES[pair].format, *shape)
    assert not any(p.requires_grad for p in module.parameters())
    x = random_x(module, dtype)
    torch.testing.assert_close(module(x), plain(x), rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert torch.equal(module.dense(), plain.dense())
    assert torch.equal(module.float()(x.float()), plain.float()(x.float())), "float32 takes the PyTorch path"
    assert_same_streams(module, plain)
    assert_same_streams(module.unprepack_(), plain)
    assert not module.is_prepacked
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())


@pytest.mark.parametrize("pair", ["fp6/fp16", "fp16"])
def test_what_has_no_kernel_stays_as_it_is(pair):
    module = quant_linear(pair)
    before = dict(module.named_parameters())
    module.prepack_().unprepack_()
    assert all(p is before[n] for n, p in module.named_parameters())


def test_on_a_cpu_nothing_is_prepacked_unasked():
    module = quant_linear()
    prepack_on_gpu(nn.Sequential(module))
    assert not module.to("cpu").half().is_prepacked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", ["fp6", "fp8", *MIXED])
def test_its_state_is_the_checkpoints(pair, shape):
    plain, module = quant_linear(pair, shape), quant_linear(pair, shape).prepack_()
    for keep_vars in (False, True):
        state, expected = (m.state_dict(prefix="a.", keep_vars=keep_vars) for m in (module, plain))
        assert list(state) == list(expected)
        assert all(torch.equal(t, expected[n]) and t.dtype == expected[n].dtype for n, t in state.items())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", ["fp6", "fp8", *MIXED])
def test_a_prepacked_module_takes_a_checkpoints_state(pair, shape, assign):
    source = QuantLinear.from_packed(packed(torch.randn(shape), pair), torch.randn(shape[0]).half())
    module = quant_linear(pair, shape).prepack_()
    module.load_state_dict(source.state_dict(), assign=assign)
    assert module.is_prepacked
    assert_same_streams(module, source)
    x = random_x(module)
    assert torch.equal(module(x), copy.deepcopy(source).prepack_()(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"weight": torch.zeros(3, dtype=torch.uint8)}, strict=False)
    assert_same_streams(module, source)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "other", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded], ids=["copy", "pickle", "save"]
)
@pytest.mark.parametrize("pair", ["fp6", "fp8", *MIXED])
def test_copies_are_prepacked_too(pair, other):
    module = quant_linear(pair).prepack_()
    made = other(module)
    assert made.is_prepacked and made.weight.data_ptr() != module.weight.data_ptr()
    assert torch.equal(made(random_x(module)), module(random_x(module)))
    assert_same_streams(made, quant_linear(pair))


@pytest.mark.parametrize("pair", ["fp6", "fp8", *MIXED])
def test_casts_and_moves_keep_the_weight(pair):
    plain, module = quant_linear(pair), quant_linear(pair).prepack_()
    module.to(torch.bfloat16)
    assert module.is_prepacked and module.bias.dtype == torch.bfloat16
    assert_same_streams(module, plain)
    module.to("cpu", torch.float16)
    assert module.is_prepacked
    assert_same_streams(module, plain)
    gone = module.to("meta")
    assert {n: p.shape for n, p in gone.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_weights_prepacked_while_inferring_train_adapters():
    module = quant_linear(bias=False)
    x = random_x(module).requires_grad_()
    module(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with torch.inference_mode():
        module.prepack_()
    module(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", ["fp6", "fp8", *MIXED])
def test_offloaded_weights_stay_streams(pair, shape):
    plain = quant_linear(pair, shape)
    model = nn.Sequential(quant_linear(pair, shape))
    cpu_offload(model, torch.device("cpu"))
    assert not model[0].prepack_().is_prepacked
    x = random_x(plain)
    assert torch.equal(model(x), plain(x))
    # Where the hook took hold of a weight that was prepacked, that is what it brings back: its shape says so.
    module = quant_linear(pair, shape).prepack_()
    expected = module(x)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    assert module.weight.is_meta
    assert torch.equal(module(x), expected)


@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a .functools.lru_cache.:UserWarning"
)  # of the tables of codes
def test_compiled_whole():
    module = quant_linear().prepack_()
    function = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = random_x(module)
    with torch.inference_mode():
        assert torch.equal(function(x), module(x))
        module.unprepack_()
        assert torch.equal(function(x), module(x)), "the other form is another graph"


@pytest.mark.parametrize("pair", ["fp6", "fp8", "nvfp4", "nvfp4/fp8"])
def test_a_prepacked_model_is_saved_byte_for_byte(pair, tiny_model, text_file, tmp_path):
    settings = {"dataset": str(text_file), "samples": 4, "seq_len": 64, "device": "cpu", "pair": pair}
    result = fpquant.calibrate(str(tiny_model), out=tmp_path / "q", **settings)
    written = (tmp_path / "q/model.safetensors").read_bytes()
    model = fpquant.load(tmp_path / "q", device="cpu")
    for module in [*checkpoint.quant_modules(model).values(), *checkpoint.quant_modules(result.model).values()]:
        assert module.prepack_().is_prepacked
    model.save_pretrained(tmp_path / "transformers")
    fpquant.save(result, tmp_path / "ours")
    for again in ("transformers", "ours"):
        assert (tmp_path / again / "model.safetensors").read_bytes() == written
        checkpoint.verify(tmp_path / again)
    ids = torch.arange(2, 66).reshape(1, 64)
    with torch.inference_mode():
        half = model.to(torch.float16)(input_ids=ids).logits
        plain = fpquant.load(tmp_path / "q", device="cpu", dtype="float16")(input_ids=ids).logits
    torch.testing.assert_close(half, plain, rtol=1e-2, atol=1e-2)


def with_inputs(pair="nvfp4/fp8", in_features=100, out_features=40):
    module = QuantLinear.from_packed(pack(torch.randn(out_features, in_features), get_pair(pair)))
    more = (torch.rand(in_features), torch.tensor([0.3])) if pair == "nvfp4/fp8" else ()
    module.quantize_inputs(InputQuantizer(get_pair(pair), torch.tensor([2.0**-6]), *more))
    return module


@pytest.mark.parametrize("pair", ["nvfp4/fp8", "nvfp4", "fp8"])
def test_a_module_that_quantizes_its_inputs_is_a_module_like_any(pair):
    module = with_inputs(pair)
    x = torch.randn(2, 3, 100)
    expected = module(x)
    assert expected.shape == (2, 3, 40) and module(x[:0]).shape == (0, 3, 40) and module(x[0, 0]).shape == (40,)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), expected)
    empty = QuantLinear(100, 40, get_pair(pair), inputs=get_pair(pair))
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(x), expected)
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half.input_scale.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16
    module.cache_dense(torch.float32)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_gradients_pass_straight_through_quantized_inputs():
    module = with_inputs()
    x = torch.randn(4, 100, requires_grad=True)
    y = module(x)
    y.backward(grad := torch.randn(4, 40))
    torch.testing.assert_close(x.grad, grad @ module.dense())
    assert torch.equal(y.detach(), module(x.detach()))


@pytest.mark.parametrize("pair", PREPACKABLE)
def test_joined_weights_run_as_one_prepacked_weight_and_come_back(pair):
    draw = torch.Generator().manual_seed(3)
    parts = [packed(torch.randn(rows, 100, generator=draw) * 3**i, pair) for i, rows in enumerate((70, 20, 64))]
    module = QuantLinear.from_packed(join(parts))
    before = {name: stream.clone() for name, stream in module.packed.streams.items()}
    x = random_x(module)
    separate = torch.cat([QuantLinear.from_packed(p).prepack_()(x) for p in parts], dim=-1)
    assert torch.equal(module.prepack_()(x), separate)
    assert module.is_prepacked
    for name, stream in module.packed.streams.items():
        assert torch.equal(stream, before[name]), name
