"""The compressed-tensors form of a quantized model: what transformers and vLLM open without fpquant.

Of a module, beside its bias (s and s_x: the tensor scales of its weight and of its inputs):

    nvfp4   weight_packed        u8   [out, in/2]   codes, the even column in the low nibble
            weight_scale         e4m3 [out, in/16]  block scales
            weight_global_scale  f32  [1]           4/s: what block scales are divided by
            input_global_scale   f32  [1]           4/s_x, where its inputs are quantized
    fp8     weight               e4m3 [out, in]
            weight_scale         f32  [out, 1]      s in each row, so that fused siblings may differ
            input_scale          f32  [1]           s_x, where its inputs are quantized

Codes and block scales are the checkpoint's own. config.json says which modules are which.
Source: compressed-tensors 0.20 (formats `nvfp4-pack-quantized` and `float-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpquant.activations import InputQuantizer
from fpquant.checkpoint import ModuleSpec
from fpquant.errors import FpquantError
from fpquant.models import sibling_groups
from fpquant.packing import BlockMixedTensor
from fpquant.schemes import BLOCK_SIZE, FP8, NVFP4, Pair, Scheme, block_count

_COMMON = {"type": "float", "symmetric": True}
_NVFP4 = _COMMON | {
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": BLOCK_SIZE,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}
_FP8 = _COMMON | {"num_bits": 8}
_GROUPS = {
    NVFP4: {
        "format": "nvfp4-pack-quantized",
        "weights": _NVFP4 | {"dynamic": False},
        "input_activations": _NVFP4 | {"dynamic": "local"},
    },
    FP8: {
        "format": "float-quantized",
        "weights": _FP8 | {"strategy": "channel", "dynamic": False},
        "input_activations": _FP8 | {"strategy": "tensor", "dynamic": False},
    },
}


def scheme_of(name: str, spec: ModuleSpec, pair: Pair) -> Scheme:
    """The one scheme of all blocks of a module. Raises FpquantError where compressed-tensors has no form for it."""
    blocks = spec.shape[0] * block_count(spec.shape[1])
    if spec.high_blocks not in (0, blocks):
        raise FpquantError(
            f"{name} mixes blocks of {pair.low.name} and {pair.high and pair.high.name}, which compressed-tensors "
            "cannot say; calibrate with --threshold layer"
        )
    scheme = pair.high if pair.high is not None and spec.high_blocks else pair.low
    if scheme not in _GROUPS:
        raise FpquantError(f"compressed-tensors has no form for {scheme.name} ({name}); it has for nvfp4 and fp8")
    if scheme is NVFP4 and spec.shape[1] % BLOCK_SIZE:
        raise FpquantError(
            f"compressed-tensors needs whole blocks of {BLOCK_SIZE} for nvfp4, {name} has {spec.shape[1]} inputs; "
            f"calibrate with --exclude {name.rpartition('.')[2]}, or with --pair fp8"
        )
    return scheme


def check_siblings(schemes: Mapping[str, Scheme], scales: Mapping[str, Tensor]) -> None:
    """Raise FpquantError where modules that an engine fuses differ in what it takes to be one.

    scales: the tensor scale of each module's weight.
    """
    for names in sibling_groups(schemes):
        if len({schemes[n].name for n in names}) > 1:
            raise FpquantError(f"{', '.join(names)} differ in scheme, and engines fuse them; use --threshold layer")
        if schemes[names[0]] is NVFP4 and len({float(scales[n]) for n in names}) > 1:
            raise FpquantError(
                f"{', '.join(names)} have tensor scales of their own, and engines fuse them; "
                "calibrate with --portable-scales"
            )


def tensors(t: BlockMixedTensor, scheme: Scheme, inputs: InputQuantizer | None) -> dict[str, Tensor]:
    """The tensors of a module whose blocks all have this scheme."""
    (out_features, in_features), scale = t.shape, t.weight_global_scale
    assert scale is not None
    if scheme is NVFP4:
        assert t.weight_scale is not None
        made = {
            "weight_packed": t.weight.reshape(out_features, -1),
            "weight_scale": t.weight_scale.reshape(out_features, -1).view(torch.float8_e4m3fn),
            "weight_global_scale": 4 / scale,
        }
        return made if inputs is None else made | {"input_global_scale": 4 / inputs.input_scale}
    codes = t.weight if t.pair.is_uniform else t.weight_high
    assert codes is not None
    made = {
        "weight": codes.reshape(out_features, -1)[:, :in_features].contiguous().view(torch.float8_e4m3fn),
        "weight_scale": scale.expand(out_features, 1).contiguous(),
    }
    return made if inputs is None else made | {"input_scale": inputs.input_scale}


def quantization_config(schemes: Mapping[str, Scheme], ignore: Sequence[str], with_inputs: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json. ignore: the linear modules that are not quantized."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(name)
    groups = {}
    for i, (scheme, names) in enumerate(by_scheme.items()):
        group = _GROUPS[scheme] | {"targets": ["Linear"] if len(by_scheme) == 1 else names}
        groups[f"group_{i}"] = group if with_inputs else group | {"input_activations": None}
    formats = [str(g["format"]) for g in groups.values()]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
