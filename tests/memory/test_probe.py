"""The probe: real steps on small batches, held against a full real step, and the module left as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_memprec import estimate_memory
from lightning_memprec._errors import DataDependentError, TraceError
from lightning_memprec.memory.probe import probe_memory
from lightning_memprec.memory.probe_batch import cut
from lightning_memprec.memory.probe_meter import CudaMeter, Phase
from lightning_memprec.memory.probe_restore import parts_of
from lightning_memprec.memory.probe_result import words_of
from tests.memory.zoo import ZOO, Case
from tests.memory.zoo.case import adamw, cross_entropy
from tests.memory.zoo.reference import measure

QUICK = {"mlp_lbfgs", "lstm"}

# Kernels choose their workspaces by the batch: no small one shows those of a large one. Everything else is exact.
# `python -m benchmarks.probe_accuracy` prints all errors.
WORST = 0.03


class Routed(nn.Module):
    """A mixture of experts: how many rows each expert takes, only the values tell."""

    def __init__(self, width=64):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == index).flatten()
            if rows.numel() > 0:
                out = out.index_add(0, rows, expert(x[rows]))
        return self.head(out)


class Pairwise(nn.Module):
    """Compares all samples with all others: memory grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x):
        z = self.net(x)
        return (z @ z.t()).exp().log_softmax(-1)


def routed_batch(n):
    return torch.randn(n, 64), torch.randint(10, (n,))


def routed_case(n=256):
    return Case(name="routed", family="mlp", build=lambda: (Routed(), routed_batch(n)))


def probe_case(case, **options):
    module, batch = case.make()
    return probe_memory(
        module,
        batch,
        optimizer=case.optimizer,
        loss=case.loss,
        precision=case.precision,
        device="cpu",
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
        **options,
    )


# -- against reality ----------------------------------------------------------------------------------------


def _param(case):
    return pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.extended)


@pytest.mark.parametrize("case", [_param(case) for case in ZOO])
def test_extrapolated_peak_is_that_of_the_full_batch(case):
    real = measure(case)
    assert abs(probe_case(case).peak_allocated_bytes / real.peak_bytes - 1) <= WORST


