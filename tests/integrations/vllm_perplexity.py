"""Run by test_vllm.py in a process of its own: vllm_perplexity.py SETTINGS.json WINDOWS.json OUT.json.

Writes the mean negative log-likelihood of each window of token ids. vLLM for CPUs opens compressed-tensors' weight-only
NVFP4 and FP8, but has kernels for GPUs alone: here, in the place of those kernels (Marlin), stand the values that they
multiply by, NVFP4 as vLLM itself decodes it and FP8 as code times scale. What is loaded where, and fused, is vLLM's.
"""

import json
import sys
from pathlib import Path

from torch import float8_e4m3fn
from torch.nn.functional import linear
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear import _POSSIBLE_WFP8A16_KERNELS as WEIGHT_ONLY_FP8
from vllm.model_executor.kernels.linear import PlatformEnum, register_linear_kernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.marlin import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype


def nvfp4(kernel, layer, x, bias=None):
    scales = layer.weight_scale, layer.weight_global_scale
    decoded = dequantize_to_dtype(layer.weight, *scales, x.dtype, 16, swizzle=False)
    return linear(x, decoded, bias)


def fp8(kernel, layer, x, bias=None):
    assert layer.weight.dtype == float8_e4m3fn
    return linear(x, layer.weight.t().to(x.dtype) * layer.weight_scale.to(x.dtype), bias)


for kernel, apply in ((MarlinNvFp4LinearKernel, nvfp4), (MarlinFP8ScaledMMLinearKernel, fp8)):
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply_weights = apply
WEIGHT_ONLY_FP8[PlatformEnum.CPU].append(MarlinFP8ScaledMMLinearKernel)
register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")  # vLLM's own, with quantized inputs

if __name__ == "__main__":
    settings, windows = (json.loads(Path(file).read_text()) for file in sys.argv[1:3])
    llm = LLM(**settings, distributed_executor_backend="uni")
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], asked)
    losses = []
    for ids, output in zip(windows, outputs, strict=True):
        logprobs = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        losses.append(-sum(logprobs) / len(logprobs))
    Path(sys.argv[3]).write_text(json.dumps(losses))
