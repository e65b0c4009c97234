"""Host memory and the size of checkpoints, beside what a real Trainer writes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.host import checkpoint_file_bytes
from tests.memory.small_lightning import DEVICES, IN, X, module_with, run_for_real

WIDTH = 256


def wide(optimizer=torch.optim.AdamW, **methods):
    def build(self):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(IN, WIDTH), nn.BatchNorm1d(WIDTH), *layers, nn.Linear(WIDTH, 4))
        self.tied = nn.Linear(WIDTH, 4, bias=False)
        self.tied.weight = self.net[-1].weight
        self.register_buffer("not_saved", torch.zeros(1000), persistent=False)

    def configure_optimizers(self):
        return optimizer(self.parameters())

    return module_with(build=build, configure_optimizers=configure_optimizers, **methods)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.SGD, momentum], ids=lambda o: o.__name__
)
def test_file_has_the_size_of_a_real_checkpoint(tmp_path, optimizer, precision):
    trainer = run_for_real(wide(optimizer), X, precision=precision)
    host = estimate_memory(wide(optimizer), X, device="cpu", precision=precision).host
    for weights_only, estimated in ((False, host.checkpoint_bytes), (True, host.weights_only_bytes)):
        trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
        assert estimated == pytest.approx((tmp_path / "a.ckpt").stat().st_size, rel=0.01)


@pytest.mark.parametrize("tensors", [1, 100, 1000])
def test_file_size_counts_every_storage(tmp_path, tensors):
    torch.save({f"layer.{i}.weight": torch.zeros(4096) for i in range(tensors)}, tmp_path / "file")
    real = (tmp_path / "file").stat().st_size
    # The state of Lightning's loops is missing here.
    assert checkpoint_file_bytes([4 * 4096] * tensors) == pytest.approx(real, rel=0.01, abs=1500)


@pytest.mark.parametrize("device", DEVICES)
def test_masters_stand_in_for_half_weights(device):
    full = estimate_memory(wide(), X, device=device, precision="32-true").host
    master = estimate_memory(wide(), X, device=device, precision="bf16-master").host
    half = estimate_memory(wide(), X, device=device, precision="bf16-true").host
    # Modules with running statistics are not cast, and of all other weights the masters are saved.
    assert master.weights_only_bytes == full.weights_only_bytes
    assert half.weights_only_bytes < 0.6 * full.weights_only_bytes
    assert full.setup_bytes == master.setup_bytes == half.setup_bytes


def test_host_holds_weights_file_and_contents():
    host = estimate_memory(wide(), X, device="cuda", num_devices=4).host
    module = wide()
    weights = sum(p.numel() * 4 for p in module.parameters())
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    assert host.setup_bytes == weights + buffers
    # The largest storage is copied from the device beside the buffer with the file.
    assert host.save_bytes == host.checkpoint_bytes + 4 * WIDTH * WIDTH
    states = 2 * weights + 4 * len(list(module.parameters()))
    assert host.resume_bytes == host.setup_bytes + (weights + buffers - 4 * 1000) + states
    assert host.ranks_per_node == 4
    assert host.peak_bytes == 4 * host.resume_bytes
    assert dataclasses.replace(host, ranks_per_node=1, save_bytes=10**12).peak_bytes == 10**12


def test_on_a_cpu_nothing_is_copied():
    host = estimate_memory(wide(), X, device="cpu").host
    assert host.save_bytes == host.checkpoint_bytes


def test_state_dict_of_the_module_counts():
    def state_dict(self, *args, **kwargs):
        return {"head": self.net[-1].weight.detach().clone()}

    estimate = estimate_memory(wide(state_dict=state_dict), X, device="cpu")
    assert estimate.host.weights_only_bytes == checkpoint_file_bytes([4 * 4 * WIDTH])
    saving = next(p for p in estimate.phases if p.name == "checkpoint_save").peak_allocated_bytes
    plain = next(p for p in estimate_memory(wide(), X, device="cpu").phases if p.name == "checkpoint_save")
    assert saving == plain.peak_allocated_bytes + 4 * 4 * WIDTH  # the copy lives while the file is written


def test_state_dict_that_fails_is_noted():
    def state_dict(self, *args, **kwargs):
        raise OSError("gone")

    estimate = estimate_memory(wide(state_dict=state_dict), X, device="cpu")
    assert estimate.host is None
    assert any(a.name == "checkpoint" and "gone" in a.text for a in estimate.assumptions)
    assert estimate.to_dict()["host"] is None


def test_hook_that_may_write_files_is_not_run():
    def on_save_checkpoint(self, checkpoint):
        raise AssertionError

    assert estimate_memory(wide(on_save_checkpoint=on_save_checkpoint), X, device="cpu").host is not None


def test_resume_holds_the_states_before_the_first_step():
    phases = {p.name: p.peak_allocated_bytes for p in estimate_memory(wide(), X, device="cpu").phases}
    states = 2 * sum(p.numel() * 4 for p in wide().parameters()) + 4 * len(list(wide().parameters()))
    assert phases["resume"] == phases["setup"] + states
    stateless = estimate_memory(wide(torch.optim.SGD), X, device="cpu")
    assert "resume" not in {p.name for p in stateless.phases}


def test_lazy_parameters_are_no_fault():
    def build(self):
        self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    host = estimate_memory(module_with(build=build), X, device="cpu").host
    # They are made in the first forward pass, so the host never holds them before.
    assert host.setup_bytes == 4 * (4 * WIDTH + 4)
    assert host.weights_only_bytes > 4 * (IN * WIDTH + WIDTH + 4 * WIDTH)


def test_states_that_have_no_storage_are_noted():
    class Odd(torch.Tensor):
        def untyped_storage(self):
            raise NotImplementedError("no storage")

    def state_dict(self, *args, **kwargs):
        return {"weight": self.net[0].weight.detach().as_subclass(Odd)}

    estimate = estimate_memory(wide(state_dict=state_dict), X, device="cpu")
    assert estimate.host is None
    assert any("no storage" in a.text for a in estimate.assumptions)