def test_a_model_that_refuses_a_trace_is_measured():
    case = routed_case()
    module, batch = case.make()
    with pytest.raises(DataDependentError):
        estimate_memory(module, batch, optimizer=adamw, loss=cross_entropy, device="cpu")
    # Rows are divided unevenly among experts, and differently for every batch.
    assert probe_case(case).peak_allocated_bytes == pytest.approx(measure(case).peak_bytes, rel=WORST)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_script_module_is_measured():
    module = torch.jit.script(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    case = Case(name="scripted", family="mlp", build=lambda: (module, routed_batch(128)))
    before = copy.deepcopy(module.state_dict())
    estimate = probe_case(case)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert estimate.peak_allocated_bytes == pytest.approx(measure(case).peak_bytes, rel=WORST)


def test_memory_that_grows_with_the_square_of_the_batch_is_followed_or_confessed():
    case = Case(
        name="pairs",
        family="mlp",
        build=lambda: (Pairwise(), torch.randn(512, 16)),
        loss=lambda module, batch: -module(batch).diagonal().mean(),
    )
    estimate = probe_case(case)
    assert estimate.peak_allocated_bytes == pytest.approx(measure(case).peak_bytes, rel=WORST)


def test_parts_are_those_that_a_trace_finds():
    case = next(case for case in ZOO if case.name == "mlp")
    module, batch = case.make()
    traced = estimate_memory(module, batch, optimizer=case.optimizer, loss=case.loss, device="cpu").breakdown
    probed = probe_case(case).breakdown
    for part in (
        "parameters_bytes",
        "buffers_bytes",
        "gradients_bytes",
        "optimizer_states_bytes",
        "inputs_bytes",
    ):
        assert getattr(probed, part) == getattr(traced, part), part
    assert probed.total_bytes == traced.total_bytes


def test_result_says_what_was_measured():
    estimate = probe_case(routed_case(64))
    first = estimate.assumptions[0]
    assert first.name == first.source == "measured"
    assert first.text.startswith("Measured at batch 1, 2")
    assert words_of([1, 2], 64) == "measured at batch 1 and 2, extrapolated to 64"
    assert words_of([1, 2, 4], 4) == "measured at batch 1, 2 and 4"


def test_a_larger_batch_than_the_one_at_hand_can_be_asked_for():
    small = probe_case(routed_case(64), batch_size=256)
    assert small.peak_allocated_bytes == pytest.approx(measure(routed_case(256)).peak_bytes, rel=WORST)


def test_detection_batches_are_cut_by_entries():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(3, 8, 3)

        def forward(self, images, targets):
            boxes = sum(len(target["boxes"]) for target in targets)
            return torch.stack([self.net(image).mean() for image in images]).sum() * boxes

    images = [torch.randn(3, 16, 16 + i) for i in range(32)]
    targets = [{"boxes": torch.zeros(i + 1, 4)} for i in range(32)]
    estimate = probe_memory(Detector(), (images, targets), device="cpu")
    assert estimate.assumptions[0].text.startswith("Measured at batch 1, 2, 4")


def test_batch_norm_that_refuses_one_sample_is_measured_with_two():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    estimate = probe_memory(module, torch.randn(16, 8), device="cpu")
    assert estimate.assumptions[0].text.startswith("Measured at batch 2, 4")


def test_batch_in_words_gets_contents():
    estimate = probe_memory(Routed(), torch.empty(32, 64, device="meta"), device="cpu")
    assert estimate.peak_allocated_bytes > 0


class Allocator:
    """The counters of `torch.cuda`, in steps of bytes."""

    def __init__(self, monkeypatch):
        self.now = self.peak = self.reserved = 0
        for name, function in {
            "empty_cache": lambda: None,
            "memory_allocated": lambda device: self.now,
            "max_memory_allocated": lambda device: self.peak,
            "max_memory_reserved": lambda device: self.reserved,
            "reset_peak_memory_stats": self.reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, device):
        self.peak = self.reserved = self.now

    def take(self, size):
        self.now += size
        self.peak, self.reserved = max(self.peak, self.now), max(self.reserved, self.now + 100)


def test_peaks_of_a_cuda_allocator_are_read_phase_by_phase_without_what_is_not_the_run_s(monkeypatch):
    allocator = Allocator(monkeypatch)
    allocator.take(1000)  # 400 of these are the module's.
    meter = CudaMeter(torch.device("cuda"))
    phases = [Phase("setup", -1), Phase("forward", 0), Phase("backward", 0)]
    meter.start(400)
    allocator.take(50)
    meter.next_phase()
    allocator.take(500)
    allocator.take(-300)
    meter.next_phase()
    meter.stop(phases)
    assert [(p.start_bytes, p.peak_bytes) for p in phases] == [(400, 450), (450, 950), (650, 650)]
    assert phases[1].reserved_bytes == 1050


# -- nothing is left behind ---------------------------------------------------------------------------------


class Busy(pl.LightningModule):
    """A module that changes everything it can reach while it trains."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.tied = self.net[0].weight
        self.running = torch.zeros(3)
        self.history = [torch.ones(2)]
        self.table = {"best": 1.0}
        self.generator = torch.Generator().manual_seed(7)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        x, y = batch
        type(self).calls += 1
        self.count += 1
        self.running.add_(torch.rand(3, generator=self.generator))
        self.history.append(x.detach())
        self.history[0].mul_(2)
        self.table["best"] = random.random() + float(np.random.rand())
        self.frozen.requires_grad_(True)
        self.net[2].eval()
        self.extra = nn.Linear(2, 2)
        self.net[0].register_forward_hook(lambda *args: None)
        self.log("loss", torch.rand(()))
        if float(x.sum()) > 1e9:
            return None
        return nn.functional.cross_entropy(self.frozen(self.net(x)), y)

    def configure_optimizers(self):
        self.net[3].weight.register_post_accumulate_grad_hook(lambda p: p.data.zero_() is None or None)
        self.chosen = torch.optim.AdamW(self.parameters(), lr=0.1)
        return self.chosen


def snapshot(module):
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    extras = {"running": module.running.clone(), "history": module.history[0].clone()}
    modes = [child.training for child in module.modules()]
    flags = [p.requires_grad for p in module.parameters()]
    identities = [id(p) for p in module.parameters()] + [p.data_ptr() for p in module.parameters()]
    names = [sorted(vars(child)) for child in module.modules()]
    hooks = [len(child._forward_hooks) for child in module.modules()]
    tensor_hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    rest = (
        modes,
        flags,
        identities,
        names,
        hooks,
        tensor_hooks,
        len(module.history),
        dict(module.table),
        Busy.calls,
    )
    return tensors | extras, rest, module.generator.get_state()


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_everything_is_put_back_bit_for_bit(precision):
    module = Busy()
    module.net[0].weight.grad = torch.full_like(module.net[0].weight, 3.0)
    batch = (torch.randn(8, 6), torch.randint(3, (8,)))
    kept = [tensor.clone() for tensor in batch]
    gradient = module.net[0].weight.grad
    before, random_before = snapshot(module), generators()
    probe_memory(module, batch, precision=precision, device="cpu")
    after, random_after = snapshot(module), generators()
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert torch.equal(random_before[0], random_after[0])
    assert random_before[1] == random_after[1]
    assert (random_before[2] == random_after[2]).all()
    assert module.net[0].weight.grad is gradient
    assert torch.equal(gradient, torch.full_like(gradient, 3.0))
    assert all(torch.equal(tensor, value) for tensor, value in zip(batch, kept, strict=True))


def train(module, batch, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(3)]


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, functools.partial(torch.optim.LBFGS, max_iter=2)],
    ids=["adamw", "lbfgs"],
)
def test_an_optimizer_in_use_goes_on_where_it_was(make):
    def run(probing):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = make(module.parameters(), lr=0.1)
        batch = (torch.randn(8, 6), torch.randint(3, (8,)))
        losses = train(module, batch, optimizer)
        if probing:
            probe_memory(module, batch, optimizer=lambda _: optimizer, loss=cross_entropy, device="cpu")
        return losses + train(module, batch, optimizer)

    assert run(probing=True) == run(probing=False)


def test_a_step_that_fails_leaves_the_module_as_it_was():
    class Failing(Busy):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise KeyError("no such sample")

    module = Failing()
    before = snapshot(module)
    with pytest.raises(TraceError, match=r"raised KeyError at .*no such sample"):
        probe_memory(module, (torch.randn(8, 6), torch.randint(3, (8,))), device="cpu")
    after = snapshot(module)
    assert before[1] == after[1]
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())


class Shadow:
    """Averages kept by an object that is no module, as libraries for moving averages do."""

    def __init__(self):
        self.weights = [torch.ones(3)]


class Hoarder(pl.LightningModule):
    """A module whose state lies where no `state_dict` sees it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(10, 4, sparse=True)
        self.teacher = [nn.Linear(4, 3)]
        self.teachers = {"a": {"b": nn.Linear(2, 2)}}
        self.shadow = Shadow()
        self.captured = (lambda tensor: lambda: tensor)(torch.ones(3))
        self.histogram = np.zeros(3)
        self.noise = np.random.default_rng(0)
        self.replay = collections.deque([1, 2], maxlen=3)
        self.seen = {1}
        self.text = bytearray(b"ab")
        self.long = {"nested": [1] * 2000}
        self.plan = [nn.Linear(2, 2, device="meta")]
        self.register_buffer("coo", torch.eye(3).to_sparse())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for tensor in (self.teacher[0].weight, self.teachers["a"]["b"].weight, self.captured(), self.coo):
                tensor.mul_(0.5)
            self.shadow.weights[0].mul_(0.5)
        self.teacher[0].eval()
        self.histogram += 1
        self.noise.random()
        self.replay.append(3)
        self.seen.add(2)
        self.text.extend(b"c")
        self.long["nested"].append(2)
        return self.net(batch).sum() + (self.coo @ torch.ones(3, 1)).sum()

    def configure_optimizers(self):
        return [self.optimizer], [torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1)]


