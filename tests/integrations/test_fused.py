"""Layers as vLLM builds them, without vLLM: the shares of all devices together against the whole weights."""

import pytest
import torch

from fpquant.activations import InputQuantizer
from fpquant.checkpoint import ModuleSpec
from fpquant.errors import FpquantError
from fpquant.integrations.fused import FusedLinear, StoredModule, check_columns
from fpquant.packing import pack, unpack
from fpquant.schemes import get_pair

CPU = torch.device("cpu")
EVERYTHING = (slice(None),)


def packed(pair_name, out_features, in_features, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pair = get_pair(pair_name)
    w = torch.randn(out_features, in_features, generator=generator)
    high = None if pair.is_uniform else torch.rand(out_features, -(-in_features // 16), generator=generator) > 0.6
    return pack(w, pair, high)


def stored(weight, rows=EVERYTHING, columns=slice(None), inputs=None):
    """A module read from a checkpoint: packed streams, or a dense weight."""
    if isinstance(weight, torch.Tensor):
        module = StoredModule("m", get_pair("fp6"), None, rows, columns, torch.float32)
        module.add("weight", weight, CPU)
        return module
    spec = ModuleSpec(weight.shape, weight.high_blocks, inputs and inputs.pair)
    module = StoredModule("m", weight.pair, spec, rows, columns, torch.float32)
    tensors = dict(weight.streams) | ({} if inputs is None else inputs.tensors)
    for name in reversed(tensors):  # any order
        module.add(name, tensors[name], CPU)
    return module


def dense(weight):
    return weight if isinstance(weight, torch.Tensor) else unpack(weight)


@pytest.mark.parametrize("pair", ["nvfp4/fp8", "fp6/fp16", "nvfp4", "fp6", "fp8"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_rows_of_siblings_and_columns_shared_among_devices_give_the_whole(pair, devices):
    siblings = [packed(pair, rows, 128, seed) for seed, rows in enumerate((32, 16, 16))]
    x, bias = torch.randn(3, 128), torch.randn(64)
    whole = [unpack(w) for w in siblings]
    biases = bias.split([32, 16, 16])
    for device in range(devices):
        rows = [slice(device * n // devices, (device + 1) * n // devices) for n in (32, 16, 16)]
        layer = FusedLinear(
            [stored(w, (part,)).finished() for w, part in zip(siblings, rows, strict=True)], torch.float32
        )
        weight = torch.cat([w[part] for w, part in zip(whole, rows, strict=True)])
        b = torch.cat([b[part] for b, part in zip(biases, rows, strict=True)])
        torch.testing.assert_close(layer(x, b), x @ weight.T + b)
    parts = [slice(device * 128 // devices, (device + 1) * 128 // devices) for device in range(devices)]
    layers = [FusedLinear([stored(siblings[0], columns=c).finished()], torch.float32) for c in parts]
    got = sum(layer(x[:, c]) for layer, c in zip(layers, parts, strict=True))
    torch.testing.assert_close(got, x @ whole[0].T)


def test_rows_of_a_module_that_is_fused_on_disk():
    """qkv below each other in one module, of which a device holds a part of each."""
    module = packed("nvfp4/fp8", 96, 64)
    rows = (slice(16, 32), slice(48, 64), slice(80, 96))
    layer = FusedLinear([stored(module, rows).finished()], torch.float32)
    x = torch.randn(2, 64)
    weight = torch.cat([unpack(module)[part] for part in rows])
    torch.testing.assert_close(layer(x), x @ weight.T)


def test_siblings_may_be_unquantized_and_quantize_inputs_each_in_its_way():
    def inputs(scale):
        return InputQuantizer(get_pair("nvfp4/fp8"), torch.tensor([scale]), torch.rand(32), torch.tensor([0.01]))

    ours, theirs = inputs(0.01), inputs(0.02)
    weights = [
        packed("nvfp4/fp8", 16, 32, 1),
        packed("nvfp4/fp8", 16, 32, 2),
        torch.randn(8, 32),
        packed("nvfp4/fp8", 8, 32, 3),
    ]
    quantizers = [ours, ours, None, theirs]
    modules = [stored(w, inputs=q) for w, q in zip(weights, quantizers, strict=True)]
    layer = FusedLinear([module.finished() for module in modules], torch.float32)
    assert layer.rows == [32, 8, 8]
    x, bias = torch.randn(5, 32), torch.randn(48)

    def quantized(q):
        return x if q is None else torch.ops.fpquant.act_quant(x, *q.tensors.values(), q.pair.name)[0]

    expected = torch.cat([quantized(q) @ dense(w).T for w, q in zip(weights, quantizers, strict=True)], -1) + bias
    torch.testing.assert_close(layer(x, bias), expected)


def test_columns_take_their_channels_of_the_input_quantizer():
    quantizer = InputQuantizer(get_pair("nvfp4/fp8"), torch.tensor([0.01]), torch.rand(64), torch.tensor([0.01]))
    share = stored(packed("nvfp4", 16, 64), columns=slice(32, 64), inputs=quantizer).finished()
    assert torch.equal(share.inputs.input_weight, quantizer.input_weight[32:])


def test_what_is_missing_too_much_or_of_another_size_is_named():
    weight = packed("nvfp4/fp8", 16, 64)
    module = StoredModule(
        "model.q", weight.pair, ModuleSpec((16, 64), weight.high_blocks), EVERYTHING, slice(None), CPU
    )
    module.add("weight", weight.weight, CPU)
    with pytest.raises(FpquantError, match=r"lacks model\.q\.weight_scale; it is incomplete"):
        module.finished()
    with pytest.raises(FpquantError, match=r"has model\.q\.input_scale, which its config\.json does not"):
        module.add("input_scale", torch.ones(1), CPU)
    with pytest.raises(FpquantError, match=r"model\.q\.weight must be torch\.uint8 \[\d+\], got torch\.uint8 \[3\]"):
        module.add("weight", torch.zeros(3, dtype=torch.uint8), CPU)


def test_inputs_that_devices_cannot_divide_into_blocks():
    check_columns("model.o", 128, 8)
    check_columns("model.o", 172, 1)
    with pytest.raises(FpquantError, match="model.o has 172 inputs, which 2 devices cannot divide"):  # noqa: RUF043
        check_columns("model.o", 172, 2)
