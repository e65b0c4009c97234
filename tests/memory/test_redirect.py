from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.redirect import no_device_calls

DEVICES = ["cpu", "cuda"]

# Ways to make or move a tensor in a training step; each has to give a tensor of the traced device.
MAKE = {
    "to_text": lambda x: torch.ones(3).to("cuda"),
    "to_indexed": lambda x: torch.ones(3).to("cuda:0", torch.float16, non_blocking=True),
    "to_keyword": lambda x: torch.ones(3).to(device="cuda"),
    "to_other": lambda x: torch.ones(3).to(x),
    "to_device": lambda x: torch.ones(3).to(x.device),
    "cuda": lambda x: torch.ones(3).cuda(),
    "cuda_index": lambda x: torch.ones(3).cuda(0, non_blocking=True),
    "type_as": lambda x: torch.ones(3).type_as(x),
    "zeros": lambda x: torch.zeros(3, device="cuda"),
    "zeros_device": lambda x: torch.zeros(3, device=x.device),
    "zeros_index": lambda x: torch.zeros(3, device=0),
    "zeros_get_device": lambda x: torch.zeros(3, device=x.get_device()),
    "zeros_text_of_device": lambda x: torch.zeros(3, device=str(x.device)),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0], device=x.device),
    "arange": lambda x: torch.arange(4, device=x.device),
    "rand": lambda x: torch.rand(4, device=x.device),
    "randint": lambda x: torch.randint(4, (3,), device=x.device),
    "rand_generator": lambda x: torch.rand(4, generator=torch.Generator(), device=x.device),
    "randn_like": lambda x: torch.randn_like(x),
    "ones_like_device": lambda x: torch.ones_like(torch.ones(3), device=x.device),
    "new_zeros": lambda x: x.new_zeros(3),
    "new_full": lambda x: x.new_full((3,), 1.0),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "new_empty": lambda x: x.new_empty(3),
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "copy_into": lambda x: torch.zeros(3, device=x.device).copy_(torch.ones(3)),
    "mixed": lambda x: x[0, 0] * torch.tensor(2.0),
    "module": lambda x: nn.Linear(2, 2).to(x.device).weight,
    "module_cuda": lambda x: nn.Linear(2, 2).cuda().weight,
    "context": lambda x: _under_device(x.device, lambda: torch.zeros(3)),
    "numpy": lambda x: torch.from_numpy(torch.ones(3).numpy()).to(x.device),
}


def _under_device(device, make):
    with torch.device(device):
        return make()


def trace(step, device):
    """Run ``step`` on the batch inside a trace, once, and return what it gave."""
    seen = []

    def loss(module, batch):
        seen.append(step(batch))
        return module.weight.sum()

    estimate_memory(nn.Linear(1, 1), torch.ones(2, 3), loss=loss, device=device, steps=1)
    return seen[0]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_user_code_puts_on_the_device_is_traced(make):
    def step(batch):
        made = make(batch)
        assert made.is_cuda
        assert not made.is_cpu
        assert made.device == torch.device("cuda", 0)
        assert made.device.type == "cuda"
        return made.is_meta

    assert trace(step, "cuda")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(3),
        lambda x: torch.zeros(3, device="cpu"),
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_tensor([1.0]),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.rand(3, generator=torch.Generator()),
        lambda x: nn.Linear(2, 2).weight,
    ],
)
def test_on_the_cpu_every_tensor_is_traced(make):
    def step(batch):
        made = make(batch)
        assert made.device == torch.device("cpu")
        assert made.is_cpu
        assert not made.is_cuda
        return made.is_meta

    assert trace(step, "cpu")


def test_tensors_without_a_device_stay_on_the_host_of_a_cuda_run():
    def step(batch):
        host = torch.ones(3)
        return host.device.type, host.is_meta, batch.cpu().is_meta

    assert trace(step, "cuda") == ("cpu", False, False)


def test_a_default_device_set_outside_is_respected():
    module, batch, seen = nn.Linear(1, 1), torch.ones(2, 3), []

    def loss(module, batch):
        seen.append(torch.zeros(3).is_meta)
        return module.weight.sum()

    with torch.device("cuda", 0):
        estimate_memory(module, batch, loss=loss, device="cuda", steps=1)
    assert seen == [True]


@pytest.mark.parametrize("device", DEVICES)
def test_text_of_an_unknown_number_is_written_and_of_a_known_one_is_right(device):
    weights = []

    def step(batch):
        weights.append(f"{(batch.sum() * torch.empty(1, device='meta')[0]):.2f}")
        return f"{batch.sum():.1f} {batch.sum():>6.0f}", str(batch.shape)

    assert trace(step, device) == ("6.0      6", "torch.Size([2, 3])")
    assert weights == ["nan"]


@pytest.mark.parametrize("device", DEVICES)
def test_printing_a_tensor_does_not_stop_the_trace(device):
    def loss(module, batch):
        out = module(batch).sum()
        assert repr(out)
        assert f"{out}"
        return out

    estimate_memory(nn.Linear(3, 1), torch.ones(2, 3), loss=loss, device=device)


def test_steering_calls_do_nothing_and_come_back():
    names = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "current_device")
    before = [getattr(torch.cuda, name) for name in (*names, "get_device_capability")]

    def step(batch):
        torch.cuda.synchronize()
        torch.cuda.synchronize(batch.device)
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)
        assert torch.cuda.is_bf16_supported()
        with torch.cuda.device(0), torch.cuda.device_of(batch):
            torch.zeros(1, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.manual_seed_all(0)
        return torch.cuda.current_device(), torch.cuda.get_device_capability()

    assert trace(step, "cuda") == (0, (8, 0))
    assert [getattr(torch.cuda, name) for name in (*names, "get_device_capability")] == before


def test_seeding_in_a_trace_does_not_wait_for_the_device():
    queued = list(torch.cuda._queued_calls), torch.cuda._lazy_seed_tracker.get_calls()

    def step(batch):
        torch.manual_seed(3)
        torch.cuda.manual_seed(3)
        torch.cuda.manual_seed_all(3)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        return batch.shape

    trace(step, "cuda")
    assert (list(torch.cuda._queued_calls), torch.cuda._lazy_seed_tracker.get_calls()) == queued


def test_steering_calls_come_back_after_an_error():
    before = torch.cuda.synchronize
    with pytest.raises(ZeroDivisionError), no_device_calls((9, 0)):
        torch.cuda.get_device_capability()[1] / 0
    assert torch.cuda.synchronize is before


def test_the_capability_is_that_of_the_named_device():
    seen = []

    def loss(module, batch):
        seen.append(torch.cuda.get_device_capability())
        return module.weight.sum()

    estimate_memory(nn.Linear(1, 1), torch.ones(1), loss=loss, device="H100-80GB", steps=1)
    assert seen == [(9, 0)]
