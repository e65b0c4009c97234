import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memprec.memory.formula import estimate_formula, minimum_devices
from lightning_memprec.memory.recipes import RECIPES
from lightning_memprec.memory.transformer import TransformerShape, activation_bytes, logits_and_loss_bytes

GB = 10**9


def shape_7b(batch=1, **changes):
    return TransformerShape(
        **({"layers": 32, "hidden": 4096, "heads": 32, "sequence": 2048, "batch": batch} | changes)
    )


def shape_13b():
    return TransformerShape(layers=40, hidden=5120, heads=40, sequence=2048)


class TestPublishedWorkedExamples:
    """Folk figures for 16 bytes per parameter and half-precision activations, in GB of 10^9 bytes."""

    def test_one_layer_of_7b(self):
        assert shape_7b().layer_elements == (159_383_552, 402_653_184)
        assert activation_bytes(shape_7b(layers=1)) == 2 * (159_383_552 + 402_653_184)
        assert activation_bytes(shape_7b(layers=1)) / GB == pytest.approx(1.124, abs=5e-4)

    @pytest.mark.parametrize(
        ("parameters", "shape", "recompute", "fixed", "activations", "total", "folk_total"),
        [
            pytest.param(7 * GB, shape_7b(), False, 112, 35.97, 147.97, 148, id="7B"),
            pytest.param(7 * GB, shape_7b(), True, 112, 1.66, 113.66, 116, id="7B-recompute"),
            pytest.param(7 * GB, shape_7b(batch=4), False, 112, 143.88, 255.88, 256, id="7B-batch4"),
            pytest.param(13 * GB, shape_13b(), True, 208, 2.24, 210.24, 213, id="13B-recompute"),
        ],
    )
    @pytest.mark.parametrize("recipe", ["amp-adam", "half-master-adam"])
    def test_totals(self, recipe, parameters, shape, recompute, fixed, activations, total, folk_total):
        estimate = estimate_formula(parameters=parameters, shape=shape, recipe=recipe, recompute=recompute)
        assert estimate.fixed_bytes == fixed * GB
        assert round(estimate.activations_bytes / GB, 2) == activations
        assert round(estimate.total_bytes / GB, 2) == total
        assert estimate.total_bytes / GB == pytest.approx(folk_total, rel=0.025)

    @pytest.mark.parametrize(
        ("parameters", "shape", "recompute", "cards"),
        [
            pytest.param(7 * GB, shape_7b(), False, 2, id="7B: two, as folk say"),
            pytest.param(7 * GB, shape_7b(batch=4), False, 4, id="7B-batch4: four, as folk say"),
            pytest.param(13 * GB, shape_13b(), True, 3, id="13B-recompute: three, folk say four or five"),
        ],
    )
    def test_cards_of_80_gb(self, parameters, shape, recompute, cards):
        estimate = estimate_formula(
            parameters=parameters, shape=shape, recipe="amp-adam", recompute=recompute
        )
        assert minimum_devices(estimate.total_bytes, 80 * GB) == cards

    @pytest.mark.parametrize(
        ("stage", "published_gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)], ids=lambda value: str(value)
    )
    def test_zero_of_7_5b_on_64_devices(self, stage, published_gb):
        # arXiv 1910.02054, figure 1.
        estimate = estimate_formula(
            parameters=7_500_000_000, recipe="half-master-adam", devices=64, zero_stage=stage
        )
        assert round(estimate.total_bytes / GB, 1) == published_gb


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("fp32-adam", 16),
        ("amp-adam", 16),
        ("half-master-adam", 16),
        ("half-adam-fp32-moments", 12),
        ("half-adam", 8),
        ("fp32-sgd", 8),
        ("fp32-sgd-momentum", 12),
        ("fp32-adafactor", 8),
        ("fp32-adam-8bit", 10.03125),
        ("half-adam-8bit", 6.03125),
    ],
)
def test_bytes_per_parameter(name, total):
    assert RECIPES[name].bytes_per_parameter == total


def test_every_recipe_is_tested_and_bears_its_name():
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert len(RECIPES) == 10


def test_recipes_of_the_documentation():
    page = Path(__file__).parents[2].joinpath("docs", "closed-form.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z0-9-]+)`.*\| ([\d.]+) \|$", page, re.MULTILINE))
    assert documented == {
        name: f"{round(recipe.bytes_per_parameter, 2):g}" for name, recipe in RECIPES.items()
    }