def belongings(module):
    tensors = [
        module.net.weight,
        module.net.weight.grad.to_dense(),
        module.teacher[0].weight,
        module.teachers["a"]["b"].weight,
        module.captured(),
        module.shadow.weights[0],
        module.coo.to_dense(),
    ]
    rest = [
        module.teacher[0].training,
        module.histogram.tolist(),
        module.noise.bit_generator.state,
        list(module.replay),
        set(module.seen),
        bytes(module.text),
        list(module.long["nested"]),
        {**module.optimizer.param_groups[0], "params": None},
        sorted(vars(module.optimizer)),
    ]
    return [tensor.detach().clone() for tensor in tensors], rest


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "interrupted"])
def test_what_lies_outside_of_the_state_dict_is_put_back_too(fails, monkeypatch):
    module, batch = Hoarder(), torch.randint(10, (8,))
    module.net(batch).sum().backward()
    gradient = module.net.weight.grad
    if fails:
        monkeypatch.setattr(module, "on_before_optimizer_step", interrupt)
    before, random_before = belongings(module), generators()
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        probe_memory(module, batch, device="cpu")
    after, random_after = belongings(module), generators()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert torch.equal(random_before[0], random_after[0])
    assert module.net.weight.grad is gradient
    assert gc.isenabled()


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
def test_sparse_buffers_of_every_layout_are_put_back(layout):
    sparse = torch.eye(4).to_sparse(
        layout=getattr(torch, f"sparse_{layout}"), blocksize=(2, 2) if layout.startswith("b") else None
    )
    module = nn.Linear(4, 4)
    module.register_buffer("sparse", sparse)

    def loss(module, batch):
        parts_of(module.sparse)[-1].mul_(2)
        return module(batch).sum()

    before = module.sparse.to_dense().clone()
    probe_memory(module, torch.randn(4, 4), loss=loss, device="cpu")
    assert module.sparse is sparse
    assert torch.equal(module.sparse.to_dense(), before)


