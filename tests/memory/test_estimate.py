from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprec import estimate_memory
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import PRECISIONS
from tests.memory.small_mlp import BATCH, DEVICES, HIDDEN, IN, NUMEL, OUT, X, mlp, sgd, total


def test_fixed_parts_of_an_mlp_with_adam():
    estimate = estimate_memory(mlp(), X, loss=total, optimizer=torch.optim.Adam, device="cpu")
    parts = estimate.breakdown
    assert estimate.total_parameters == estimate.trainable_parameters == NUMEL
    assert parts.parameters_bytes == 4 * NUMEL
    assert parts.gradients_bytes == 4 * NUMEL
    assert parts.optimizer_states_bytes == 8 * NUMEL + 4 * 4  # and a step count for each of four parameters
    assert parts.inputs_bytes == X.nbytes
    assert parts.total_bytes == estimate.peak_allocated_bytes
    assert parts.fixed_bytes == 16 * NUMEL + 16


def test_peak_of_an_mlp_with_sgd():
    estimate = estimate_memory(mlp(), X, loss=total, optimizer=sgd, device="cpu", steps=2)
    phases = {(p.name, p.step): p.peak_allocated_bytes for p in estimate.phases}
    fixed, inputs = 4 * NUMEL, X.nbytes
    hidden, out = 4 * BATCH * HIDDEN, 4 * BATCH * OUT
    # The highest instant of the forward pass: the hidden layer before and after ReLU. The former then goes.
    assert phases["forward", 0] == fixed + inputs + 2 * hidden
    # The gradients of the first step live through the forward pass of the second, beside its loss of 4 bytes.
    assert phases["forward", 1] >= phases["forward", 0] + fixed
    assert phases["forward", 1] <= phases["forward", 0] + fixed + 8
    assert phases["backward", 0] >= fixed + inputs + hidden + 4 * (HIDDEN * OUT + OUT) + out
    assert estimate.peak_allocated_bytes == max(phases.values())


def test_accumulation_keeps_gradients_and_saves_nothing():
    def peak(**kwargs):
        return estimate_memory(mlp(), X, loss=total, optimizer=sgd, device="cpu", **kwargs)

    once, thrice = peak(), peak(accumulate_grad_batches=3)
    assert thrice.breakdown.parameters_bytes == once.breakdown.parameters_bytes
    assert thrice.peak_allocated_bytes >= once.peak_allocated_bytes
    calls = []
    estimate_memory(
        mlp(), X, loss=lambda m, b: [calls.append(1), total(m, b)][1], optimizer=sgd, device="cpu",
        accumulate_grad_batches=3, steps=2,
    )  # fmt: skip
    assert len(calls) == 6


@pytest.mark.parametrize(("algorithm", "temporaries"), [("norm", True), ("value", False)])
def test_clipping_by_norm_makes_a_norm_for_each_gradient(algorithm, temporaries):
    estimate = estimate_memory(
        mlp(),
        X,
        loss=total,
        optimizer=sgd,
        device="cpu",
        gradient_clip_val=1.0,
        gradient_clip_algorithm=algorithm,
    )
    step = [phase for phase in estimate.phases if phase.name == "optimizer_step"][-1]
    above = step.peak_allocated_bytes - 8 * NUMEL - X.nbytes
    # The loss and its detached copy; four norms, their stack, total, coefficient and clamped coefficient.
    assert (above > 16) == temporaries
    assert above <= 64


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids)).sum()

    estimate = estimate_memory(Tied(), torch.arange(10), optimizer=torch.optim.Adam, device="cpu")
    assert estimate.total_parameters == 1600
    assert estimate.breakdown.parameters_bytes == 6400
    assert estimate.breakdown.optimizer_states_bytes == 2 * 6400 + 4


def test_frozen_parameters_have_no_gradient_and_no_state():
    model = mlp()
    model[0].requires_grad_(False)
    trainable = HIDDEN * OUT + OUT
    estimate = estimate_memory(model, X, loss=total, optimizer=torch.optim.Adam, device="cpu")
    assert estimate.trainable_parameters == trainable
    assert estimate.breakdown.parameters_bytes == 4 * NUMEL
    owned = {s.owner for s in estimate.events.storages if s.category in ("gradients", "optimizer states")}
    assert owned == {"2.weight", "2.bias"}
    assert max(p.peak_allocated_bytes for p in estimate.phases) < 4 * NUMEL + 3 * 4 * trainable + 40_000


