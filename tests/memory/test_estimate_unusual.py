"""Code that is unusual but real: beside a real run, and with nothing of the user's changed."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memprec import estimate_memory
from tests.memory.small_lightning import BATCH, DEVICES, HIDDEN, IN, OUT, X, module_with, run_for_real


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


def gradient_penalty(self, batch):
    batch = batch.detach().requires_grad_()
    out = self.net(batch).sum()
    (grad,) = torch.autograd.grad(out, batch, create_graph=True)
    return out + ((grad.norm(2, dim=1) - 1) ** 2).mean()


def retain_graph(self, batch):
    loss = self.net(batch).sum()
    torch.autograd.grad(loss, self.net[0].weight, retain_graph=True)
    return loss


def without_gradient(self, batch):
    with torch.no_grad():
        target = self.net(batch)
    with torch.inference_mode():
        self.net(batch)
    return (self.net(batch) - target).pow(2).sum()


def functional(self, batch):
    parameters = dict(self.net.named_parameters())

    def loss(parameters, batch):
        return torch.func.functional_call(self.net, parameters, (batch,)).sum()

    gradients = torch.func.grad(loss)(parameters, batch)
    return loss(parameters, batch) + sum(g.sum() for g in gradients.values())


def per_sample_gradients(self, batch):
    parameters = {k: v.detach() for k, v in self.net.named_parameters()}

    def loss(parameters, sample):
        return torch.func.functional_call(self.net, parameters, (sample[None],)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    return self.net(batch).sum() + 0 * sum(g.sum() for g in gradients.values())


def variational(self, batch):
    out = self.net(batch)
    mean, scale = out[:, :2], F.softplus(out[:, 2:])
    posterior = torch.distributions.Normal(mean, scale)
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(scale))
    return posterior.rsample().sum() + torch.distributions.kl_divergence(posterior, prior).sum()


def policy_gradient(self, batch):
    policy = torch.distributions.Categorical(logits=self.net(batch))
    return -policy.log_prob(policy.sample()).mean() - policy.entropy().mean()


def mixup(self, batch):
    share = float(np.random.beta(1.0, 1.0))
    other = torch.distributions.Beta(1.0, 1.0).sample().item()
    return self.net(share * batch + other * batch.flip(0)).sum()


def saved_tensors_hooks(self, batch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return self.net(batch).sum()


def checkpoint_with_dropout(self, batch):
    def block(x):
        return F.dropout(self.net(F.dropout(x, 0.3)), 0.3)

    return torch.utils.checkpoint.checkpoint(block, batch, use_reentrant=False, preserve_rng_state=True).sum()


STEPS = {
    "autograd_function": lambda self, batch: self.net(Sign.apply(batch * self.net[0].weight.mean())).sum(),
    "gradient_penalty": gradient_penalty,
    "retain_graph": retain_graph,
    "without_gradient": without_gradient,
    "functional": functional,
    "per_sample_gradients": per_sample_gradients,
    "vmap": lambda self, batch: torch.func.vmap(self.net)(batch).sum(),
    "vmap_random": lambda self, batch: torch.func.vmap(
        lambda x: self.net(x + torch.randn_like(x)).sum(), randomness="different"
    )(batch).sum(),
    "variational": variational,
    "policy_gradient": policy_gradient,
    "mixup": mixup,
    "saved_tensors_hooks": saved_tensors_hooks,
    "checkpoint_with_dropout": checkpoint_with_dropout,
    "numpy": lambda self, batch: self.net(
        batch + torch.from_numpy(np.random.rand(*batch.shape).astype("float32")).to(batch.device)
    ).sum(),
    "rows": lambda self, batch: sum(self.net(row).mean() for row in batch[:3]),
    "complex": lambda self, batch: torch.fft.fft(self.net(batch)).abs().sum(),
    "einsum": lambda self, batch: torch.einsum("bi,bj->ij", self.net(batch), batch).sum(),
    "sort": lambda self, batch: self.net(batch).topk(2).values.sum() + self.net(batch).sort().values.sum(),
    "svd": lambda self, batch: torch.linalg.svd(self.net(batch)[:4, :4])[1].sum(),
    "multinomial": lambda self, batch: self.net(batch)[torch.multinomial(batch.softmax(-1)[0], 3)].sum(),
    "copy": lambda self, batch: [copy.deepcopy(self.net), self.net(batch).sum()][1],
    "state_dict": lambda self, batch: [
        self.net.load_state_dict(self.net.state_dict()),
        self.net(batch).sum(),
    ][1],
    "freeze_in_step": lambda self, batch: [self.net[0].requires_grad_(False), self.net(batch).sum()][1],
    "evaluation_mode": lambda self, batch: [self.eval(), self.net(batch).sum()][1],
    "seed": lambda self, batch: [torch.manual_seed(3), self.net(batch).sum()][1],
    "nan_to_num": lambda self, batch: torch.nan_to_num(self.net(batch)).sum(),
    "clamp_by_known": lambda self, batch: self.net(batch).clamp(max=float(batch.max())).sum(),
}


# Wrappers of `torch.func` hold the gradient of one weight and one output longer than the trace shows.
HELD_LONGER = {"functional": 4 * HIDDEN * OUT + 4 * BATCH * OUT}


def peak_of_live_tensors(module, batch):
    from tests.memory.zoo.reference import peak_of, storage_bytes

    start = storage_bytes([*module.parameters(), *module.buffers(), batch])
    return start + peak_of(lambda: run_for_real(module, batch))


@pytest.mark.parametrize("name", STEPS)
def test_unusual_steps_need_what_a_real_run_needs(name):
    def training_step(self, batch, batch_idx):
        return STEPS[name](self, batch)

    estimate = estimate_memory(module_with(training_step=training_step), X, device="cpu")
    real = peak_of_live_tensors(module_with(training_step=training_step), X)
    # A Trainer keeps a few kilobytes of its own, such as the state of the random generator.
    excess = estimate.peak_allocated_bytes - real
    assert -8192 - HELD_LONGER.get(name, 0) <= excess <= 0.01 * real


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_unusual_steps_are_traced_for_cuda(step):
    module = module_with(training_step=lambda self, batch, batch_idx: step(self, batch))
    random_state = torch.get_rng_state()
    estimate_memory(module, X, device="cuda")
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert module.training


def build_parametrized(self):
    self.net[0] = torch.nn.utils.parametrizations.weight_norm(self.net[0])
    self.net[2] = torch.nn.utils.parametrizations.spectral_norm(self.net[2])


def build_pruned(self):
    torch.nn.utils.prune.random_unstructured(self.net[0], "weight", 0.5)


def build_hooks(self):
    self.seen = {}
    self.net[0].register_forward_hook(lambda module, args, out: self.seen.update(out=out))
    self.net[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    self.net[2].register_full_backward_pre_hook(lambda module, grad_out: None)
    self.net[2].register_forward_pre_hook(lambda module, args: (args[0] + 0,))


def build_closure(self):
    self.scale = nn.Parameter(torch.ones(1))
    net = self.net
    self.net = nn.Identity()
    self.inner = net
    self.forward_net = lambda x: net(x) * self.scale
    self.net.forward = lambda x: self.forward_net(x)


def build_lock(self):
    self.lock = threading.Lock()


def build_generator(self):
    self.generator = torch.Generator().manual_seed(0)


def build_average(self):
    self.average = torch.optim.swa_utils.AveragedModel(self.net)


def build_compiled(self):
    self.net = torch.compile(self.net)


def build_data_parallel(self):
    self.net = nn.DataParallel(self.net)


def build_lazy(self):
    self.net = nn.Sequential(nn.LazyLinear(HIDDEN), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(OUT))


BUILDS = {
    f.__name__.removeprefix("build_"): f
    for f in (
        build_parametrized, build_pruned, build_hooks, build_closure, build_lock, build_generator, build_average,
        build_compiled, build_data_parallel,
    )
}  # fmt: skip


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("device", DEVICES)
def test_unusual_modules_are_traced_and_untouched(build, device):
    module = module_with(build=build)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    estimate = estimate_memory(module, X, device=device)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert estimate.trainable_parameters == sum(module.get_parameter(name).numel() for name in trainable)
    assert {s.owner for s in estimate.events.storages if s.category == "gradients"} == {
        name for name in trainable if not name.startswith("average.")
    }
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_lazy_modules_get_their_parameters_in_the_trace_alone(device):
    module = module_with(build=build_lazy)
    estimate = estimate_memory(module, X, device=device)
    built = module_with(build=build_lazy)
    built.net(X)
    assert estimate.total_parameters == sum(p.numel() for p in built.parameters())
    assert {s.owner for s in estimate.events.storages if s.category == "parameters"} == {
        name for name, _ in built.named_parameters()
    }
    assert isinstance(module.net[0].weight, nn.parameter.UninitializedParameter)


def test_an_average_of_the_weights_is_counted_as_parameters():
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)

    estimate = estimate_memory(
        module_with(build=build_average, on_train_batch_end=on_train_batch_end), X, device="cpu"
    )
    assert estimate.breakdown.parameters_bytes == 2 * 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)


def test_an_optimizer_that_steps_in_backward_frees_its_gradients():
    def build(in_backward):
        def build(self):
            self.automatic_optimization = False
            self.inner = {p: torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()}

            def step(parameter):
                self.inner[parameter].step()
                self.inner[parameter].zero_grad()

            for parameter in self.net.parameters() if in_backward else ():
                parameter.register_post_accumulate_grad_hook(step)

        return build

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(batch).sum())

    left = []
    for in_backward in (False, True):
        module = module_with(
            build=build(in_backward), training_step=training_step, configure_optimizers=lambda self: None
        )
        estimate = estimate_memory(module, X, device="cpu", steps=2)
        second_forward = next(p for p in estimate.phases if (p.name, p.step) == ("forward", 1))
        left.append(second_forward.peak_allocated_bytes)
        assert all(p.grad is None for p in module.parameters())
        assert not any(optimizer.state for optimizer in module.inner.values())
    assert left[0] - left[1] == 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)


def test_tensors_offloaded_to_the_host_do_not_count():
    def training_step(self, batch, batch_idx):
        with torch.autograd.graph.save_on_cpu():
            hidden = [self.net[0](batch)]
            for _ in range(8):
                hidden.append(hidden[-1].exp())
            return self.net[2](hidden[-1]).sum()

    def kept(self, batch, batch_idx):
        hidden = self.net[0](batch)
        for _ in range(8):
            hidden = hidden.exp()
        return self.net[2](hidden).sum()

    large = torch.randn(2048, IN)
    offloaded = estimate_memory(module_with(training_step=training_step), large, device="cuda")
    on_device = estimate_memory(module_with(training_step=kept), large, device="cuda")
    assert offloaded.peak_allocated_bytes > 0
    assert on_device.breakdown.activations_bytes >= 8 * 2048 * HIDDEN * 4
