"""State layouts out of the ordinary, byte for byte beside those of a real step on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.optimizer_overrides import unchanged_overrides
from tests.memory.test_optimizers import square, state_bytes, traced_state_bytes


class Projected(torch.optim.Optimizer):
    """Adam whose moments lie in a space of low rank, as in GaLore (arXiv 2403.03507)."""

    def __init__(self, params, rank=4):
        super().__init__(params, {"lr": 1e-3, "rank": rank})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], group["rank"])
        return loss

    def _update(self, p, lr, rank):
        state, grad = self.state[p], p.grad
        if p.ndim == 2:
            if not state:
                # `full_matrices=False` still makes min(m, n) vectors: the state keeps a copy of `rank` of them.
                state["basis"] = torch.linalg.svd(grad, full_matrices=False)[2][:rank].clone()
            grad = grad @ state["basis"].T
        for name, value in (("mean", grad), ("square", grad * grad)):
            state.setdefault(name, torch.zeros_like(value)).lerp_(value, 0.1)
        update = state["mean"] / (state["square"].sqrt() + 1e-8)
        p.sub_(update @ state["basis"] if p.ndim == 2 else update, alpha=lr)


class Preconditioned(torch.optim.Optimizer):
    """A statistic and a root for each dimension, as in Shampoo (arXiv 1802.09568)."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state, update = self.state[p], p.grad
            for dim, size in enumerate(p.shape):
                flat = p.grad.movedim(dim, 0).reshape(size, -1)
                statistic = state.setdefault(f"statistic_{dim}", 1e-4 * torch.eye(size, device=p.device))
                statistic.addmm_(flat, flat.T)
                values, vectors = torch.linalg.eigh(statistic)
                state[f"root_{dim}"] = (vectors * values.pow(-1 / (2 * p.ndim))) @ vectors.T
                update = torch.tensordot(state[f"root_{dim}"], update.movedim(dim, 0), 1).movedim(0, dim)
            p.sub_(update, alpha=self.param_groups[0]["lr"])
        return loss


def real_state_bytes(optimizer, module, batch):
    # Without a closure: `transformers.Adafactor` calls one where gradients are off.
    for _ in range(2):
        optimizer.zero_grad()
        square(module, batch).backward()
        optimizer.step()
    return state_bytes(optimizer)


def network():
    # One matrix above bitsandbytes' `min_8bit_size` of 4096 and one below, with a last block that is not full.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 65), nn.Tanh(), nn.Linear(65, 8)), torch.randn(4, 128)


def bitsandbytes(name, **options):
    def make(params):
        library = pytest.importorskip("bitsandbytes")
        return getattr(library.optim, name)(params, lr=1e-3, **options)

    return make


def transformers_adafactor(params, **options):
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(params, **options)


more = pytest.mark.extended
CASES = [
    pytest.param(torch.optim.Adafactor, id="Adafactor"),
    pytest.param(transformers_adafactor, id="transformers-Adafactor"),
    pytest.param(
        partial(transformers_adafactor, beta1=0.9, relative_step=False, lr=1e-3),
        id="transformers-Adafactor-beta1",
        marks=more,
    ),
    pytest.param(bitsandbytes("AdamW8bit"), id="AdamW8bit"),
    pytest.param(bitsandbytes("AdamW8bit", min_8bit_size=16), id="AdamW8bit-min"),
    pytest.param(bitsandbytes("Adam8bit"), id="Adam8bit", marks=more),
    pytest.param(bitsandbytes("Lion8bit"), id="Lion8bit"),
    pytest.param(bitsandbytes("SGD8bit", momentum=0.9), id="SGD8bit"),
    pytest.param(bitsandbytes("RMSprop8bit"), id="RMSprop8bit", marks=more),
    pytest.param(bitsandbytes("Adagrad8bit"), id="Adagrad8bit", marks=more),
    pytest.param(bitsandbytes("AdEMAMix8bit"), id="AdEMAMix8bit"),
    pytest.param(bitsandbytes("AdEMAMix"), id="AdEMAMix", marks=more),
    pytest.param(bitsandbytes("LAMB"), id="LAMB"),
    pytest.param(bitsandbytes("LAMB8bit"), id="LAMB8bit", marks=more),
    pytest.param(bitsandbytes("LARS", momentum=0.9), id="LARS"),
    pytest.param(bitsandbytes("LARS8bit", momentum=0.9), id="LARS8bit", marks=more),
    pytest.param(Projected, id="projected"),
    pytest.param(Preconditioned, id="preconditioned"),
]


@pytest.mark.parametrize("make", CASES)
def test_states_equal_those_of_a_real_step(make):
    module, batch = network()
    traced = traced_state_bytes(make, module, batch)
    assert traced == real_state_bytes(make(module.parameters()), module, batch)


def test_muon_keeps_one_moment_of_matrices():
    torch.manual_seed(0)
    module, batch = nn.Linear(24, 16, bias=False), torch.randn(4, 24)
    traced = traced_state_bytes(torch.optim.Muon, module, batch)
    assert traced == real_state_bytes(torch.optim.Muon(module.parameters()), module, batch) == 4 * 24 * 16


@pytest.fixture
def library():
    """bitsandbytes; what a real step files for every later optimizer is put back."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with unchanged_overrides():
        yield bitsandbytes


def test_embeddings_that_bitsandbytes_overrides_keep_32_bit_states(library):
    torch.manual_seed(0)
    module, batch = library.nn.StableEmbedding(128, 64), torch.randint(128, (4, 8))
    traced = traced_state_bytes(library.optim.AdamW8bit, module, batch)
    assert traced == real_state_bytes(library.optim.AdamW8bit(module.parameters()), module, batch)
    assert traced >= 2 * 4 * 128 * 64


def test_a_trace_leaves_the_overrides_of_bitsandbytes_alone(library):
    manager = library.optim.GlobalOptimManager.get_instance()
    module, batch = library.nn.StableEmbedding(128, 64), torch.randint(128, (4, 8))
    before = dict(manager.index2config), list(manager.module_weight_config_triple)
    traced_state_bytes(library.optim.AdamW8bit, module, batch)
    assert (manager.index2config, manager.module_weight_config_triple) == before


def test_a_norm_that_an_operator_takes_as_a_number_is_told():
    module, batch = network()
    estimate = estimate_memory(module, batch, optimizer=bitsandbytes("LAMB"), loss=square, device="cpu")
    assert any("`LAMB` reads norms" in assumption.text for assumption in estimate.assumptions)