def test_buffers_and_non_float_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))
            self.codes = nn.Parameter(torch.zeros(30, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("mask", torch.ones(20, dtype=torch.bool))
            self.register_buffer("scratch", torch.zeros(5), persistent=False)

        def forward(self, x):
            return (self.weight * x).sum()

    estimate = estimate_memory(Model(), torch.ones(50), optimizer=torch.optim.Adam, device="cpu")
    assert estimate.breakdown.parameters_bytes == 200 + 30
    assert estimate.breakdown.buffers_bytes == 20 + 20
    assert (estimate.total_parameters, estimate.trainable_parameters) == (80, 50)


@pytest.mark.parametrize(
    ("precision", "parameter", "gradient", "state"),
    [
        ("32-true", 4, 4, 8),
        ("64-true", 8, 8, 16),
        ("bf16-true", 2, 2, 4),
        ("16-true", 2, 2, 4),
        ("bf16-mixed", 4, 4, 8),
        ("16-mixed", 4, 4, 8),
        ("bf16-master", 2, 4, 12),
        ("16-master", 2, 4, 12),
    ],
)
def test_bytes_a_parameter_by_precision(precision, parameter, gradient, state):
    # Layers so wide that the peak falls where parameters, gradients and states are all there.
    model, batch = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)]), torch.randn(1, 128)
    numel = 4 * 128 * 128
    estimate = estimate_memory(
        model,
        batch,
        loss=total,
        optimizer=lambda p: torch.optim.Adam(p, fused=True),
        precision=precision,
        device="cuda",
    )
    assert estimate.breakdown.parameters_bytes == parameter * numel
    # With masters the peak is in the step, when FP32 gradients have taken the place of the half ones.
    assert estimate.breakdown.gradients_bytes == gradient * numel
    assert 0 <= estimate.breakdown.optimizer_states_bytes - state * numel <= 4 * 512  # the step counts
    assert estimate.precision == precision


def test_precision_leaves_the_users_module_as_it_was():
    for precision in PRECISIONS:
        model = mlp()
        estimate_memory(model, X, loss=total, precision=precision, device="cuda", optimizer=sgd)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_checkpointed_blocks_keep_their_inputs_alone(use_reentrant, device):
    class Blocks(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 32))
                for _ in range(6)
            )
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant) if self.checkpointed else block(x)
            return x.sum()

    batch = torch.randn(1024, 32, requires_grad=True)
    plain, checkpointed = (
        estimate_memory(Blocks(flag), batch, optimizer=sgd, device=device) for flag in (False, True)
    )
    tensor = batch.nbytes

    def forward_peak(estimate):
        # Of tensors alone, in the first step and in all others: cuBLAS' workspaces come and stay.
        peak = max(p.peak_allocated_bytes for p in estimate.phases if p.name == "forward")
        return peak - estimate.breakdown.workspaces_bytes

    def tensors_at_peak(estimate):
        return estimate.breakdown.total_bytes - estimate.breakdown.workspaces_bytes

    # Plain: input, GELU's input, its output (dropout's), and the mask of each block. Checkpointed: the input.
    assert forward_peak(plain) > 6 * 3 * tensor
    assert forward_peak(checkpointed) < (6 + 4) * tensor
    assert tensors_at_peak(checkpointed) < 0.7 * tensors_at_peak(plain)
    assert checkpointed.breakdown.gradients_bytes <= plain.breakdown.gradients_bytes + tensor


def test_retained_outputs_stay_in_memory():
    kept = []

    def leaky(module, batch):
        kept.append(module(batch))
        return kept[-1].sum()

    growth = [
        estimate_memory(mlp(), X, loss=leaky, optimizer=sgd, device="cpu", steps=steps).peak_allocated_bytes
        for steps in (2, 3, 4)
    ]
    kept.clear()
    # What each step retains: its output, and what its graph keeps alive.
    assert growth[2] - growth[1] == growth[1] - growth[0] >= 4 * BATCH * OUT


def test_the_gradient_of_the_input_is_counted():
    batch = X.clone().requires_grad_()
    estimate = estimate_memory(mlp(), batch, loss=total, device="cpu")
    assert batch.grad is None
    plain = estimate_memory(mlp(), X, loss=total, device="cpu")
    assert estimate.peak_allocated_bytes >= plain.peak_allocated_bytes


def test_complex_parameters_and_gradients():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(17, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight).sum()

    estimate = estimate_memory(Spectral(), X, optimizer=torch.optim.Adam, device="cpu")
    weight = [s for s in estimate.events.storages if s.owner == "weight"]
    assert {(s.category, s.size_bytes) for s in weight} >= {
        ("parameters", 136), ("gradients", 136), ("optimizer states", 136)
    }  # fmt: skip


