"""QuantLinear: the runtime module, a linear layer whose weight stays packed.

Its weight has one of two forms, in one copy. The checkpoint's streams are one-dimensional, and PyTorch decodes them at
each use. Prepacked, its parameters are those of a kernel's layout (`fpquant.kernels.layouts`), and `weight` is
[strips of 64 outputs, bytes of a strip]. The number of dimensions is the mark: it goes with the tensor wherever that is
copied, pickled or offloaded. What leaves the module (`packed`, its state) is always streams.

Where its inputs are quantized too, it does so itself at each use, and counts what became of them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.activations import INPUTS, InputQuantizer, input_sizes
from fpquant.errors import FpquantError
from fpquant.kernels import reference
from fpquant.kernels.act_quant import ops as _act_quant  # noqa: F401 (registers the operator)
from fpquant.kernels.layouts import Layout, layout_of
from fpquant.packing import STREAMS, BlockMixedTensor, stream_sizes, unpack
from fpquant.schemes import Pair, block_count


class StraightThrough(torch.autograd.Function):
    """Quantized values whose gradient is passed on to what they were made from: adapters train through them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LastInput:
    """The last tensor that was quantized on a CPU and what became of it, as long as that tensor lives: siblings that
    share an input share the work."""

    def __init__(self) -> None:
        self._kept: tuple[Any, int, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def find(self, x: Tensor, key: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
        kept = self._kept
        same = kept is not None and kept[0]() is x and kept[1] == _version(x) and kept[2] == key
        return kept[3] if same and kept is not None else None

    def keep(self, x: Tensor, key: tuple[Any, ...], found: tuple[Tensor, Tensor]) -> None:
        self._kept = weakref.ref(x, self._forget), _version(x), key, found

    def _forget(self, reference: Any) -> None:
        if self._kept is not None and self._kept[0] is reference:
            self._kept = None


_shared = LastInput()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


class QuantLinear(nn.Linear):
    """A linear layer over a BlockMixedTensor.

    Its parameters are the streams of the packed weight (`weight` is the 1-D stream of codes) and `bias`. An nn.Linear
    by type, so that adapters and offloading that look for one find it; the streams are parameters that do not train.
    Opening its checkpoint without fpquant fails with a size mismatch at `weight`.
    """

    name = "a QuantLinear"
    """What errors call it: its place in its model, once it is there."""

    _is_hf_initialized = True  # or transformers fills offloaded streams with random numbers, which bytes refuse

    counts: Tensor | None
    """int64 [3], see activation_counts; None where nothing has been counted."""
    weight_scale: Tensor | None
    weight_global_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        pair: Pair,
        *,
        high_blocks: int = 0,
        inputs: Pair | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.pair, self.high_blocks = in_features, out_features, pair, high_blocks
        self.inputs: Pair | None = None
        self.counts = None
        self._key: tuple[Any, tuple[Any, ...]] | None = None
        self._layout: Layout | None = layout_of(pair, (out_features, in_features), high_blocks)
        sizes = stream_sizes((out_features, in_features), pair, high_blocks)
        for name in STREAMS:
            empty = torch.empty(sizes[name][0], dtype=sizes[name][1], device=device) if name in sizes else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty, requires_grad=False))
        filled = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )
        self.register_parameter("bias", filled)
        for name in INPUTS:
            self.register_parameter(name, None)
        if inputs is not None:
            empty_inputs = {
                name: torch.empty(size, dtype=torch.float32, device=device)
                for name, size in input_sizes(in_features, inputs).items()
            }
            self.quantize_inputs(InputQuantizer(inputs, **empty_inputs))
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
        """The weight as a BlockMixedTensor: over this module's parameters, or over copies where it is prepacked."""
        streams: dict[str, Any] = dict(self._weights)
        if self.is_prepacked:
            streams |= self._unprepacked()
        return BlockMixedTensor(shape=(self.out_features, self.in_features), pair=self.pair, **streams)

    def quantize_inputs(self, quantizer: InputQuantizer) -> None:
        """Quantize inputs so from now on."""
        self.inputs = quantizer.pair
        for name, tensor in quantizer.tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def input_quantizer(self) -> InputQuantizer | None:
        """How inputs are quantized: over this module's parameters."""
        if self.inputs is None:
            return None
        return InputQuantizer(self.inputs, *(getattr(self, name) for name in INPUTS))

    def quantized_input(self, x: Tensor) -> Tensor:
        """x as the weight meets it. Raises FpquantError for numbers that are not finite, on a CPU: a GPU would wait."""
        quantizer = self.input_quantizer
        if quantizer is None:
            return x
        eager_on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        found = _shared.find(x, self._input_key()) if eager_on_cpu else None
        if found is None:
            if eager_on_cpu and not bool(torch.isfinite(x).all()):
                raise FpquantError(f"the inputs of {self.name} are not finite; try --dtype bfloat16 or float32")
            found = quantized_and_counted(x, quantizer)
            if eager_on_cpu:
                _shared.keep(x, self._input_key(), found)
        values, counts = found
        self.counts = counts if self.counts is None or self.counts.device != x.device else self.counts + counts
        return StraightThrough.apply(x, values) if x.requires_grad and torch.is_grad_enabled() else values

    def _input_key(self) -> tuple[Any, ...]:
        """Equal for modules that quantize their inputs alike, as those do that share one (q, k and v)."""
        quantizer = self.input_quantizer
        assert quantizer is not None
        state = tuple((id(t), t._version) for t in quantizer.tensors.values())
        if self._key is None or self._key[0] != state:
            self._key = state, content_key(quantizer)
        return self._key[1]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in], each value rounded once to `dtype`."""
        return unpack(self.packed, dtype)

    @property
    def is_prepacked(self) -> bool:
        return self.weight.dim() == 2

    def prepack_(self) -> QuantLinear:
        """Put the weight in the kernel's layout, on the device it is on; the streams are dropped.

        Leaves as it is what has no kernel, and weights that are offloaded: those come and go as streams.
        """
        if (layout := self._layout) is None or self.is_prepacked or self.weight.is_meta or _is_offloaded(self):
            return self
        with torch.inference_mode(False):  # or the parameters could not be saved for a backward pass
            self._set_weights(layout.prepack(self._detached()))
        return self

    def prepack_on_gpu_(self) -> QuantLinear:
        """prepack_ where that pays: on a GPU whose kernel is compiled or can be."""
        layout = self._layout if self.weight.is_cuda else None
        return self if layout is None or not layout.has_kernel(self.weight.device) else self.prepack_()

    def unprepack_(self) -> QuantLinear:
        """The inverse of prepack_: parameters are the checkpoint's streams again."""
        if self.is_prepacked:
            with torch.inference_mode(False):
                self._set_weights(self._unprepacked())
        return self

    @property
    def _weights(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in STREAMS}

    def _detached(self) -> dict[str, Tensor | None]:
        return {name: None if t is None else t.detach() for name, t in self._weights.items()}

    def _set_weights(self, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def _unprepacked(self) -> dict[str, Tensor]:
        """The streams that differ from the parameters while those are prepacked."""
        assert self._layout is not None
        return self._layout.streams(self._detached())

    def cache_dense(self, dtype: torch.dtype | None) -> None:
        """Keep the dense weight in `dtype` for faster forward passes, at the price of memory; None drops it."""
        self._dense = None if dtype is None else self.dense(dtype)

    @property
    def has_cached_dense(self) -> bool:
        return self._dense is not None

    def freeze(self) -> None:
        """Turn requires_grad off again: loaders turn it on for floating-point parameters."""
        for name in (*STREAMS, *INPUTS):
            if (stream := getattr(self, name)) is not None:
                stream.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(self.quantized_input(x), self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias for inputs that are quantized already, or need not be, and any bias [out]."""
        if self._dense is not None and self._dense.dtype == x.dtype:
            return nn.functional.linear(x, self._dense, bias)
        if self.is_prepacked and self._layout is not None:
            if x.dtype in (torch.float16, torch.bfloat16):
                return self._layout.linear(x, self._parameters, bias)
            return nn.functional.linear(x, self._layout.dense(self._parameters, x.dtype), bias)
        return reference.linear(x, self.packed, bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Moves like any module, but scales stay fp32 whatever dtype is asked for (FP16 scales would lose digits).

        The weight moves as streams. On arriving at a GPU it is prepacked; on one device it stays as it is.
        """
        was_prepacked, before = self.is_prepacked, self.weight.device
        self.unprepack_()
        # .detach(): the base class may swap the data under the same Parameter
        kept = ((n, getattr(self, n)) for n in (*STREAMS, *INPUTS))
        scales = {n: t.detach() for n, t in kept if t is not None and t.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if (moved := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, nn.Parameter(scale.to(moved.device), requires_grad=False))
        if self._dense is not None:
            moved = fn(self._dense)
            self._dense = moved if moved.dtype == self._dense.dtype else None  # or it would be rounded twice
        if self.weight.device == before:
            return self.prepack_() if was_prepacked else self
        return self if before.type == "meta" else self.prepack_on_gpu_()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_prepacked:  # in the order that streams have
            own = {name: destination.pop(prefix + name) for name in self._parameters if prefix + name in destination}
            own |= self._unprepacked()
            names = [name for name in (*STREAMS, *self._parameters) if name in own]
            destination |= {prefix + name: own[name] for name in dict.fromkeys(names)}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        was_prepacked, self._dense = self.is_prepacked, None
        self.unprepack_()
        super()._load_from_state_dict(*args, **kwargs)
        if was_prepacked:
            self.prepack_()

    def extra_repr(self) -> str:
        blocks = self.out_features * block_count(self.in_features)
        share = f", high={self.high_blocks / blocks:.1%}" if self.pair.high else ""
        inputs = "" if self.inputs is None else f", inputs={self.inputs.name}"
        return f"{self.in_features}, {self.out_features}, {self.pair.name}{share}{inputs}, bias={self.bias is not None}"


def prepack_on_gpu(model: nn.Module) -> None:
    """prepack_on_gpu_ of every QuantLinear of a model."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.prepack_on_gpu_()


def _counted(module: QuantLinear) -> list[int]:
    return [0, 0, 0] if module.counts is None else [int(n) for n in module.counts.tolist()]


def _is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings this module's parameters for each forward pass and takes them away again."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))


COUNTS = ("blocks", "high_blocks", "saturated")


def quantized_and_counted(x: Tensor, quantizer: InputQuantizer) -> tuple[Tensor, Tensor]:
    """The quantized values of x, and int64 [3]: COUNTS. Without a gradient."""
    tensors = (getattr(quantizer, name) for name in INPUTS)
    found: tuple[Tensor, Tensor] = torch.ops.fpquant.act_quant(x.detach(), *tensors, quantizer.pair.name)
    return found


def content_key(quantizer: InputQuantizer) -> tuple[Any, ...]:
    """Equal for quantizers that do the same."""
    content = b"".join(t.detach().cpu().numpy().tobytes() for t in quantizer.tensors.values())
    return quantizer.pair, hashlib.sha256(content).digest()


def activation_counts(model: nn.Module, *, reset: bool = False) -> dict[str, int] | None:
    """{"blocks", "high_blocks", "saturated"} of all inputs that a model's QuantLinears have quantized since the last
    reset: blocks of 16 (and those that took the high scheme), and elements beyond the calibrated range. None where none
    quantizes its inputs."""
    modules = [m for m in model.modules() if isinstance(m, QuantLinear) and m.inputs is not None]
    if not modules:
        return None
    totals = [sum(n) for n in zip(*(_counted(m) for m in modules), strict=True)]
    if reset:
        for module in modules:
            module.counts = None
    return dict(zip(COUNTS, totals, strict=True))
