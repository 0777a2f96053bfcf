"""One pass over the calibration data that gathers what every policy needs.

For each weight element the diagonal of the empirical Fisher information, the mean over sequences of the squared
gradient of that sequence's mean next-token negative log-likelihood (FGMP, section 3.2, equation 3). In the same pass,
for each input channel of each module: mean x^2, mean g^2 and max|x| over tokens.

Each gradient is squared, added and freed as it arrives, so no full set of gradients ever exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.errors import FpquantError
from fpquant.finite import first_nonfinite
from fpquant.models import evaluation_mode, is_conv1d
from fpquant.progress import Track, no_progress

MAX_LOSS_SCALE = 2.0**24
LOSS_SCALE_MARGIN = 2.0**4
"""With fp16 weights the loss is scaled by the largest tried power of two that keeps the first sequence's gradients
finite, less this margin for the others."""

WAITING_GRADIENTS, WAITING_BYTES = 64, 1 << 30
"""How many gradients on a GPU, and how much memory of them, may wait for the answer whether they are finite."""


@dataclass(frozen=True)
class ModuleStatistics:
    """What the pass gathers of one linear module, fp32 on the CPU."""

    fisher: Tensor  # [out, in]: mean over sequences of the squared gradient
    input_sq: Tensor  # [in]: mean over tokens of x^2
    grad_sq: Tensor  # [in]: mean over tokens of (dloss/dx)^2
    input_max: Tensor  # [in]: max over tokens of |x|


@dataclass(frozen=True)
class FisherResult:
    """Statistics by module; how many gradient elements were not finite (left out of the sums) or too large to square
    in fp32 (counted as the largest number) by module, where any were; and the loss scale that was used."""

    modules: dict[str, ModuleStatistics]
    nonfinite: dict[str, int]
    saturated: dict[str, int]
    loss_scale: float


@dataclass
class _Sums:
    """Running sums of one module, on its device, in the parameter's own layout."""

    fisher: Tensor
    input_sq: Tensor
    grad_sq: Tensor
    input_max: Tensor
    tokens: int = 0
    nonfinite: int = 0
    saturated: int = 0

    def add_gradient(self, gradient: Tensor, all_finite: bool) -> None:
        if all_finite:
            self.fisher.addcmul_(gradient, gradient)  # squares and sums in fp32, whatever the gradient's type
            return
        gradient = gradient.float()
        finite = torch.isfinite(gradient)
        self.nonfinite += int((~finite).sum())
        square = torch.where(finite, gradient, 0.0).square_()
        self.saturated += int(torch.isinf(square).sum())
        self.fisher.add_(square).clamp_(max=torch.finfo(torch.float32).max)

    @classmethod
    def zeros(cls, module: nn.Module) -> _Sums:
        weight = module.weight
        assert isinstance(weight, Tensor)
        in_features = weight.shape[0 if is_conv1d(module) else 1]
        channel = torch.zeros(in_features, dtype=torch.float32, device=weight.device)
        return cls(torch.zeros_like(weight, dtype=torch.float32), channel, channel.clone(), channel.clone())


