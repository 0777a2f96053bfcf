"""The Fisher pass against plain autograd in float64, one sequence at a time."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fpquant.calibration import fisher
from fpquant.calibration.data import calibration_data
from fpquant.calibration.fisher import fisher_pass
from fpquant.errors import FpquantError
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
    g2 = {n: torch.zeros_like(m.weight) for n, m in modules.items()}
    inputs = {n: [] for n in modules}
    for sequence in ids:
        model.zero_grad()
        logits = model(input_ids=sequence.unsqueeze(0)).logits[0]
        nn.functional.cross_entropy(logits[:-1], sequence[1:]).backward()
        for name, module in modules.items():
            g2[name] += module.weight.grad**2 / len(ids)
            inputs[name].append((kept[name].detach()[0], kept[name].grad[0]))
    for handle in handles:
        handle.remove()
    result = {}
    for name, pairs in inputs.items():
        x, g = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        transposed = type(modules[name]).__name__ == "Conv1D"
        f = g2[name].t() if transposed else g2[name]
        result[name] = (f, (x**2).mean(0), (g**2).mean(0), x.abs().amax(0))
    return result


def compare(result, expected, rtol=2e-4):
    assert result.modules.keys() == expected.keys()
    for name, (g2, input_sq, grad_sq, input_max) in expected.items():
        got = result.modules[name]
        for a, b in (
            (got.fisher, g2),
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


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config).eval()


def test_conv1d_weights_come_back_as_out_by_in(ids):
    model = tiny_gpt2()
    modules, _ = find_modules(model)
    result = fisher_pass(model, modules, ids)
    assert result.modules["transformer.h.0.attn.c_attn"].fisher.shape == (96, 32)
    double = GPT2LMHeadModel(model.config).double().eval()
    double.load_state_dict(model.state_dict())
    compare(result, by_autograd(double, ids))


@pytest.mark.parametrize("at_once", [2, 4])
def test_several_sequences_at_once_give_the_sums_of_one_at_a_time(at_once, tiny_model, ids, monkeypatch):
    models = [load_model(str(tiny_model), device=CPU).model, tiny_gpt2()]
    for model in models:
        modules, _ = find_modules(model)
        expected = fisher_pass(model, modules, ids % model.config.vocab_size)
        monkeypatch.setattr("fpquant.calibration.fisher._sequences_at_once", lambda *_: at_once)
        for limit in (1 << 30, 1):  # gradients of the sequences together, and one after another
            monkeypatch.setattr("fpquant.calibration.fisher.GRADIENT_BYTES", limit)
            got = fisher_pass(model, modules, ids % model.config.vocab_size)
            for name, module in expected.modules.items():
                for field in ("fisher", "input_sq", "grad_sq", "input_max"):
                    torch.testing.assert_close(getattr(got.modules[name], field), getattr(module, field))
        monkeypatch.undo()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Flat(nn.Module):
    """A linear layer that gets the tokens of all sequences below each other, as experts do."""

    def __init__(self, inner, *shape):
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x):
        return self.inner(x.reshape(*self.shape, x.shape[-1])).reshape(*x.shape[:-1], -1)


def test_sequences_that_a_module_does_not_keep_apart_are_taken_one_at_a_time(tiny_model, ids, monkeypatch):
    loaded = load_model(str(tiny_model), device=CPU)
    choice, chosen = fisher._sequences_at_once, []
    monkeypatch.setattr(fisher, "_free", lambda _device: 1 << 40)

    def on_a_gpu(tokens, sums, _held):
        chosen.append(choice(tokens, sums, {CPU: 1}))
        return 1

    monkeypatch.setattr(fisher, "_sequences_at_once", on_a_gpu)
    mlp = loaded.model.model.layers[0].mlp
    plain = mlp.up_proj
    for module in (plain, Flat(plain, -1)):
        mlp.up_proj = module
        fisher_pass(loaded.model, find_modules(loaded.model)[0], ids)
    assert chosen == [2048 // 48, 1]


def test_a_module_that_one_sequence_does_not_give_away_is_an_error(tiny_model, ids, monkeypatch):
    loaded = load_model(str(tiny_model), device=CPU)
    mlp = loaded.model.model.layers[0].mlp
    mlp.up_proj = Flat(mlp.up_proj, 1, -1)
    monkeypatch.setattr(fisher, "_sequences_at_once", lambda *_: 2)
    with pytest.raises(FpquantError, match="mixes the tokens of several sequences"):
        fisher_pass(loaded.model, find_modules(loaded.model)[0], ids)


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
