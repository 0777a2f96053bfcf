"""QuantLinear: the runtime module, a linear layer whose weight stays packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.kernels import reference
from fpquant.packing import STREAMS, BlockMixedTensor, stream_sizes, unpack
from fpquant.schemes import Pair, block_count


class QuantLinear(nn.Linear):
    """A linear layer over a BlockMixedTensor.

    Its parameters are the streams of the packed weight (`weight` is the 1-D stream of codes) and `bias`. An nn.Linear
    by type, so that adapters and offloading that look for one find it; the streams are parameters that do not train.
    Opening its checkpoint without fpquant fails with a size mismatch at `weight`.
    """

    _is_hf_initialized = True  # or transformers fills offloaded streams with random numbers, which bytes refuse

    def __init__(
        self,
        in_features: int,
        out_features: int,
        pair: Pair,
        *,
        high_blocks: int = 0,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.pair, self.high_blocks = in_features, out_features, pair, high_blocks
        sizes = stream_sizes((out_features, in_features), pair, high_blocks)
        for name in STREAMS:
            empty = torch.empty(sizes[name][0], dtype=sizes[name][1], device=device) if name in sizes else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty, requires_grad=False))
        filled = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )
        self.register_parameter("bias", filled)
        self._dense: Tensor | None = None

    @classmethod
    def from_packed(cls, packed: BlockMixedTensor, bias: Tensor | None = None) -> QuantLinear:
        """A module over these streams; they are not copied."""
        module = cls(
            packed.shape[1], packed.shape[0], packed.pair, high_blocks=packed.high_blocks, bias=False, device="meta"
        )
        for name, stream in packed.streams.items():
            setattr(module, name, nn.Parameter(stream, requires_grad=False))
        if bias is not None:
            module.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return module

    @property
    def packed(self) -> BlockMixedTensor:
        """The weight as a BlockMixedTensor over this module's parameters."""
        streams: dict[str, Any] = {name: getattr(self, name) for name in STREAMS}
        return BlockMixedTensor(shape=(self.out_features, self.in_features), pair=self.pair, **streams)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in], each value rounded once to `dtype`."""
        return unpack(self.packed, dtype)

    def cache_dense(self, dtype: torch.dtype | None) -> None:
        """Keep the dense weight in `dtype` for faster forward passes, at the price of memory; None drops it."""
        self._dense = None if dtype is None else self.dense(dtype)

    @property
    def has_cached_dense(self) -> bool:
        return self._dense is not None

    def freeze(self) -> None:
        """Turn requires_grad off again: loaders turn it on for floating-point parameters."""
        for name in STREAMS:
            if (stream := getattr(self, name)) is not None:
                stream.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self._dense is not None and self._dense.dtype == x.dtype:
            return nn.functional.linear(x, self._dense, self.bias)
        return reference.linear(x, self.packed, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Moves like any module, but scales stay fp32 whatever dtype is asked for (FP16 scales would lose digits)."""
        # .detach(): the base class may swap the data under the same Parameter
        scales = {n: t.detach() for n in STREAMS if (t := getattr(self, n)) is not None and t.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if (moved := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, nn.Parameter(scale.to(moved.device), requires_grad=False))
        if self._dense is not None:
            moved = fn(self._dense)
            self._dense = moved if moved.dtype == self._dense.dtype else None  # or it would be rounded twice
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._dense = None
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        blocks = self.out_features * block_count(self.in_features)
        share = f", high={self.high_blocks / blocks:.1%}" if self.pair.high else ""
        return f"{self.in_features}, {self.out_features}, {self.pair.name}{share}, bias={self.bias is not None}"