class _Gradients:
    """Adds each gradient once it is known whether all of it is finite and can be squared.

    The answer is asked of the device at once and waited for some gradients later, which are kept meanwhile: a GPU is
    not idle between two weights. On a CPU nothing waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[_Sums, Tensor, Tensor, torch.cuda.Event | None]] = deque()
        self._bytes = 0

    def add(self, sums: _Sums, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        event = None
        if gradient.is_cuda:
            norm = torch.empty((), dtype=torch.float32, pin_memory=True).copy_(norm, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(gradient.device))
        self._waiting.append((sums, gradient, norm, event))
        self._bytes += gradient.nbytes
        while self._waiting and (
            event is None or len(self._waiting) > WAITING_GRADIENTS or self._bytes > WAITING_BYTES
        ):
            self._add_oldest()

    def finish(self) -> None:
        while self._waiting:
            self._add_oldest()

    def _add_oldest(self) -> None:
        sums, gradient, norm, event = self._waiting.popleft()
        self._bytes -= gradient.nbytes
        if event is not None:
            event.synchronize()
        sums.add_gradient(gradient, bool(torch.isfinite(norm)))


@dataclass
class _InputTap:
    """Statistics of the tensors that enter modules; siblings that share one input (q, k, v) share the work."""

    last: Tensor | None = None
    readers: list[_Sums] = field(default_factory=list)
    square_sum: Tensor | None = None
    largest: Tensor | None = None

    def enter(self, x: Tensor, sums: _Sums) -> None:
        if x is not self.last:
            self.last, self.readers = x, []
            flat = x.detach().reshape(-1, x.shape[-1]).float()
            self.square_sum, self.largest = flat.square().sum(dim=0), flat.abs().amax(dim=0)
            if x.requires_grad:
                readers = self.readers
                x.register_hook(lambda gradient: _add_input_gradient(readers, gradient))
        assert self.square_sum is not None and self.largest is not None
        self.readers.append(sums)
        sums.tokens += x.numel() // x.shape[-1]
        sums.input_sq += self.square_sum
        torch.maximum(sums.input_max, self.largest, out=sums.input_max)


def _add_input_gradient(readers: list[_Sums], gradient: Tensor) -> None:
    total = gradient.detach().reshape(-1, gradient.shape[-1]).float().square().sum(dim=0)
    for sums in readers:
        sums.grad_sq += total


def fisher_pass(
    model: Any, modules: Mapping[str, nn.Module], ids: Tensor, *, track: Track = no_progress
) -> FisherResult:
    """Run the pass. modules: the linear modules of `model` by name; ids: int64 [sequences, tokens].

    The model's weights, gradients, requires_grad flags and modes are as before when it returns. Raises FpquantError
    where a loss or an input is not finite.
    """
    sums = {name: _Sums.zeros(m) for name, m in modules.items()}
    device = model.get_input_embeddings().weight.device
    half = any(m.weight.dtype == torch.float16 for m in modules.values())
    with _only_these_train(model, modules):
        scale = _find_loss_scale(model, modules, ids[:1].to(device)) if half else 1.0
        with ExitStack() as hooks:
            tap, gradients = _InputTap(), _Gradients()
            for name, module in modules.items():
                _attach(hooks, module, sums[name], tap, gradients)
            for sequence in track(ids, "Fisher pass", len(ids)):
                _backward(model, sequence.unsqueeze(0).to(device), scale)
            gradients.finish()
    return FisherResult(
        modules={name: _finish(s, modules[name], len(ids), scale, name) for name, s in sums.items()},
        nonfinite={name: s.nonfinite for name, s in sums.items() if s.nonfinite},
        saturated={name: s.saturated for name, s in sums.items() if s.saturated},
        loss_scale=scale,
    )


def _attach(hooks: ExitStack, module: nn.Module, sums: _Sums, tap: _InputTap, gradients: _Gradients) -> None:
    def take_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        gradients.add(sums, gradient)

    def take_input(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        tap.enter(args[0] if args else next(iter(kwargs.values())), sums)

    weight = module.weight
    assert isinstance(weight, Tensor)
    handles = (
        module.register_forward_pre_hook(take_input, with_kwargs=True),
        weight.register_post_accumulate_grad_hook(take_gradient),
    )
    for handle in handles:
        hooks.callback(handle.remove)


def sequence_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token negative log-likelihood of ids [1, tokens]."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:].to(logits.device))


def _backward(model: Any, ids: Tensor, scale: float) -> None:
    loss = sequence_loss(model, ids)
    if not torch.isfinite(loss):
        where = first_nonfinite(model, ids[0])
        raise FpquantError(
            f"the model's loss on the calibration text is {loss.item()}{f', first after {where}' if where else ''}; "
            "try --dtype bfloat16 or float32"
        )
    (loss * scale).backward()


def _find_loss_scale(model: Any, modules: Mapping[str, nn.Module], ids: Tensor) -> float:
    """The power of two for fp16 gradients, of which a third would be subnormal without."""
    scale = MAX_LOSS_SCALE
    while scale > 1:
        overflowed: list[bool] = []
        with ExitStack() as hooks:
            for module in modules.values():

                def look(parameter: Tensor, overflowed: list[bool] = overflowed) -> None:
                    assert parameter.grad is not None
                    overflowed.append(not bool(torch.isfinite(parameter.grad).all()))
                    parameter.grad = None

                assert isinstance(module.weight, Tensor)
                hooks.callback(module.weight.register_post_accumulate_grad_hook(look).remove)
            _backward(model, ids, scale)
        if not any(overflowed):
            return max(1.0, scale / LOSS_SCALE_MARGIN)
        scale /= LOSS_SCALE_MARGIN
    return 1.0


@contextmanager
def _only_these_train(model: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Gradients for these modules' weights alone, and for the activations that lead to them."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    for parameter, _, _ in before:
        parameter.requires_grad_(False)
        parameter.grad = None
    for module in modules.values():
        assert isinstance(module.weight, Tensor)
        module.weight.requires_grad_(True)
    # gradients of the first block's input too, though no weight before it trains
    embeddings = model.get_input_embeddings().register_forward_hook(lambda _m, _a, output: output.requires_grad_())
    try:
        with evaluation_mode(model), torch.enable_grad():
            yield
    finally:
        embeddings.remove()
        for parameter, flag, gradient in before:
            parameter.requires_grad_(flag)
            parameter.grad = gradient


_STAGED_ELEMENTS = 1 << 26


def to_cpu(x: Tensor) -> Tensor:
    """x [...] on the CPU, contiguous. From a GPU by way of pinned memory, from where many threads copy: new memory is
    slow to enter, and a direct copy enters it with one."""
    if not x.is_cuda:
        return x.cpu().contiguous()
    result = torch.empty(x.shape, dtype=x.dtype)
    source, target = x.contiguous().view(-1), result.view(-1)
    staging = torch.empty(min(_STAGED_ELEMENTS, x.numel()), dtype=x.dtype, pin_memory=True)
    for start in range(0, x.numel(), _STAGED_ELEMENTS):
        part = target[start : start + _STAGED_ELEMENTS]
        part.copy_(staging[: part.numel()].copy_(source[start : start + _STAGED_ELEMENTS]))
    return result


def _finish(sums: _Sums, module: nn.Module, sequences: int, scale: float, name: str) -> ModuleStatistics:
    if not torch.isfinite(sums.input_max).all():
        raise FpquantError(f"the inputs of {name} are not finite on the calibration text; try --dtype bfloat16")
    fisher = sums.fisher.t().contiguous() if is_conv1d(module) else sums.fisher
    tokens = max(1, sums.tokens)
    return ModuleStatistics(
        fisher=to_cpu(fisher.div_(sequences).div_(scale).div_(scale)),
        input_sq=(sums.input_sq / tokens).cpu(),
        grad_sq=(sums.grad_sq / tokens / scale / scale).cpu(),
        input_max=sums.input_max.cpu(),
    )
