from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memprec import TraceError, estimate_memory
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from tests.memory.small_mlp import DEVICES, IN, OUT, X, mlp, sgd, total


class Rich(nn.Module):
    """A module with a bit of everything that a trace could spoil."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IN, OUT), nn.BatchNorm1d(OUT), nn.Dropout(0.5))
        self.frozen = nn.Linear(2, 2).requires_grad_(False).eval()
        self.generator = torch.Generator().manual_seed(0)
        self.rng = np.random.default_rng(0)
        self.counts = {"calls": 0, "outputs": []}
        self.handle = self.net.register_forward_hook(lambda module, args, out: out * 1)

    def forward(self, x):
        self.counts["calls"] += 1
        self.counts["outputs"].append(self.net(x))
        self.net.eval()
        noise = torch.rand(x.shape, generator=self.generator, device=x.device) + torch.rand_like(x)
        scale = random.random() + np.random.rand() + self.rng.random()
        self.train()
        self.net.requires_grad_(True)
        self.extra = noise
        return self.net(x + noise * scale).sum()


def snapshot(module):
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in module.named_parameters()},
        "requires_grad": {k: p.requires_grad for k, p in module.named_parameters()},
        "ids": [id(p) for p in module.parameters()],
        "pointers": [p.data_ptr() for p in module.parameters()],
        "training": [m.training for m in module.modules()],
        "hooks": [
            len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks)
            for m in module.modules()
        ],
        "attributes": sorted(vars(module)),
        "generator": module.generator.get_state(),
        "numpy": str(module.rng.bit_generator.state),
        "counts": (module.counts["calls"], len(module.counts["outputs"])),
    }


def global_state():
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "gc": gc.isenabled(),
        "modes": (len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "autocast_dtype": (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
        "functions": [torch.cuda.synchronize, torch.cuda.get_device_capability, torch.is_autocast_enabled],
        "init": torch.autocast.__init__,
        "deepcopy": (torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__),
        "global_hooks": (
            len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
        ),
        "foreach": torch.utils._foreach_utils._get_foreach_kernels_supported_devices,
        "included": torch._C._dispatch_tls_local_include_set().__str__(),
    }  # fmt: skip


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, dict):
            assert_same(value, after[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, after[key]), key
        else:
            assert value == after[key], key


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed", "bf16-master"])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_of_the_users_changes(device, precision):
    module, batch = Rich(), X.clone()
    module(batch).backward()
    module.counts["outputs"].clear()
    before, before_global = snapshot(module), global_state()
    estimate_memory(
        module, batch, optimizer=torch.optim.Adam, precision=precision, device=device, gradient_clip_val=1.0
    )
    assert_same(before, snapshot(module))
    assert_same(before_global, global_state())
    assert torch.equal(batch, X)


@pytest.mark.parametrize(
    "move", [lambda m, d: m.to(d), lambda m, d: m.to(device=d, dtype=torch.float64), lambda m, d: m]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_module_that_the_step_finds_outside_stays_real(device, move):
    teacher = nn.Sequential(nn.Linear(IN, OUT), nn.BatchNorm1d(OUT))
    teacher(X).sum().backward()
    teacher.eval()
    before = {k: v.clone() for k, v in teacher.state_dict().items()}
    tensors = [*teacher.parameters(), *teacher.buffers()]
    gradients = [p.grad.clone() for p in teacher.parameters()]

    def loss(module, batch):
        with torch.no_grad():
            target = move(teacher, batch.device)(batch.to(next(teacher.parameters()).dtype))
        return (module(batch) - target).pow(2).sum()

    estimate_memory(mlp(), X, loss=loss, optimizer=sgd, device=device)
    after = teacher.state_dict()
    assert all(
        torch.equal(value, after[key]) and value.dtype == after[key].dtype for key, value in before.items()
    )
    assert all(a is b for a, b in zip(tensors, [*teacher.parameters(), *teacher.buffers()], strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(teacher.parameters(), gradients, strict=True))


class Stop(Exception):
    pass


def raising(where):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(IN, OUT)
            self.generator = torch.Generator()
            self.rng = np.random.default_rng()
            self.counts = {"calls": 0, "outputs": []}

        def forward(self, x):
            torch.rand(3), random.random(), np.random.rand()
            with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.no_grad():
                if where == "forward":
                    raise Stop("in forward")
            out = self.net(x).sum()
            if where == "backward":
                out.register_hook(self.stop)
            if where == "item":
                float(out)
            return out

        def stop(self, grad):
            raise Stop("in backward")

    return Raises()


@pytest.mark.parametrize("where", ["forward", "backward", "item", "optimizer", "build"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_error_inside_a_trace_leaves_nothing_behind(device, where):
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise Stop("in step")

    def build():
        raise Stop("in build")

    module = build if where == "build" else raising(where)
    optimizer = Optimizer if where == "optimizer" else sgd
    before = None if where == "build" else snapshot(module)
    before_global = global_state()
    with pytest.raises(TraceError) as caught:
        estimate_memory(module, X, optimizer=optimizer, device=device, precision="bf16-true")
    if where != "item":
        assert "because it raised Stop at " + __file__ in str(caught.value)
        assert isinstance(caught.value.__cause__, Stop)
    if before:
        assert_same(before, snapshot(module))
    assert_same(before_global, global_state())


def test_the_collector_stays_off_where_the_user_turned_it_off():
    gc.disable()
    try:
        estimate_memory(mlp(), X, loss=total, device="cpu")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_traces_do_not_pile_up_in_memory():
    def run():
        estimate_memory(
            mlp(), X, loss=total, optimizer=torch.optim.Adam, device="cuda", precision="bf16-mixed"
        )
        gc.collect()
        return sum(1 for item in gc.get_objects() if issubclass(type(item), (torch.Tensor, nn.Module)))

    run()
    first = run()
    assert [run() for _ in range(3)] == [first] * 3


def test_a_large_module_takes_no_memory():
    import resource

    def build():
        return nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(8)])  # 8 GiB in float32

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate = estimate_memory(
        build, torch.empty(4, 16384, device="meta"), loss=total, optimizer=torch.optim.Adam
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert estimate.breakdown.parameters_bytes == 8 * 1024**3
    assert grown < 200 * 1024**2


@pytest.mark.parametrize("device", DEVICES)
def test_two_traces_of_one_plan_are_identical(device):
    plan = TrainingPlan(
        module=Rich(),
        batch=X,
        optimizer=torch.optim.Adam,
        device=device,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
    )
    first, second = estimate_plan(plan), estimate_plan(plan)
    assert first == second
    assert first.events.order == second.events.order


TEACHER = nn.Linear(IN, OUT)


class Averaging(nn.Module):
    """Keeps an average of its weights in a module that is not its own."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(IN, OUT)

    def forward(self, x):
        Averaging.calls += 1
        with torch.no_grad():
            for kept, new in zip(TEACHER.parameters(), self.net.parameters(), strict=True):
                kept.mul_(0.9).add_(new.to(kept.device), alpha=0.1)
        return self.net(x)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_and_classes_outside_the_module_stay_as_they_are(device):
    before = {name: value.clone() for name, value in TEACHER.state_dict().items()}
    estimate_memory(Averaging(), X, optimizer=sgd, device=device)
    torch.testing.assert_close(TEACHER.state_dict(), before, rtol=0, atol=0)
    assert Averaging.calls == 0
