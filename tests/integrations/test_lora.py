"""PEFT's LoRA over frozen quantized weights: forward and backward go through the dequantized weight."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import fpquant

# Of PEFT's own making.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture(scope="module", params=["fp6", "fgmp-70"])
def directories(request, tiny_model, text_file, tmp_path_factory):
    """The tiny model quantized, and its dequantized export."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"recipe": "fp6"} if request.param == "fp6" else {"ratio": 0.7, "samples": 4, "seq_len": 64}
    fpquant.calibrate(str(tiny_model), out=folder / "q", dataset=str(text_file), **settings)
    fpquant.export(folder / "q", folder / "plain", dtype="float32")
    return folder / "q", folder / "plain"


def with_lora(directory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, adapters).train()


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_gradients_are_those_through_the_dequantized_weight(directories):
    ids = torch.randint(2, 250, (2, 32), generator=torch.Generator().manual_seed(1))
    quantized, plain = (with_lora(directory) for directory in directories)
    for model in (quantized, plain):
        model(input_ids=ids, labels=ids).loss.backward()
    expected = trained(plain)
    assert trained(quantized).keys() == expected.keys() and len(expected) > 0
    for name, parameter in trained(quantized).items():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


def test_twenty_steps_lower_the_loss_and_leave_the_codes_alone(directories):
    ids = torch.randint(2, 250, (2, 32), generator=torch.Generator().manual_seed(1))
    model = with_lora(directories[0])
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not p.requires_grad)
