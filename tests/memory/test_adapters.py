"""PEFT's adapters on a small language model: what is trained, and every byte, beside real steps on the CPU."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.memory.estimate import estimate_memory
from tests.memory.peaks import peak_of
from tests.memory.test_optimizers import state_bytes

ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": ATTENTION, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": ATTENTION, "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "prefix, projected": (
        "PrefixTuningConfig",
        {"num_virtual_tokens": 8, "prefix_projection": True, "encoder_hidden_size": 32},
    ),
}


def adapted(name):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    kind, options = CASES[name]
    tokens = torch.randint(64, (4, 48))
    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, adapter).train(), {"input_ids": tokens, "labels": tokens}


def loss_of(model, batch):
    return model(**batch).loss


def bytes_of(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.filterwarnings("ignore")  # Model libraries call what other libraries deprecate.
@pytest.mark.parametrize("name", [*CASES])
def test_an_adapted_model_is_estimated_as_it_trains(name):
    model, batch = adapted(name)
    made = []

    def optimizer_of(parameters):
        made.append(torch.optim.AdamW(parameters))
        return made[0]

    estimate = estimate_memory(model, batch, optimizer=optimizer_of, loss=loss_of, device="cpu")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    held = bytes_of([*model.parameters(), *model.buffers(), *batch.values()])

    def steps():
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    real = held + peak_of(steps)
    assert estimate.trainable_parameters == sum(p.numel() for p in trained)
    assert estimate.total_parameters == sum(p.numel() for p in model.parameters())
    assert estimate.breakdown.parameters_bytes == bytes_of(model.parameters())
    assert state_bytes(made[0], "meta") == state_bytes(optimizer)
    shapes = [p.shape for group in made[0].param_groups for p in group["params"] if p in made[0].state]
    assert shapes == [p.shape for p in trained if p.grad is not None]
    # The promise of the package for a step on the CPU.
    assert estimate.peak_allocated_bytes == pytest.approx(real, rel=0.02)
