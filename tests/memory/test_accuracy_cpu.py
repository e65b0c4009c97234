"""The estimate for ``device="cpu"`` beside the memory that real training steps take."""

from __future__ import annotations

from functools import cache
from statistics import median

import pytest
import torch
from torch import nn

from lightning_memprec.memory.cpu_recurrent import lstm_workspace_bytes
from tests.memory.zoo import ZOO, Case
from tests.memory.zoo.comparison import Comparison, compare
from tests.memory.zoo.reference import measure

# Worst error of the whole peak that each family may show, and the median over all of them.
WORST = {"transformer": 0.005, "mlp": 0.005, "convolution": 0.02, "recurrent": 0.10}
MEDIAN = 0.001
# Of the part above parameters, buffers, gradients and optimizer states, so that these cannot hide an error.
WORST_ABOVE_FIXED = 0.05
MEDIAN_ABOVE_FIXED = 0.005
ABOVE_FIXED_FAMILIES = ("transformer", "mlp")

# One case each of what differs most, for quick runs.
QUICK = {
    "bert_no_dropout",
    "llama_gqa_bf16_true",
    "lightning_encoder_accumulate",
    "mlp_lbfgs",
    "resnet18",
    "lstm",
}

compared = cache(compare)


def _param(case: Case):
    return pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.extended)


def test_zoo_is_large_and_its_names_are_unique():
    names = [case.name for case in ZOO]
    assert len(set(names)) == len(names) >= 24
    assert {case.family for case in ZOO} == set(WORST)
    assert {case.precision for case in ZOO} == {"32-true", "bf16-true", "bf16-mixed"}
    assert set(names) >= QUICK


@pytest.mark.parametrize("case", [_param(case) for case in ZOO])
def test_peak_is_within_the_worst_error_of_its_family(case: Case):
    result = compared(case)
    assert abs(result.error) <= WORST[case.family], _describe(result)
    if case.family in ABOVE_FIXED_FAMILIES:
        assert abs(result.error_above_fixed) <= WORST_ABOVE_FIXED, _describe(result)


@pytest.mark.slow
def test_median_errors_over_the_zoo():
    results = [compared(case) for case in ZOO]
    assert median(abs(r.error) for r in results) <= MEDIAN
    above = [abs(r.error_above_fixed) for r in results if r.case.family in ABOVE_FIXED_FAMILIES]
    assert median(above) <= MEDIAN_ABOVE_FIXED


def _describe(result: Comparison) -> str:
    return f"real {result.real.peak_bytes:,d} B, estimated {result.estimated_peak_bytes:,d} B, {result.error:+.3%}"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hand_written_loop_takes_what_a_trainer_takes(accumulate: int):
    def build():
        model = nn.Sequential(
            nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 10)
        )
        return model, (torch.randn(512, 256), torch.randint(10, (512,)))

    case = Case(name="loop", family="mlp", build=build, accumulate=accumulate, clip=1.0)
    by_hand, by_trainer = measure(case, trainer=False), measure(case, trainer=True)
    assert by_hand.fixed_bytes == by_trainer.fixed_bytes
    # A Trainer holds a few scalars more: the loss of the last step, its progress.
    assert 0 <= by_trainer.peak_bytes - by_hand.peak_bytes <= 1024


def test_reality_repeats_itself():
    case = next(case for case in ZOO if case.name == "mlp_lbfgs")
    assert measure(case) == measure(case)


# -- the rules, one by one --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "width"), [(1, 3, 5, 7), (5, 17, 300, 100), (10, 8, 64, 256)]
)
def test_lstm_workspace_equals_the_one_that_onednn_asks_for(steps, batch, inputs, width, dtype):
    weights = [torch.randn(4 * width, n, dtype=dtype) for n in (inputs, width)]
    biases = [torch.zeros(4 * width, dtype=dtype)] * 2
    state = [torch.zeros(batch, width, dtype=dtype)] * 2
    options = (False, [], 2, width, 1, True, False, True, True)
    data = torch.randn(steps, batch, inputs, dtype=dtype)
    workspace = torch.ops.aten.mkldnn_rnn_layer(data, *weights, *biases, *state, *options)[3]
    assert lstm_workspace_bytes(steps, batch, inputs, width, dtype.itemsize) == workspace.numel()


@pytest.mark.parametrize("value_width", [16, 24])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32], ids=str)
def test_attention_takes_the_kernel_of_a_cpu_run(mask_dtype, dropout, value_width):
    # The fused kernel takes neither dropout nor values of another width; it saves three matrices of scores.
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 4 * (16 + 16 + value_width))

        def forward(self, x):
            heads = self.project(x).unflatten(-1, (4, -1)).transpose(1, 2)
            query, key, value = heads.split([16, 16, value_width], -1)
            mask = None
            if mask_dtype is not None:
                mask = torch.ones(x.size(1), x.size(1), dtype=mask_dtype).tril()
            return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout).mean((1, 3))

    def build():
        return Attention(), (torch.randn(4, 512, 64), torch.randint(512, (4,)))

    case = Case(name="attention", family="transformer", build=build)
    assert abs(compare(case).error) <= 0.02


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "bias": False}], ids=str)
def test_recurrent_layers_run_as_on_a_cpu(kind, options):
    def build():
        layer = kind(32, 64, **options)
        head = nn.Linear(128 if options else 64, 10)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.head = layer, head

            def forward(self, x):
                return self.head(self.layer(x)[0])

        return Model(), (torch.randn(12, 16, 32), torch.randint(10, (12, 16)))

    case = Case(name="recurrent", family="recurrent", build=build)
    assert abs(compare(case).error) <= WORST["recurrent"]


@pytest.mark.parametrize("module_too", [False, True], ids=["data", "data and weights"])
def test_convolutions_keep_channels_last(module_too: bool):
    def build():
        model = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
        images = torch.randn(8, 32, 32, 32).to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last) if module_too else model
        return model, (images, torch.randint(10, (8,)))

    case = Case(name="channels_last", family="convolution", build=build)
    assert abs(compare(case).error) <= WORST["convolution"]
