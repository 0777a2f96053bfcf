"""The Fisher pass against plain autograd in float64, one sequence at a time."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fpquant.calibration.data import calibration_data
from fpquant.calibration.fisher import fisher_pass
from fpquant.models import find_modules, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_model(str(tiny_model), device=CPU)


@pytest.fixture(scope="module")
def ids(loaded, text_file):
    return calibration_data(str(text_file), loaded.tokenizer, samples=6, seq_len=48, seed=0).ids


def by_autograd(model, ids):
    """{name: (mean g^2 of the weight [out, in], mean x^2, mean (dl/dx)^2, max|x| by channel)}, all float64."""
    modules, _ = find_modules(model)
    kept = {}
    handles = []
    for name, module in modules.items():

        def keep(_module, args, name=name):
            args[0].retain_grad()
            kept[name] = args[0]

        handles.append(module.register_forward_pre_hook(keep))
    handles.append(model.get_input_embeddings().register_forward_hook(lambda _m, _a, o: o.requires_grad_()))
    fisher = {n: torch.zeros_like(m.weight) for n, m in modules.items()}
    inputs = {n: [] for n in modules}
    for sequence in ids:
        model.zero_grad()
        logits = model(input_ids=sequence.unsqueeze(0)).logits[0]
        nn.functional.cross_entropy(logits[:-1], sequence[1:]).backward()
        for name, module in modules.items():
            fisher[name] += module.weight.grad**2 / len(ids)
            inputs[name].append((kept[name].detach()[0], kept[name].grad[0]))
    for handle in handles:
        handle.remove()
    result = {}
    for name, pairs in inputs.items():
        x, g = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        transposed = type(modules[name]).__name__ == "Conv1D"
        f = fisher[name].t() if transposed else fisher[name]
        result[name] = (f, (x**2).mean(0), (g**2).mean(0), x.abs().amax(0))
    return result


def compare(result, expected, rtol=2e-4):
    assert result.modules.keys() == expected.keys()
    for name, (fisher, input_sq, grad_sq, input_max) in expected.items():
        got = result.modules[name]
        for a, b in (
            (got.fisher, fisher),
            (got.input_sq, input_sq),
            (got.grad_sq, grad_sq),
            (got.input_max, input_max),
        ):
            assert a.shape == b.shape and a.dtype == torch.float32
            assert (a.double() - b).norm() <= rtol * b.norm(), name


def test_agrees_with_autograd_in_float64(loaded, ids, tiny_model):
    modules, _ = find_modules(loaded.model)
    flags = {n: p.requires_grad for n, p in loaded.model.named_parameters()}
    result = fisher_pass(loaded.model, modules, ids)
    compare(result, by_autograd(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval(), ids))
    assert not result.nonfinite and not result.saturated and result.loss_scale == 1
    assert {n: p.requires_grad for n, p in loaded.model.named_parameters()} == flags
    assert all(p.grad is None for p in loaded.model.parameters())
    assert not any(m._forward_pre_hooks for m in modules.values())


def test_it_is_the_mean_of_squares_not_the_square_of_a_mean(loaded, ids):
    modules, _ = find_modules(loaded.model)
    whole = fisher_pass(loaded.model, modules, ids).modules
    halves = [fisher_pass(loaded.model, modules, half).modules for half in (ids[:3], ids[3:])]
    for name in modules:
        mean = (halves[0][name].fisher + halves[1][name].fisher) / 2
        torch.testing.assert_close(whole[name].fisher, mean, rtol=1e-5, atol=1e-12)


def test_conv1d_weights_come_back_as_out_by_in(ids):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config).eval()
    modules, _ = find_modules(model)
    result = fisher_pass(model, modules, ids)
    assert result.modules["transformer.h.0.attn.c_attn"].fisher.shape == (96, 32)
    double = GPT2LMHeadModel(config).double().eval()
    double.load_state_dict(model.state_dict())
    compare(result, by_autograd(double, ids))


class Scaled(nn.Module):
    """A linear layer whose gradient is multiplied on the way back."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * self.factor)
        return y


def with_gradient_factor(tiny_model, factor):
    loaded = load_model(str(tiny_model), device=CPU)
    mlp = loaded.model.model.layers[0].mlp
    mlp.up_proj = Scaled(mlp.up_proj, factor)
    return loaded.model


def test_gradients_too_large_to_square_are_counted_and_stay_the_largest(tiny_model, ids):
    model = with_gradient_factor(tiny_model, 1e24)
    modules, _ = find_modules(model)
    result = fisher_pass(model, modules, ids)
    name = "model.layers.0.mlp.up_proj.inner"
    assert result.saturated[name] > 0 and not result.nonfinite
    assert result.modules[name].fisher.isfinite().all()
    assert result.modules[name].fisher.max() > 1e37


def test_gradients_that_are_not_finite_are_counted_and_left_out(tiny_model, ids):
    model = with_gradient_factor(tiny_model, float("nan"))
    modules, _ = find_modules(model)
    result = fisher_pass(model, modules, ids)
    name = "model.layers.0.mlp.up_proj.inner"
    assert result.nonfinite[name] == modules[name].weight.numel() * len(ids)
    assert (result.modules[name].fisher == 0).all()
    assert all(m.fisher.isfinite().all() for m in result.modules.values())


@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_weights_lose_nothing_to_overflow_or_underflow(dtype, rtol, tiny_model, ids):
    loaded = load_model(str(tiny_model), device=CPU, dtype=dtype)
    modules, _ = find_modules(loaded.model)
    result = fisher_pass(loaded.model, modules, ids)
    assert not result.nonfinite and not result.saturated
    assert (result.loss_scale > 1) == (dtype == "float16")
    expected = by_autograd(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval(), ids)
    compare(result, expected, rtol)


def test_the_callers_gradients_and_modes_are_left_alone(tiny_model, ids):
    model = load_model(str(tiny_model), device=CPU).model.train()
    modules, _ = find_modules(model)
    first = fisher_pass(model, modules, ids)
    model.zero_grad()
    model(input_ids=ids[:1], labels=ids[:1]).loss.backward()
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    again = fisher_pass(model, modules, ids)
    assert model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, kept[name])
    assert all(torch.equal(first.modules[n].fisher, again.modules[n].fisher) for n in modules)