@pytest.mark.parametrize(
    ("name", "dtype", "make_optimizer"),
    [
        ("fp32-adam", torch.float32, torch.optim.AdamW),
        ("half-adam", torch.bfloat16, torch.optim.AdamW),
        ("fp32-sgd", torch.float32, torch.optim.SGD),
        ("fp32-sgd-momentum", torch.float32, lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("fp32-adafactor", torch.float32, torch.optim.Adafactor),
    ],
)
def test_recipes_agree_with_real_optimizers(name, dtype, make_optimizer):
    weight = torch.nn.Parameter(torch.ones(512, 512, dtype=dtype))
    optimizer = make_optimizer([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    measured = sum(tensor.nbytes for tensor in (weight, weight.grad, *states)) / weight.numel()
    # Step counters and Adafactor's row and column sums: 4 * (512 + 512) / 512^2 bytes at most.
    assert measured == pytest.approx(RECIPES[name].bytes_per_parameter, abs=0.02)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_published_formula_in_half_precision(batch, fused):
    s, b, h, a = 2048, batch, 4096, 32
    expected = s * b * h * 34 if fused else s * b * h * (34 + 5 * a * s / h)
    computed = activation_bytes(shape_7b(batch, layers=1), formula="published", fused_attention=fused)
    assert computed == expected


def test_fused_attention_drops_exactly_the_quadratic_term():
    dense, fused = (activation_bytes(shape_7b(), fused_attention=fused) for fused in (False, True))
    assert dense - fused == 32 * 2 * 402_653_184
    doubled = activation_bytes(shape_7b(sequence=4096), fused_attention=True)
    assert doubled == 2 * fused


def test_activations_grow_with_the_element_size():
    assert activation_bytes(shape_7b(), element_bytes=4) == 2 * activation_bytes(shape_7b(), element_bytes=2)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "positions", "vocabulary", "parameters"),
    [
        pytest.param(12, 768, 12, 1024, 50257, 124_439_808, id="gpt2"),
        pytest.param(24, 1024, 16, 1024, 50257, 354_823_168, id="gpt2-medium"),
        pytest.param(48, 1600, 25, 1024, 50257, 1_557_611_200, id="gpt2-xl"),
    ],
)
def test_parameter_count_is_exact_for_gpt2(layers, hidden, heads, positions, vocabulary, parameters):
    shape = TransformerShape(layers, hidden, heads, positions, vocabulary=vocabulary)
    assert shape.parameters == parameters


def test_parameter_count_of_layers_alone():
    layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=256)
    expected = sum(parameter.numel() for parameter in layer.parameters())
    assert TransformerShape(layers=3, hidden=64, heads=4, sequence=8).parameters == 3 * expected


@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_logits_and_loss_agree_with_a_profiled_cross_entropy(dtype, element_bytes):
    tokens, vocabulary = 64, 2048
    hidden = torch.ones(tokens, 4, dtype=dtype, requires_grad=True)
    weight = torch.ones(vocabulary, 4, dtype=dtype, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        logits = hidden @ weight.T
        torch.nn.functional.cross_entropy(logits.float(), target).backward()
    events = sorted(
        (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    allocated = [0]
    for event in events:
        allocated.append(allocated[-1] + event.nbytes())
    shape = TransformerShape(1, 4, 1, sequence=tokens, vocabulary=vocabulary)
    estimate = sum(logits_and_loss_bytes(shape, element_bytes=element_bytes))
    assert max(allocated) == pytest.approx(estimate, rel=0.01)


def test_vocabulary_adds_logits_and_loss_to_the_total():
    without = estimate_formula(parameters=10, shape=shape_7b(), recipe="amp-adam")
    with_vocabulary = estimate_formula(parameters=10, shape=shape_7b(vocabulary=32000), recipe="amp-adam")
    assert with_vocabulary.logits_bytes == 2 * 2048 * 32000
    assert with_vocabulary.total_bytes - without.total_bytes == (2 + 12) * 2048 * 32000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_sharding_divides_exactly_the_parts_of_its_stage(stage, devices):
    estimate = estimate_formula(parameters=1001, recipe="half-master-adam", devices=devices, zero_stage=stage)
    expected = [
        math.ceil(2002 / (devices if stage >= 3 else 1)),
        math.ceil(2002 / (devices if stage >= 2 else 1)),
        math.ceil(8008 / (devices if stage >= 1 else 1)),
        math.ceil(4004 / (devices if stage >= 1 else 1)),
    ]
    assert [size for _, size in estimate.items()[:4]] == expected


@pytest.mark.parametrize(
    ("offload", "device_bytes"), [("none", 16_000), ("optimizer", 2_000), ("parameters", 0)], ids=str
)
def test_offload_moves_bytes_to_the_host_and_loses_none(offload, device_bytes):
    # DeepSpeed's estimate for ZeRO-Offload is 2 bytes per parameter on the device.
    estimate = estimate_formula(parameters=1000, recipe="half-master-adam", offload=offload)
    assert estimate.total_bytes == device_bytes
    assert estimate.total_bytes + estimate.host_bytes == 16_000


def test_parameters_default_to_those_of_the_shape():
    shape = shape_7b(vocabulary=32000)
    assert estimate_formula(shape=shape).parameters == shape.parameters


def test_parts_add_up_and_survive_json():
    estimate = estimate_formula(
        shape=shape_7b(vocabulary=32000), recipe="fp32-adam-8bit", devices=3, zero_stage=3
    )
    plain = json.loads(json.dumps(estimate.to_dict()))
    assert sum(size for _, size in estimate.items()) == estimate.total_bytes == plain["total_bytes"]
    assert all(isinstance(value, int) for name, value in plain.items() if name.endswith("_bytes"))
    assert plain["recipe"]["name"] == "fp32-adam-8bit"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Neither `parameters` nor `shape`"),
        ({"parameters": 0}, "must be positive, got 0 and 1"),
        ({"parameters": 1, "devices": 0}, "must be positive, got 1 and 0"),
        ({"parameters": 1, "recipe": "fp16"}, "Unknown recipe 'fp16'. Choose one of: fp32-adam, "),
        ({"parameters": 1, "zero_stage": 4}, "`zero_stage` must be 0, 1, 2 or 3, got 4"),
        ({"parameters": 1, "offload": "disk"}, "Unknown offload 'disk'. Choose one of: none, optimizer"),
        (
            {"shape": shape_7b(), "activation_formula": "folk"},
            "Unknown formula 'folk'. Choose one of: uniform",
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        estimate_formula(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "`layers` must be at least 1, got 0"),
        ({"batch": -1}, "`batch` must be at least 1, got -1"),
        ({"vocabulary": -5}, "`vocabulary` must be at least 0, got -5"),
        ({"heads": 33}, "`hidden` must be a multiple of `heads`, got 4096 and 33"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_7b(**changes)