IDS = torch.tensor([1, 7, 7, 30, 30, 30])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_take_an_index_and_a_row_an_entry(accumulate):
    estimate = estimate_memory(
        nn.Embedding(1000, 16, sparse=True), IDS, loss=lambda m, b: (m(b) * 2).sum(), optimizer=sgd, device="cpu",
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    gradients = [s.size_bytes for s in estimate.events.storages if s.category == "gradients"]
    entries = accumulate * len(IDS)
    assert {8 * entries, 4 * 16 * entries} <= set(gradients)
    assert max(gradients) < 1000 * 16 * 4


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SparseAdam,
        torch.optim.Adagrad,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "batch", [IDS, torch.empty(6, dtype=torch.long, device="meta")], ids=["known", "unknown"]
)
def test_optimizers_of_sparse_gradients(optimizer, device, batch):
    embedding = nn.Embedding(1000, 16, sparse=True)
    estimate = estimate_memory(
        embedding, batch, loss=lambda m, b: (m(b) * 2).sum(), optimizer=optimizer, device=device, steps=3
    )
    assert estimate.breakdown.gradients_bytes < 8192
    assert embedding.weight.grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_weights_in_four_bits_take_half_a_byte(device):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantized = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), quantized.to("cpu"))
    codes = quantized.weight.data.clone()
    estimate = estimate_memory(model, torch.randn(2, 64), loss=total, optimizer=sgd, device=device)
    # Weights; then a byte for each block's scale, the 16 values of the format, the 256 of the scales, their own scale
    # and their mean.
    sizes = [64 * 64 * 4, 64 * 64 // 2, 64, 16 * 4, 256 * 4, 4, 4]
    unit = 512 if device == "cuda" else 1
    assert estimate.breakdown.parameters_bytes == sum(-(-size // unit) * unit for size in sizes)
    assert {s.owner for s in estimate.events.storages if s.category == "gradients"} == {"0.weight"}
    assert type(quantized.weight) is bitsandbytes.nn.Params4bit
    assert torch.equal(quantized.weight.data, codes)


def test_a_builder_is_built_without_storage_and_equals_the_built_module():
    built = []

    def build():
        built.append(mlp())
        return built[-1]

    by_builder = estimate_memory(build, X, loss=total, optimizer=sgd, device="cpu")
    assert all(p.is_meta for p in built[0].parameters())
    assert by_builder == estimate_memory(mlp(), X, loss=total, optimizer=sgd, device="cpu")


def test_a_module_already_on_meta_is_traced():
    model = mlp(device="meta")
    assert estimate_memory(model, X, loss=total, optimizer=sgd, device="cpu") == estimate_memory(
        mlp(), X, loss=total, optimizer=sgd, device="cpu"
    )


def test_a_builder_may_read_values_that_it_made():
    class StochasticDepth(nn.Module):
        def __init__(self):
            super().__init__()
            rates = [x.item() for x in torch.linspace(0, 0.5, 4)]
            assert rates[-1] == 0.5
            assert torch.arange(3).tolist() == [0, 1, 2]
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(IN, IN), nn.Dropout(rate)) for rate in rates)
            self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
            nn.init.trunc_normal_(self.layers[0][0].weight, std=0.02)
            nn.init.orthogonal_(self.layers[1][0].weight)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.sum() * self.scale

    estimate = estimate_memory(StochasticDepth, X, loss=lambda m, b: m(b).sum(), optimizer=sgd, device="cpu")
    assert estimate.breakdown.parameters_bytes == 4 * 4 * (IN * IN + IN)
    assert estimate.breakdown.buffers_bytes == 4


def test_prepare_runs_on_the_copy_before_its_precision_is_set():
    seen = []

    def prepare(copy):
        seen.append(copy)
        copy.head = nn.Linear(OUT, 1000)

    model = mlp()
    plan = TrainingPlan(
        module=model, batch=X, loss=total, prepare=prepare, precision="bf16-true", device="cpu"
    )
    estimate = estimate_plan(plan)
    assert estimate.breakdown.parameters_bytes == 2 * (NUMEL + OUT * 1000 + 1000)
    assert seen[0] is not model
    assert not hasattr(model, "head")


def test_random_augmentation_of_the_batch():
    def loss(module, batch):
        keep = torch.rand(len(batch), device=batch.device) < 0.5
        flipped = torch.where(keep[:, None], batch, batch.flip(1))
        shift = int(torch.randint(1, 3, (1,)))
        return module(flipped.roll(shift, 0)[torch.randperm(len(batch), device=batch.device)]).sum()

    for device in DEVICES:
        assert estimate_memory(mlp(), X, loss=loss, device=device).peak_allocated_bytes > 0
