"""What FP32 masters add to a step: the optimizer phase of half + masters against FP32, in one run.

The phase is all that happens from the end of backward to the end of the step. For masters: the gradients' way to
FP32, the look for weights that others have written, the optimizer's own step, and rounding the masters back. Rounds
of both take turns in one process, and ratios are medians of the rounds' own, so that noise of the machine hits both.
CPU time, summed over threads, is printed beside wall time: it suffers less from other processes.

The floor is what the memory traffic alone would give. A parameter's cast, look and rounding each move 6 bytes
(2 + 4). AdamW moves 28 fused (16 read, 12 written), and 80 in the eight passes of its other implementations.

Run it as ``python -m benchmarks.master_step``.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

from benchmarks._machine import describe_machine
from lightning_memprec.master_weights.low_memory import step_in_chunks
from lightning_memprec.master_weights.store import MasterStore

CAST, LOOK, STEP, ROUND = "gradients to FP32", "look", "step", "rounding"
IMPLEMENTATIONS = {
    "foreach=False": ({"foreach": False}, 80),
    "foreach=True": ({"foreach": True}, 80),
    "fused=True": ({"fused": True}, 28),
}
WARM_UP = 2


class Clock:
    """Adds up wall and CPU time by part, in milliseconds."""

    def __init__(self, device):
        self._sync = torch.cuda.synchronize if device == "cuda" else lambda: None

    def start(self):
        """Forget all parts."""
        self.parts = {}
        self._sync()
        self._last = time.perf_counter(), time.process_time()

    def end(self, part):
        """Book the time since the last call on a part."""
        self._sync()
        now = time.perf_counter(), time.process_time()
        before = self.parts.get(part, (0.0, 0.0))
        passed = zip(before, now, self._last, strict=True)
        self.parts[part] = tuple(old + 1e3 * (end - start) for old, end, start in passed)
        self._last = time.perf_counter(), time.process_time()


class Contender:
    """Parameters, their optimizer, and gradients that each backward makes anew."""

    def __init__(self, count, width, options, clock, dtype):
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(width, width).to(dtype)) for _ in range(count)]
        self.gradients = [torch.randn_like(p) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, **options)
        self.clock = clock

    def backward(self):
        """Make gradients anew, as autograd does."""
        self.optimizer.zero_grad(set_to_none=True)
        self.before_backward()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()

    def before_backward(self):
        """Do what the plugin does before backward."""

    def round(self):
        """Return what the parts of one phase took."""
        self.backward()
        self.clock.start()
        self.phase()
        return self.clock.parts


class Single(Contender):
    """FP32, the peer."""

    def __init__(self, *args):
        super().__init__(*args, torch.float32)

    def phase(self):
        """Step."""
        self.optimizer.step()
        self.clock.end(STEP)


class Masters(Contender):
    """Half with masters, as the plugin drives them by default."""

    def __init__(self, *args):
        super().__init__(*args, torch.bfloat16)
        # Called before the store's own hook, which rounds.
        self.optimizer.register_step_post_hook(lambda *_: self.clock.end(STEP))
        self.store = MasterStore()
        self.store.connect([self.optimizer])
        self.store.is_stepping = True  # As in the plugin, which prepares the step itself.

    def before_backward(self):
        """Free the gradients that the parameters still show."""
        self.store.before_backward()

    def phase(self):
        """Hand over the gradients, look, step, round."""
        self.store.after_backward()
        self.clock.end(CAST)
        self.store.prepare(self.optimizer)
        self.clock.end(LOOK)
        self.optimizer.step()
        self.clock.end(ROUND)


class LowMemory(Masters):
    """The same with ``low_memory=True``: all parts for some parameters at a time."""

    def phase(self):
        """Do all of it, a chunk after another."""
        step_in_chunks(self.store, self.optimizer)
        self.clock.end(ROUND)


def total(parts, kind, *, without=""):
    """Return the sum of a round's wall (0) or CPU (1) times."""
    return sum(times[kind] for part, times in parts.items() if part != without)


def report(name, traffic, rounds):
    """Print medians over rounds, each a triple of what the contenders took."""
    print(
        f"\nAdamW {name}; floor by memory traffic {1 + 18 / traffic:.2f}, without the look {1 + 12 / traffic:.2f}"
    )
    for kind, label in enumerate(("wall", "CPU")):
        single = median(total(s, kind) for s, _, _ in rounds)
        parts = {part: median(m[part][kind] for _, m, _ in rounds) for part in (CAST, LOOK, STEP, ROUND)}
        ratio = median(total(m, kind) / total(s, kind) for s, m, _ in rounds)
        unseen = median(total(m, kind, without=LOOK) / total(s, kind) for s, m, _ in rounds)
        low = median(total(c, kind) / total(s, kind) for s, _, c in rounds)
        listed = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
        print(f"  {label:4s} ms: FP32 {single:.1f}; masters: {listed}")
        print(
            f"  {label:4s} ratio {ratio:.2f}, without the look {unseen:.2f}; low_memory {low:.2f}", flush=True
        )


def main(count=24, width=1024, rounds=15):
    print(describe_machine(), torch.get_num_threads(), "threads")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{count} parameters of {width} x {width}, {device}, medians of {rounds} rounds")
    for name, (options, traffic) in IMPLEMENTATIONS.items():
        clock = Clock(device)
        with torch.device(device):
            contenders = [kind(count, width, options, clock) for kind in (Single, Masters, LowMemory)]
        measured = []
        for index in range(WARM_UP + rounds):
            order = contenders[:: 1 if index % 2 else -1]  # Who comes first may find another cache.
            took = {contender: contender.round() for contender in order}
            measured.append([took[contender] for contender in contenders])
        report(name, traffic, measured[WARM_UP:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    main(**vars(parser.parse_args()))
