# %% [markdown]
# # Count the bytes
#
# What does a training step hold in memory? Here it is counted three times: by hand, by `estimate_memory`, which
# computes nothing, and by torch's own allocator while the step really runs. All three must agree. CPU, some seconds.

# %%
"""A training step's memory: counted by hand, estimated, and measured."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memprec import estimate_memory

MIB = 2**20
ROWS, WIDTH, HIDDEN = 4096, 256, 1024
FP32 = 4  # Bytes of an element.


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def mean_of_squares(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return net(rows).square().mean()


# %% [markdown]
# ## By hand
#
# **What stays.** Each parameter takes 4 bytes in FP32, its gradient 4 more, and AdamW keeps two moments of 4 bytes.
# That makes 16 bytes a parameter, whatever the batch. The moments appear at the end of the first step.

# %%
parameters = sum(p.numel() for p in build().parameters())
assert parameters == (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * WIDTH
weights = gradients = FP32 * parameters
moments = 2 * FP32 * parameters
print(f"{parameters:,} parameters, {16 * parameters / MIB:.2f} MiB with gradients and moments")

# %% [markdown]
# **What a step adds.** Backward needs some values of the forward pass again, and autograd keeps those alive:
#
# | layer | keeps for backward | elements |
# |---|---|---|
# | first linear | its input, which is the batch | `ROWS * WIDTH` |
# | ReLU | its output; the second linear keeps the same tensor | `ROWS * HIDDEN` |
# | square | its input, the net's output | `ROWS * WIDTH` |
#
# The output of the first linear layer is not in the list: ReLU tells from its *output* where the gradient passes.

# **The peak.** It is not the sum of everything, because not everything is alive at once. In the second step, when the
# moments exist, there are two candidates:
#
# - *Forward, inside ReLU.* Its input and its output exist together: two tensors of `ROWS * HIDDEN`, and the batch.
#   Lightning calls `zero_grad` after the forward pass, so all gradients of the first step are still there.
# - *Backward, inside ReLU.* Its output, the gradient of that and the gradient of its input exist together: three
#   tensors of `ROWS * HIDDEN`, and the batch. The old gradients are gone, and of the new ones only those of the second
#   layer are there.

# %%
batch_bytes, hidden_bytes = FP32 * ROWS * WIDTH, FP32 * ROWS * HIDDEN
second_layer_gradients = FP32 * (HIDDEN + 1) * WIDTH
in_forward = weights + moments + gradients + batch_bytes + 2 * hidden_bytes
in_backward = weights + moments + second_layer_gradients + batch_bytes + 3 * hidden_bytes
by_hand = max(in_forward, in_backward)
print(f"forward {in_forward / MIB:.2f} MiB, backward {in_backward / MIB:.2f} MiB")

# %% [markdown]
# ## By `estimate_memory`
#
# It runs the same step on tensors that have shapes and no contents, and follows each tensor from birth to death.

# %%
estimate = estimate_memory(
    build,
    torch.empty(ROWS, WIDTH),
    loss=mean_of_squares,
    optimizer=lambda weights: torch.optim.AdamW(weights, foreach=False),
    device="cpu",
)
print(f"The peak is in {estimate.peak_phase.name}, step {estimate.peak_phase.step}.")
for name, size in estimate.breakdown.items():
    if size:
        print(f"{name:20}{size / MIB:8.2f} MiB")

# %% [markdown]
# ## For real
#
# torch's profiler records each allocation and each free of the CPU allocator. Their running sum is the memory over
# time, on top of what was there before: weights and batch.


# %%
def measure() -> int:
    net, rows = build(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    total = sum(p.numel() * p.element_size() for p in net.parameters()) + rows.numel() * rows.element_size()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        for _ in range(2):
            loss = mean_of_squares(net, rows)
            optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    peak = total
    for event in events:
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


measured = measure()

# %% [markdown]
# ## Side by side

# %%
for name, size in (
    ("by hand", by_hand),
    ("estimated", estimate.peak_allocated_bytes),
    ("measured", measured),
):
    print(f"{name:10}{size / MIB:8.2f} MiB  {size / measured - 1:+.3%}")
assert abs(by_hand / measured - 1) < 0.01
assert abs(estimate.peak_allocated_bytes / measured - 1) < 0.01

# %% [markdown]
# By hand this took a page for three layers, and one wrong guess about what ReLU keeps would have cost 16 MiB. A
# transformer under autocast has hundreds of such lines: let them be traced.
#
# Try it: set `ROWS = 64`. Then the peak is in the optimizer's step, where AdamW takes temporaries of its own. The count
# by hand misses it, the estimate does not.