def test_a_step_for_one_size_of_batch_is_measured_with_that_one():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.RNN(4, 5, batch_first=True)
            self.hidden = torch.zeros(1, 16, 5)

        def forward(self, x):
            out, hidden = self.net(x, self.hidden)
            self.hidden = hidden.detach()
            return out

    assert probe_memory(Stateful(), torch.randn(16, 3, 4), device="cpu").assumptions[0].text == (
        "Measured at batch 16."
    )


def test_names_of_samples_are_cut_with_them():
    batch = {"x": torch.randn(8, 4), "text": list("abcdefgh"), "words": ["one", "two"]}
    small = cut(batch, 2)
    assert (len(small["x"]), small["text"], small["words"]) == (2, ["a", "b"], ["one", "two"])
    x, names = cut((batch["x"], batch["text"]), 3)
    assert (len(x), names) == (3, ["a", "b", "c"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_surrounding_mode_without_gradients_changes_nothing(mode):
    module, batch = nn.Linear(4, 4), torch.randn(4, 4)

    def peak():
        return probe_memory(module, batch, device="cpu").peak_allocated_bytes

    outside = peak()
    with mode():
        assert peak() == outside


# -- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"precision": "bf16-master"}, "cannot be probed"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"device": "no such card"}, "no such card"),
        pytest.param(
            {"device": "cuda"},
            "there is none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_probed_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        probe_memory(nn.Linear(4, 4), torch.randn(4, 4), **{"device": "cpu", **options})


def test_a_builder_is_refused():
    with pytest.raises(TypeError, match="Build it first"):
        probe_memory(lambda: nn.Linear(4, 4), torch.randn(4, 4), device="cpu")


def test_a_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        probe_memory(nn.Linear(4, 4), torch.randn(0, 4), device="cpu")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_parameters_without_a_shape_are_refused():
    with pytest.raises(ValueError, match=r"`weight` has no shape yet.*Run one forward pass"):
        probe_memory(nn.LazyLinear(4), torch.randn(4, 4), device="cpu")
