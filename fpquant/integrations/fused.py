"""Layers as inference engines build them: several modules of a checkpoint that share an input, as one matrix (q, k and
v; gate and up), of which each of a group of devices holds some rows or some columns.

A StoredModule takes a module's tensors as they are read and keeps this device's share of them, still packed. A
FusedLinear lays the shares below each other and multiplies by all of them at once: siblings may mix formats as they
like. On a GPU it is the kernels' layout; on a CPU, where there is no kernel, the decoded weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fpquant.activations import INPUTS, InputQuantizer, check_inputs
from fpquant.checkpoint import ModuleSpec
from fpquant.errors import FpquantError
from fpquant.linear import QuantLinear, content_key
from fpquant.packing import STREAMS, BlockMixedTensor, check, join, take, unpack
from fpquant.schemes import BLOCK_SIZE, Pair


@dataclass(frozen=True)
class Share:
    """What this device holds of a module: a weight [out, in], packed or (of a module that is not quantized) dense, and
    how its inputs are quantized."""

    weight: BlockMixedTensor | Tensor
    inputs: InputQuantizer | None = None


@dataclass
class StoredModule:
    """A module of a checkpoint while it is read.

    name: what errors call it. spec: what config.json says of it, None where it is not quantized. rows: this device's
    outputs, in the order in which it wants them. columns: its inputs. dtype: of a weight that is not quantized.
    """

    name: str
    pair: Pair
    spec: ModuleSpec | None
    rows: tuple[slice, ...]
    columns: slice
    dtype: torch.dtype
    share: Share | None = None
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, tensor: str, value: Tensor, device: torch.device) -> None:
        """Take one of the module's tensors (`weight`, `weight_scale`, ...), in any order; with the last one, the share
        is there. Raises FpquantError for tensors that are not as config.json says."""
        wanted = self.wanted
        if tensor not in wanted:
            raise FpquantError(
                f"the checkpoint has {self.name}.{tensor}, which its config.json does not; it is damaged"
            )
        size = wanted[tensor]
        if size is not None and ((value.numel(), value.dtype) != size or value.dim() != 1):
            raise FpquantError(
                f"{self.name}.{tensor} must be {size[1]} [{size[0]}], got {value.dtype} {list(value.shape)}; "
                "the checkpoint is damaged"
            )
        self._tensors[tensor] = value.to(device)
        if self._tensors.keys() == wanted.keys():
            self.share = self._whole()
            self._tensors.clear()

    def finished(self) -> Share:
        """The share. Raises FpquantError, naming the tensor, where one never came."""
        if self.share is None:
            missing = next(t for t in self.wanted if t not in self._tensors)
            raise FpquantError(f"the checkpoint lacks {self.name}.{missing}; it is incomplete, copy it again")
        return self.share

    @property
    def wanted(self) -> dict[str, tuple[int, torch.dtype] | None]:
        """{tensor: (elements, type)} of the tensors it is made of; None for a weight that is not quantized."""
        return {"weight": None} if self.spec is None else dict(self.spec.sizes(self.pair))

    def _whole(self) -> Share:
        tensors = self._tensors
        if self.spec is None:
            weight = tensors["weight"].to(self.dtype)
            return Share(torch.cat([weight[rows, self.columns] for rows in self.rows]))
        streams = {name: t for name, t in tensors.items() if name in STREAMS}
        packed = BlockMixedTensor(self.spec.shape, self.pair, **streams)
        check(packed, self.name)
        return Share(join([take(packed, rows, self.columns) for rows in self.rows]), self._inputs())

    def _inputs(self) -> InputQuantizer | None:
        assert self.spec is not None
        if self.spec.inputs is None:
            return None
        quantizer = InputQuantizer(self.spec.inputs, **{n: t for n, t in self._tensors.items() if n in INPUTS})
        check_inputs(quantizer, self.name)
        if quantizer.input_weight is not None:
            quantizer = replace(quantizer, input_weight=quantizer.input_weight[self.columns].clone())
        return quantizer


def check_columns(name: str, in_features: int, devices: int) -> None:
    """Raise FpquantError where the inputs of a module cannot be divided among so many devices."""
    if in_features % (BLOCK_SIZE * devices) and devices > 1:
        raise FpquantError(
            f"{name} has {in_features} inputs, which {devices} devices cannot divide into whole blocks of "
            f"{BLOCK_SIZE}; choose another tensor-parallel size"
        )


class FusedLinear(nn.Module):
    """x W^T + bias over the shares of one or more modules, below each other. dtype: of the activations."""

    def __init__(self, shares: Sequence[Share], dtype: torch.dtype) -> None:
        super().__init__()
        groups = [list(group) for _, group in itertools.groupby(shares, _kind)]
        self.pieces = nn.ModuleList(_Piece(group, dtype) for group in groups)
        self.rows = [sum(share.weight.shape[0] for share in group) for group in groups]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(self.rows) == 1:
            y: Tensor = self.pieces[0](x, bias)
            return y
        biases = [None] * len(self.rows) if bias is None else bias.split(self.rows)
        return torch.cat([piece(x, b) for piece, b in zip(self.pieces, biases, strict=True)], dim=-1)


def _kind(share: Share) -> tuple[bool, object]:
    """Equal for neighbours that one matrix can serve: both packed or not, and their inputs quantized alike."""
    inputs = None if share.inputs is None else content_key(share.inputs)
    return isinstance(share.weight, BlockMixedTensor), inputs


class _Piece(nn.Module):
    """Shares of one kind as one matrix."""

    def __init__(self, shares: Sequence[Share], dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs = shares[0].inputs
        self.quantized: QuantLinear | None = None
        packed = [s.weight for s in shares if isinstance(s.weight, BlockMixedTensor)]
        dense = [s.weight for s in shares if isinstance(s.weight, Tensor)]
        if packed and packed[0].weight.is_cuda:
            self.quantized = QuantLinear.from_packed(join(packed)).prepack_on_gpu_()
        else:
            weight = unpack(join(packed), dtype) if packed else torch.cat(dense)
            self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.inputs is not None:
            tensors = (getattr(self.inputs, name) for name in INPUTS)
            x = torch.ops.fpquant.act_quant(x, *tensors, self.inputs.pair.name)[0]
        if self.quantized is not None:
            return self.quantized.multiply(x, bias)
        return nn.functional.linear(x, self.weight, bias)
