"""humming-kernels as a peer: its layers with a scale a row (NVFP4: its own scales), checked before they are timed.

    pip install humming-kernels

By default humming compiles a kernel for each of about 90 ranges of batch when a layer is first called. Here only those
of the batches that are measured are compiled, with the settings that its heuristics choose for them, which are the
same; its kernels are then launched as its layers launch them. Its heuristics leave dependent launch off for these
layers, which its kernels can do: `dependent` turns it on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fpx_accuracy import max_errors
from torch import Tensor

from fpquant.kernels.bench.speed import Rotation
from fpquant.kernels.bench.timing import copies_of

WEIGHTS: Mapping[str, dict[str, Any]] = {
    "humming": {"dtype": "float6e3m2"},
    "humming-fp5": {"dtype": "float5e2m2"},
    "humming-fp8": {"dtype": "float8e4m3"},
    "humming-nvfp4": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
}
"""humming's weight configuration of each peer."""

LARGEST_ERROR = 2e-3
"""Of a right product, relative to |W| |x|: more than rounding to bfloat16 costs, far less than a wrong product's."""

LARGEST_CHANGE = {"humming": 0.1, "humming-fp5": 0.15, "humming-fp8": 0.06, "humming-nvfp4": 0.2}
"""Of the norm of a normally distributed weight by quantization."""


def settings(layer_config: Any, batch: int, dependent: bool, device: torch.device) -> dict[str, Any]:
    """What humming's heuristics choose for a batch."""
    from humming.tune import get_heuristics_config

    chosen = dict(get_heuristics_config(layer_config, shape_m=batch, device=device))
    return chosen | {"use_pdl": True} if dependent else chosen


def compiled(layer_config: Any, batch: int, dependent: bool, device: torch.device) -> Tensor:
    """humming's handle of the kernel for a batch, compiled where it is not in its cache."""
    from humming.kernel.humming import HummingKernel

    chosen = settings(layer_config, batch, dependent, device)
    return HummingKernel.prepare_kernels(layer_config.to_str(), None, chosen, device)


def compile_all(
    name: str,
    shapes: Iterable[tuple[int, int]],
    batches: Sequence[int],
    dtype: torch.dtype,
    modes: Sequence[bool],
    device: torch.device,
) -> None:
    """Compiles what the measurements will need, side by side: each takes seconds."""
    from humming.schema import BaseWeightSchema
    from humming.transform import prepare_layer_config

    schema = BaseWeightSchema.from_config({"quant_method": "humming"} | WEIGHTS[name])
    configs = [prepare_layer_config(*shape, schema, torch_dtype=dtype, device=device) for shape in shapes]
    try:
        compiled(configs[0], batches[0], modes[0], device)
    except Exception as error:
        if "HUMMING_COMPILER" in os.environ:
            raise
        print(f"humming's NVRTC fails, so it uses nvcc: {error}")
        os.environ["HUMMING_COMPILER"] = "nvcc"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compiled, c, b, m, device) for c in configs for b in batches for m in modes]
    for job in jobs:
        job.result()


def humming(w: Tensor, name: str, batches: Sequence[int], dependent: Sequence[bool] = (False,)) -> list[Rotation]:
    """Layers of w quantized by humming, without and with dependent launch. Raises RuntimeError where one is wrong.

    w: [out, in] float16 or bfloat16 on a GPU. batches: what they will be called with.
    """
    from humming import ops
    from humming.layer import HummingLayer

    shape_n, shape_k = w.shape
    layer = HummingLayer(shape_n=shape_n, shape_k=shape_k, weight_config=dict(WEIGHTS[name]), torch_dtype=w.dtype)
    layer = layer.to(w.device)
    layer.load_from_unquantized(w)
    dense = layer.weight_schema.dequant_tensors(layer.state_dict())
    change = ((dense - w.float()).norm() / w.float().norm()).item()
    if not change < LARGEST_CHANGE[name]:
        raise RuntimeError(f"{name}: quantization changes the weight by {change:.1%}")
    layer.transform()
    config, weight_scale = layer.humming_config, layer.weight_scale
    weight_scale_2 = getattr(layer, "weight_scale_2", None)
    weights = [layer.weight.detach()]
    weights += [weights[0].clone() for _ in range(copies_of(weights[0].nbytes) - 1)]
    with_locks = [(weight, torch.zeros_like(layer.locks)) for weight in weights]  # as each layer has its own
    x = torch.randn(max(batches), shape_k, dtype=w.dtype, device=w.device)
    found = []
    for on in dependent:
        handles = {batch: compiled(config, batch, on, w.device) for batch in batches}

        def multiply(x: Tensor, copy: tuple[Tensor, Tensor], handles: dict[int, Tensor] = handles) -> Tensor:
            weight, locks = copy
            return ops.launch_kernel(
                configs=handles[x.shape[0]],
                inputs=x,
                weight=weight,
                weight_scale=weight_scale,
                weight_scale_2=weight_scale_2,
                locks=locks,
            )

        found.append(Rotation(multiply, with_locks, weights[0].nbytes))
    products = [rotation.multiply(x[:b], with_locks[-1]) for rotation in found for b in batches]
    errors = max_errors(dense, x, products)
    if wrong := [(b, e) for b, e in zip([*batches] * len(found), errors, strict=True) if not e < LARGEST_ERROR]:
        raise RuntimeError(f"{name}: wrong products for [{shape_n}, {shape_k}], as (batch, error): {wrong}")
    return found
