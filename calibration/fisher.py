"""One pass over the calibration data that gathers what every policy needs.

For each weight element the diagonal of the empirical Fisher information, the mean over sequences of the squared
gradient of that sequence's mean next-token negative log-likelihood (FGMP, section 3.2, equation 3). In the same pass,
for each input channel of each module: mean x^2, mean g^2 and max|x| over tokens.

Each gradient is squared, added and freed as it arrives, so no full set of gradients ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fpquant.calibration.squares import add_squares
from fpquant.errors import FpquantError
from fpquant.finite import first_nonfinite
from fpquant.models import evaluation_mode, is_conv1d
from fpquant.progress import Track, no_progress

MAX_LOSS_SCALE = 2.0**24
LOSS_SCALE_MARGIN = 2.0**4
"""With fp16 weights the loss is scaled by the largest tried power of two that keeps the first sequence's gradients
finite, less this margin for the others."""

BATCH_TOKENS = 2048
"""How many tokens, in whole sequences, a GPU takes at once: enough to keep it busy."""

GRADIENT_BYTES = 1 << 30
"""How much memory one weight's gradients of several sequences may take."""


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
    counts: Tensor  # int64 [2]: gradients that were not finite, and too large to square
    tokens: int = 0
    shape: tuple[int, ...] = ()  # of the latest input
    sequences: int = 0  # of this backward pass, whose gradients came by way of outputs

    @classmethod
    def zeros(cls, module: nn.Module) -> _Sums:
        weight = module.weight
        assert isinstance(weight, Tensor)
        in_features = weight.shape[0 if is_conv1d(module) else 1]
        channel = torch.zeros(in_features, dtype=torch.float32, device=weight.device)
        return cls(
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device),
            channel,
            channel.clone(),
            channel.clone(),
            torch.zeros(2, dtype=torch.int64, device=weight.device),
        )


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
        sums.shape = tuple(x.shape)
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
    with _frozen(model):
        scale = _find_loss_scale(model, modules, ids[:1].to(device)) if half else 1.0
        with ExitStack() as inputs, ExitStack() as gradients:
            _tap_inputs(inputs, modules, sums)
            _take_gradients(gradients, modules, sums)
            sequences = iter(track(ids, "Fisher pass", len(ids)))
            held = _backward(model, next(sequences).unsqueeze(0).to(device), scale)
            if (at_once := _sequences_at_once(ids.shape[1], sums, held)) > 1:
                gradients.close()
                _take_outputs(gradients, modules, sums)
            while batch := list(islice(sequences, at_once)):
                _backward(model, torch.stack(batch).to(device), scale)
                if at_once > 1:
                    _check_apart(sums, len(batch))
    counts = {name: s.counts.tolist() for name, s in sums.items()}
    return FisherResult(
        modules={name: _finish(s, modules[name], len(ids), scale, name) for name, s in sums.items()},
        nonfinite={name: count for name, (count, _) in counts.items() if count},
        saturated={name: count for name, (_, count) in counts.items() if count},
        loss_scale=scale,
    )


def _tap_inputs(hooks: ExitStack, modules: Mapping[str, nn.Module], sums: Mapping[str, _Sums]) -> None:
    tap = _InputTap()
    for name, module in modules.items():

        def take(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], name: str = name) -> None:
            tap.enter(args[0] if args else next(iter(kwargs.values())), sums[name])

        hooks.callback(module.register_forward_pre_hook(take, with_kwargs=True).remove)


def _take_gradients(hooks: ExitStack, modules: Mapping[str, nn.Module], sums: Mapping[str, _Sums]) -> None:
    """Of one sequence at a time: the gradients that autograd gives the weights, whatever the module's calls."""
    for name, module in modules.items():
        weight = module.weight
        assert isinstance(weight, Tensor)

        def take(parameter: Tensor, s: _Sums = sums[name]) -> None:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            add_squares(s.fisher, gradient.contiguous().unsqueeze(0), s.counts)

        weight.requires_grad_(True)
        hooks.callback(weight.requires_grad_, False)
        hooks.callback(weight.register_post_accumulate_grad_hook(take).remove)


def _take_outputs(hooks: ExitStack, modules: Mapping[str, nn.Module], sums: Mapping[str, _Sums]) -> None:
    """Of several sequences at once: a gradient of the weight for each, as autograd computes it, from the module's
    input [sequences, tokens, in] and the gradient of its output."""
    for name, module in modules.items():

        def take(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], y: Tensor, s: _Sums = sums[name]
        ) -> None:
            inputs = [(args[0] if args else next(iter(kwargs.values()))).detach()]  # emptied when they were used
            y.register_hook(lambda gradient: _add_outer_products(s, is_conv1d(module), inputs.pop(), gradient))

        hooks.callback(module.register_forward_hook(take, with_kwargs=True).remove)


def _add_outer_products(s: _Sums, conv1d: bool, x: Tensor, gradient: Tensor) -> None:
    rows, columns = (x, gradient) if conv1d else (gradient, x)
    step = max(1, GRADIENT_BYTES // (s.fisher.numel() * x.element_size()))
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        add_squares(s.fisher, torch.bmm(rows[part].transpose(1, 2), columns[part]), s.counts)
    s.sequences += len(x)


def _sequences_at_once(tokens: int, sums: Mapping[str, _Sums], held: Mapping[torch.device, int]) -> int:
    """How many sequences of so many tokens to take at once, from what the first one showed: the inputs of all modules
    must keep sequences apart, and their activations must fit."""
    if not held or any(s.shape[:-1] != (1, tokens) or s.tokens != tokens for s in sums.values()):
        return 1
    return max(1, min([BATCH_TOKENS // tokens, *(_free(device) // max(1, 2 * held[device]) for device in held)]))


def _check_apart(sums: Mapping[str, _Sums], sequences: int) -> None:
    for name, s in sums.items():
        if s.sequences != sequences:
            raise FpquantError(
                f"{name} mixes the tokens of several sequences, so their gradients cannot be told apart; "
                "exclude it, or take --device cpu"
            )
        s.sequences = 0


def _free(device: torch.device) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def sequence_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token negative log-likelihood of ids [sequences, tokens], summed over the sequences."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
    total = nn.functional.cross_entropy(logits, ids[:, 1:].flatten().to(logits.device), reduction="sum")
    return total / (ids.shape[1] - 1)


def _backward(model: Any, ids: Tensor, scale: float) -> dict[torch.device, int]:
    """Gradients of the scaled loss. Returns how many bytes the graph held on each of the model's GPUs."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    loss = sequence_loss(model, ids)
    held = {device: torch.cuda.memory_allocated(device) - before[device] for device in devices}
    if not torch.isfinite(loss):
        where = first_nonfinite(model, ids[0])
        raise FpquantError(
            f"the model's loss on the calibration text is {loss.item()}{f', first after {where}' if where else ''}; "
            "try --dtype bfloat16 or float32"
        )
    (loss * scale).backward()
    return held


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
                module.weight.requires_grad_(True)
                hooks.callback(module.weight.requires_grad_, False)
                hooks.callback(module.weight.register_post_accumulate_grad_hook(look).remove)
            _backward(model, ids, scale)
        if not any(overflowed):
            return max(1.0, scale / LOSS_SCALE_MARGIN)
        scale /= LOSS_SCALE_MARGIN
    return 1.0


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Gradients for activations alone; flags and gradients of the parameters as before in the end."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    for parameter, _, _ in before:
        parameter.requires_grad_(False)
        parameter.grad = None
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
