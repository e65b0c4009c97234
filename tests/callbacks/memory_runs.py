"""Tiny runs whose memory is known, and a meter that counts the CPU's tensors as they come and go."""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.observe.reading import Reading

from .runs import make_trainer, namespace

WIDTH, ROWS = 256, 512


class CountingMeter(TorchDispatchMode):
    """Counts the storages that operators make, from their birth to their death.

    On a CPU torch's allocator tells nothing while a run goes on. This sees all but what kernels take for a moment.
    """

    granularity_bytes = 1

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.reads = {}, 0, 0
        self.more = {}  # Figures of a device that a CPU has not, as values or as functions of the number of reads.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count(
            [args, kwargs], born=False
        )  # What was there before, such as the data set, is not the run's.
        out = func(*args, **(kwargs or {}))
        self.count(out)
        return out

    def count(self, tree, *, born=True):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    gone = weakref.ref(storage, lambda _, key=key: self.live.pop(key, None))
                    self.live[key] = (storage.nbytes() * born, gone)
        self.peak = max(self.peak, self.allocated)

    @property
    def allocated(self):
        return sum(size for size, _ in list(self.live.values()))

    def read(self):
        self.reads += 1
        more = {name: value(self.reads) if callable(value) else value for name, value in self.more.items()}
        return Reading(allocated_bytes=self.allocated, peak_allocated_bytes=self.peak, **more)

    def ask_driver(self):
        pass


def counting(meter, name="lightning.pytorch"):
    """Make the callback that lets a meter count a `fit`; put it first."""

    class Counting(namespace(name).Callback):
        def on_fit_start(self, trainer, pl_module):
            meter.count(list(pl_module.parameters()))
            meter.__enter__()

        def on_fit_end(self, trainer, pl_module):
            meter.__exit__(None, None, None)

    return Counting()


def make_module(name="lightning.pytorch", optimizer=torch.optim.Adam, **hooks):
    """Build a perceptron in a namespace; ``hooks`` replace or add methods."""

    class Net(namespace(name).LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=1e-3)

    for hook, function in hooks.items():
        setattr(Net, hook, function)
    torch.manual_seed(0)
    return Net()


def loader(batches=10, rows=ROWS):
    return DataLoader(TensorDataset(torch.ones(rows, WIDTH).repeat(batches, 1)), batch_size=rows)


class Rows(Dataset):
    """Batches of so many rows each."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return [torch.ones(self.rows[index], WIDTH)]


@cache
def prediction(rows=ROWS, device="cpu", validation_rows=None):
    """Estimate the perceptron on batches of so many rows."""
    validation = None if validation_rows is None else [torch.empty(validation_rows, WIDTH)]
    hooks = {} if validation is None else {"validation_step": validation_step}
    batch = [torch.empty(rows, WIDTH)]
    return estimate_memory(make_module(**hooks), batch, device=device, validation_batch=validation)


def validation_step(self, batch, batch_idx):
    self.net(batch[0]).square().mean()


def watch(
    monkeypatch, *callbacks, module=None, monitor=None, meter=None, data=None, estimate=None, **options
):
    """Fit under a monitor that reads a counting meter; return monitor and Trainer."""
    meter = CountingMeter() if meter is None else meter
    monitor = MemoryMonitor(every_n_steps=1) if monitor is None else monitor
    monitor.estimate = estimate
    monkeypatch.setattr("lightning_memprec.callbacks.memory_monitor.meter_for", lambda device: meter)
    name = options.pop("name", "lightning.pytorch")
    trainer = make_trainer(counting(meter, name), *callbacks, monitor, name=name, **options)
    data = loader() if data is None else data
    trainer.fit(
        make_module(name) if module is None else module, *(data if isinstance(data, tuple) else [data])
    )
    return monitor, trainer


def kinds(monitor):
    return [event.kind for event in monitor.events]


def told(monitor, kind):
    """Return the message of the one event of a kind."""
    (event,) = [event for event in monitor.events if event.kind == kind]
    return event.message
