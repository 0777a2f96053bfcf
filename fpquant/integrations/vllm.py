"""vLLM's quantization method `fpquant`: what makes `vllm serve DIR` open our directories.

A checkpoint's `quant_method` selects it. vLLM makes one layer of q, k and v, and one of gate and up, and divides layers
among the devices of a tensor-parallel group; a layer's linear method here says which rows and columns of which modules
are this device's, takes the modules' tensors as vLLM reads them, and makes a FusedLinear of them at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fpquant.activations import INPUTS
from fpquant.checkpoint import QUANT_METHOD, ModuleSpec, parse_config
from fpquant.errors import FpquantError
from fpquant.integrations.fused import FusedLinear, StoredModule, check_columns
from fpquant.packing import STREAMS

Shard = str | int | tuple[int, ...] | None
"""Which part of a fused layer a tensor belongs to, as vLLM says it: "q", 0, (0, 1), or None for all of it."""


@register_quantization_config(QUANT_METHOD)
class FpQuantConfig(QuantizationConfig):
    """The `quantization_config` of a checkpoint. `modules`: {vLLM's or the checkpoint's name of a module: (the
    checkpoint's name, what it holds)}."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.pair, specs = parse_config(config)
        self._stored = {name: (name, spec) for name, spec in specs.items()}
        self.modules = dict(self._stored)

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # without a kernel, PyTorch decodes; the kernels want 8.0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FpQuantConfig:
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.modules |= hf_to_vllm_mapper.apply_dict(self._stored)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(leaf, [leaf])]
        stored = [self.modules.get(name, (name, None)) for name in names]
        if all(spec is None for _, spec in stored):
            return UnquantizedLinearMethod()
        return FpQuantLinearMethod(self, stored)


class FpQuantLinearMethod(LinearMethodBase):
    """How one layer of vLLM is loaded and runs. stored: the modules that it is made of, in their order."""

    def __init__(self, config: FpQuantConfig, stored: Sequence[tuple[str, ModuleSpec | None]]) -> None:
        self.config, self.stored = config, stored
        self.modules: list[StoredModule] = []

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Places for the checkpoint's tensors, which stay empty: what is loaded goes to the StoredModules."""
        columns = slice(None)
        if isinstance(layer, RowParallelLinear):
            check_columns(self.stored[0][0], input_size, layer.tp_size)
            first = layer.tp_rank * input_size_per_partition
            columns = slice(first, first + input_size_per_partition)
        rows = _rows(layer, output_partition_sizes)
        if len(self.stored) not in (1, len(rows)):
            raise FpquantError(
                f"vLLM's layer {layer.prefix} has {len(rows)} parts, and the checkpoint {len(self.stored)} modules for "
                "it; this family is not supported there, use transformers"
            )
        of_module = [(part,) for part in rows] if len(self.stored) > 1 else [_of_one_module(layer, rows, output_size)]
        self.modules = [
            StoredModule(name, self.config.pair, spec, part, columns, params_dtype)
            for (name, spec), part in zip(self.stored, of_module, strict=True)
        ]
        self.dtype = params_dtype
        wanted = [module.wanted for module in self.modules]
        for tensor in (*STREAMS, *INPUTS):
            sizes = [size for tensors in wanted if (size := tensors.get(tensor)) is not None]
            place = _Place(torch.empty(0, dtype=sizes[0][1] if sizes else params_dtype), requires_grad=False)
            place.weight_loader = self._loader(tensor)
            layer.register_parameter(tensor, place)

    def _loader(self, tensor: str) -> Callable[..., None]:
        def load(place: Tensor, value: Tensor, shard: Shard = None) -> None:
            self._module_of(shard).add(tensor, value, place.device)

        return load

    def _module_of(self, shard: Shard) -> StoredModule:
        if shard is None and len(self.modules) == 1:
            return self.modules[0]
        number = {"q": 0, "k": 1, "v": 2}.get(shard, shard) if isinstance(shard, str) else shard
        if not isinstance(number, int) or number >= len(self.modules):
            raise FpquantError(
                f"vLLM asks for part {shard!r} of {[m.name for m in self.modules]}, which fpquant cannot give; "
                "this family is not supported there, use transformers"
            )
        return self.modules[number]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.fused = FusedLinear([module.finished() for module in self.modules], self.dtype)
        self.modules = []
        for tensor in (*STREAMS, *INPUTS):
            if tensor != "weight":  # adapters ask it for the device
                delattr(layer, tensor)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        fused = layer.fused
        assert isinstance(fused, FusedLinear)
        return fused(x, bias)


class _Place(nn.Parameter):
    """Where vLLM finds the loader of a tensor. Families whose rows vLLM would put in another order ask for
    `output_dim`: packed rows cannot be."""

    weight_loader: Callable[..., None]

    @property
    def output_dim(self) -> int:
        raise FpquantError(
            "vLLM reorders the fused weights of this family, which packed ones cannot be; use transformers"
        )


def _rows(layer: LinearBase, sizes: list[int]) -> list[slice]:
    """This device's rows of each part of a layer, counted within the part. sizes: how many it holds of each."""
    if not isinstance(layer, ColumnParallelLinear):
        return [slice(0, size) for size in sizes]
    ranks = [layer.tp_rank] * len(sizes)
    if isinstance(layer, QKVParallelLinear):  # few heads of keys and values are on several devices
        ranks[1:] = [layer.tp_rank // layer.num_kv_head_replicas] * (len(sizes) - 1)
    return [slice(rank * size, (rank + 1) * size) for rank, size in zip(ranks, sizes, strict=True)]


def _of_one_module(layer: LinearBase, rows: list[slice], out_features: int) -> tuple[slice, ...]:
    """The same rows where the checkpoint holds all parts below each other in one module."""
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        whole = [heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
    else:
        whole = list(getattr(layer, "output_sizes", [out_features]))
    starts = itertools.accumulate(whole[:-1], initial=0)
    return tuple(slice(start + part.start, start + part.stop) for start, part in zip(starts, rows, strict=True))
