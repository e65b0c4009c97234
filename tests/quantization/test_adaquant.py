"""AdaQuant: gradients against autograd of the definition, and what learning does to layers, nets and files."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memprec.quantization import methods
from lightning_memprec.quantization.affine import integer_range, spread
from lightning_memprec.quantization.calibration import input_rows
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.adaquant import AdaQuant
from lightning_memprec.quantization.reconstruction.adaquant_student import Problem, Student, products
from lightning_memprec.quantization.reconstruction.learned_step import round_through
from lightning_memprec.quantization.reconstruction.paired_rows import RowSample, survey

from . import digits

QUICK = AdaQuant(iterations=100)


def quantize(net, solver=QUICK, **options):
    """Quantize with a solver of one's own options."""
    name = "adaquant, tested"
    methods._METHODS.pop(name, None)
    try:
        register_method(Method(name, Scheme(), solver, needs_calibration=True))
        return quantize_(net, name, **options)
    finally:
        del methods._METHODS[name]


def by_definition(values, step, zero, low, high):
    """Round with the derivative of `round` taken for 1, for autograd to differentiate."""
    exact = values / step
    integers = torch.round(exact).detach() + zero
    through = exact + (integers - exact).detach()
    ends = integers.clamp(low, high)
    return (torch.where(ends == integers, through, ends) - zero) * step


GRIDS = {"symmetric": (None, -7, 7), "affine": (torch.tensor(3, dtype=torch.int8), -8, 7)}


@pytest.mark.parametrize("shape", [(1,), (4, 1), (4, 6)], ids=["one step", "a step a row", "a step a value"])
@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_are_those_of_the_straight_through_definition(grid, shape):
    torch.manual_seed(0)
    zero_point, low, high = GRIDS[grid]
    values = (torch.randn(4, 6, dtype=torch.float64) * 3).requires_grad_()
    step = (torch.rand(shape, dtype=torch.float64) * 0.5 + 0.2).requires_grad_()
    rounded = round_through(values, step, zero_point, low, high)
    expected = by_definition(values, step, 0 if zero_point is None else 3, low, high)
    weights = torch.randn(4, 6, dtype=torch.float64)
    found = torch.autograd.grad((rounded * weights).sum(), [values, step])
    wanted = torch.autograd.grad((expected * weights).sum(), [values, step])
    torch.testing.assert_close(rounded, expected)
    torch.testing.assert_close(found, wanted)
    clipped = found[0] == 0
    assert clipped.any()
    assert not clipped.all()


def test_gradients_are_finite_differences_with_the_rounding_held():
    values = torch.tensor([0.3, -1.26, 1.4, -9.0, 1.6], dtype=torch.float64, requires_grad=True)
    step = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)

    with torch.no_grad():
        offset = torch.round(values / step) - values / step

    def held(values, step):
        return torch.clamp(values / step + offset, -7, 7) * step

    found = torch.autograd.grad(round_through(values, step, None, -7, 7).sum(), [values, step])
    tiny = 1e-6
    with torch.no_grad():
        of_values = (held(values + tiny, step) - held(values - tiny, step)) / (2 * tiny)
        of_step = ((held(values, step + tiny) - held(values, step - tiny)) / (2 * tiny)).sum()
    # Central differences: rounding of FP64 over 2e-6, about 1e-10.
    torch.testing.assert_close(found[0], of_values, rtol=0, atol=1e-8)
    torch.testing.assert_close(found[1], of_step, rtol=0, atol=1e-8)


SCHEMES = {
    "static": Scheme(bits=4, activations="static"),
    "static, affine groups": Scheme(
        bits=4, mapping="affine", weight_granularity="group", group_size=4, activations="static"
    ),
    "one scale": Scheme(bits=3, weight_granularity="tensor", activations="static"),
    "float inputs": Scheme(bits=4),
}


def a_problem(scheme, groups=2, seed=0):
    """Return a layer of 6 channels and 9 features for each of its groups, in FP64 where it can be."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(6, 9, generator=generator)
    rows = tuple(torch.randn(count, groups, 9, generator=generator) for count in (40, 10))
    inputs = (
        torch.tensor([0.015]),
        torch.tensor([5], dtype=torch.int8) if scheme.mapping == "affine" else None,
    )
    return Problem(
        matrix=matrix,
        bias=torch.randn(6, generator=generator),
        scheme=scheme,
        nearest=scheme.quantize(matrix),
        inputs=inputs if scheme.activations == "static" else None,
        outliers=None,
        rows=rows,
        outputs=tuple(products(part, matrix) for part in rows),
        importance=tuple(torch.rand(len(part), generator=generator) + 0.5 for part in rows),
    )


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_objective_has_the_gradients_of_its_definition(scheme):
    problem = a_problem(scheme)
    student = Student(problem, learn_inputs=True)
    generator = torch.Generator().manual_seed(1)
    for part in student.parts.values():
        part.data += 0.1 * torch.randn(part.shape, generator=generator)
    rows, exact = problem.rows[0], problem.outputs[0]
    loss = (student.outputs(rows, student.weight()) - exact).square().sum()
    found = torch.autograd.grad(loss, list(student.parts.values()))

    # The same in FP64, group by group.
    parts = {name: part.detach().double().requires_grad_() for name, part in student.parts.items()}
    step, zero = problem.nearest.scale, problem.nearest.zero_point
    step = spread(step, 9, scheme.group_size).double()
    zero = 0 if zero is None else spread(zero, 9, scheme.group_size).double()
    factor = spread(parts["steps"].exp(), 9, scheme.group_size)
    moved = problem.matrix.double() + parts["weights"] * step
    weight = by_definition(moved, step * factor, zero, *integer_range(scheme.bits, scheme.mapping))
    rounded = rows.double()
    if "inputs" in parts:
        zero = 0 if problem.inputs[1] is None else 5
        scale = problem.inputs[0].double() * parts["inputs"].exp()
        rounded = by_definition(rounded, scale, zero, *integer_range(8, scheme.mapping))
    halves = [rounded[:, group] @ weight[3 * group : 3 * group + 3].t() for group in range(2)]
    unit = exact.square().mean().sqrt().double()
    outputs = torch.cat(halves, dim=1) + problem.bias.double() + unit * parts["bias"]
    expected = torch.autograd.grad((outputs - exact.double()).square().sum(), list(parts.values()))
    for name, one, other in zip(parts, found, expected, strict=True):
        # FP32 sums of up to 240 terms.
        torch.testing.assert_close(
            one.double(), other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name
        )


@pytest.mark.parametrize("kind", digits.NETS)
@pytest.mark.parametrize(
    "scheme",
    [{"bits": 4}, {"bits": 4, "activations": "static"}, {"bits": 4, "activations": "token"}],
    ids=["float", "static", "token"],
)
def test_every_layer_errs_less_on_test_images_than_rounding_to_nearest_at_4_bits(kind, scheme):
    exact = digits.trained(kind)
    nearest, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    quantize_(nearest, calibration=digits.calibration(), **scheme)
    report = quantize(learned, replace(QUICK, sequential=False), calibration=digits.calibration(), **scheme)
    before, after = digits.test_errors(exact, nearest), digits.test_errors(exact, learned)
    assert before.keys() == {row.name for row in report.quantized}
    assert {name for name in before if not after[name] < before[name]} == set()


def test_rows_with_huge_outputs_decide_alone_unless_errors_are_relative():
    torch.manual_seed(0)
    data = torch.randn(500, 16)
    data[::100] *= 3000
    exact = nn.Sequential(nn.Linear(16, 8, bias=False))
    usual = torch.randn(200, 16)
    errors = {}
    for exponent in (0.0, 2.0):
        net = copy.deepcopy(exact)
        solver = AdaQuant(iterations=50, row_exponent=exponent)
        quantize(net, solver, activations="static", calibration=list(data.split(50)))
        with torch.no_grad():
            errors[exponent] = float((net(usual) - exact(usual)).norm() / exact(usual).norm())
    assert errors[0.0] > 0.5  # All usual values round to zero.
    assert errors[2.0] < 0.05


@pytest.mark.parametrize("kind", digits.NETS)
def test_8_bits_with_static_activations_err_less(kind):
    exact = digits.trained(kind)
    nearest, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    quantize_(nearest, "vectorwise", activations="static", calibration=digits.calibration())
    quantize(learned, activations="static", calibration=digits.calibration(200))
    images = digits.images()[2]
    with torch.no_grad():
        errors = [(net(images) - exact(images)).norm() for net in (nearest, learned)]
    assert errors[1] < errors[0]


@pytest.mark.extended
def test_later_layers_make_up_for_earlier_ones_if_sequential():
    exact = digits.trained("mlp")
    errors = {}
    for sequential in (True, False):
        net = copy.deepcopy(exact)
        quantize(
            net, AdaQuant(iterations=300, sequential=sequential), bits=3, calibration=digits.calibration()
        )
        with torch.no_grad():
            errors[sequential] = float((net(digits.images()[2]) - exact(digits.images()[2])).norm())
    assert errors[True] < errors[False]


@pytest.mark.parametrize("scheme", [{}, {"activations": "static"}, {"weight_granularity": "tensor"}], ids=str)
def test_rates_that_are_far_too_high_leave_rounding_to_nearest(scheme):
    nearest, learned = digits.trained("mlp"), digits.trained("mlp")
    calibration = digits.calibration(100)
    quantize_(nearest, bits=4, calibration=calibration, **scheme)
    wild = AdaQuant(iterations=20, weight_rate=1e3, step_rate=10.0, input_rate=10.0, bias_rate=1e3)
    report = quantize(learned, wild, bits=4, calibration=calibration, **scheme)
    for name, value in nearest.state_dict().items():
        assert torch.equal(value, learned.state_dict()[name])
    assert report.quantized[-1].note.startswith(
        "10 of 10 channels rounded to nearest: that errs less on held-out rows"
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    "scheme", [{"bits": 4, "group_size": 9, "mapping": "affine"}, {"activations": "static"}], ids=str
)
def test_results_repeat_and_files_hold_them(tmp_path, scheme):
    first, second = digits.trained("conv"), digits.trained("conv")
    state = torch.get_rng_state()
    quantize(first, calibration=digits.calibration(100), **scheme)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    quantize(second, calibration=digits.calibration(100), **scheme)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    save_quantized(first, tmp_path / "net.safetensors")
    again = load_quantized(tmp_path / "net.safetensors", digits.build("conv"))
    images = digits.images()[2][:20]
    with torch.no_grad():
        assert torch.equal(first(images), again(images))


def test_the_float_model_is_left_alone_until_all_is_learned(monkeypatch):
    net = digits.trained("mlp")
    before = copy.deepcopy(net.state_dict())
    parts = [id(part) for part in net.modules()]

    def forward(module, batch):
        assert [id(part) for part in module.modules()] == parts
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        return module(batch)

    quantize(net, calibration=digits.calibration(100), forward=forward, activations="static")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_steps_of_inputs_and_biases_change_only_where_asked():
    nets = {}
    for learn_inputs in (True, False):
        nets[learn_inputs] = digits.trained("mlp")
        solver = replace(QUICK, learn_inputs=learn_inputs, sequential=False)
        quantize(
            nets[learn_inputs], solver, bits=4, activations="static", calibration=digits.calibration(200)
        )
    spans = digits.trained("mlp")
    quantize_(spans, bits=4, activations="static", calibration=digits.calibration(200))
    scales = {key: net[3].input_scale.item() for key, net in (*nets.items(), ("spans", spans))}
    assert scales[False] == scales["spans"]
    assert scales[True] != scales["spans"]
    assert not torch.equal(nets[True][1].bias, spans[1].bias)
    assert all(part.requires_grad for part in nets[True].parameters())
    without = nn.Sequential(nn.Linear(8, 4, bias=False))
    quantize(without, calibration=[torch.randn(40, 8)])
    assert without[0].bias is None


def test_outlier_features_multiply_in_floating_point_and_the_others_learn():
    torch.manual_seed(0)
    data = torch.randn(400, 16) @ torch.randn(16, 16) / 4
    data[:, 3] *= 40
    exact = nn.Sequential(nn.Linear(16, 8))
    options = {
        "bits": 4,
        "activations": "static",
        "outlier_threshold": 12.0,
        "calibration": list(data[:300].split(50)),
    }
    nearest, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    quantize_(nearest, **options)
    quantize(learned, AdaQuant(iterations=200), **options)
    assert learned[0].outlier_indices.tolist() == nearest[0].outlier_indices.tolist() == [3]
    assert torch.equal(learned[0].outlier_weight, nearest[0].outlier_weight)
    with torch.no_grad():
        errors = [(net(data[300:]) - exact(data[300:])).norm() for net in (nearest, learned)]
    assert errors[1] < 0.8 * errors[0]


class Router(nn.Module):
    """Sends those rows to the second layer whose first feature came out positive."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, values):
        values = self.first(values)
        return self.second(values[values[:, 0] > 0])


def test_what_was_not_done_is_named():
    torch.manual_seed(0)
    net = Router()
    report = quantize(net, AdaQuant(iterations=10), bits=2, calibration=[torch.randn(200, 8)])
    notes = {row.name: row.note for row in report.layers}
    assert "learned from inputs of the float model: the quantized one calls it with others" in notes["second"]
    assert notes["unused"] == "rounded to nearest: no calibration data reached it"
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 3))
    report = quantize(net, AdaQuant(iterations=10), calibration=[torch.randint(9, (4,))])
    assert report.layers[0].note == "rounded to nearest: only linear layers and convolutions learn"
    assert "learned from only 4 rows for 8 features" in report.layers[1].note


def test_a_batch_with_a_nan_is_refused():
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="Calibration batch 1 gives `0` an input with NaN"):
        quantize(net, calibration=[torch.ones(9, 4), torch.full((9, 4), torch.nan)])
    assert type(net[0]) is nn.Linear
    with pytest.raises(ValueError, match="Static activations need data"):
        quantize_(net, "adaquant")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "`iterations` must be a positive integer, got 0. Use 1000."),
        ({"batch_rows": 2.5}, "`batch_rows` must be a positive integer, got 2.5."),
        ({"weight_rate": -1.0}, "`weight_rate` must be larger than 0 and finite, got -1.0."),
        ({"row_exponent": 3.0}, "`row_exponent` must lie between 0 and 2, got 3.0."),
        ({"memory_mib": float("inf")}, "`memory_mib` must be larger than 0 and finite, got inf."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range_say_so(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AdaQuant(**options)


def test_zero_inputs_and_zero_weights_do_no_harm():
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    nn.init.zeros_(net[1].weight)
    quantize(net, activations="static", calibration=[torch.zeros(20, 6)])
    assert all(value.isfinite().all() for value in net.state_dict().values())
    assert net(torch.ones(2, 6)).isfinite().all()


@pytest.mark.parametrize("memory_mib", [1e-3, 1e-2, 100.0])
def test_rows_stay_within_the_memory_limit(memory_mib, monkeypatch):
    from lightning_memprec.quantization.reconstruction import adaquant

    sizes = []
    learn = adaquant.learn

    def measure(problem, *args, **kwargs):
        tensors = {t.data_ptr(): t for t in (*problem.rows, *problem.outputs)}
        sizes.append(sum(t.numel() * t.element_size() for t in tensors.values()))
        return learn(problem, *args, **kwargs)

    monkeypatch.setattr(adaquant, "learn", measure)
    quantize(
        digits.trained("mlp"),
        AdaQuant(iterations=1, memory_mib=memory_mib),
        calibration=digits.calibration(200),
    )
    assert 0 < max(sizes) <= memory_mib * 2**20
    if memory_mib == 100.0:
        assert len(sizes) == 3


def test_a_sample_is_the_same_part_of_rows_each_time_and_holds_out_the_last_fifth():
    blocks = list(torch.arange(1000).split(50))
    samples = [RowSample(share) for share in (0.3, 0.3, 1.0)]
    for block in blocks:
        for sample in samples:
            sample.add(block)
    first, second, whole = (sample.take() for sample in samples)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert (len(first[0]), len(first[1])) == (240, 60)
    assert torch.equal(whole[1], torch.cat([block[40:] for block in blocks]))
    assert torch.equal(whole[0], torch.cat([block[:40] for block in blocks]))
    for part, other in zip(first, whole, strict=True):
        assert torch.isin(part, other).all()
        assert part.unique().numel() == part.numel()


def test_layers_that_share_their_input_are_found():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values):
            return self.out(self.query(values) * self.key(values))

    net = nn.Sequential(Attention(), nn.ReLU(), Attention())
    layers = {name: part for name, part in net.named_modules() if isinstance(part, nn.Linear)}
    found = survey(net, [torch.randn(5, 4), torch.randn(6, 4)], lambda module, batch: module(batch), layers)
    assert found.groups == [["0.query", "0.key"], ["0.out"], ["2.query", "2.key"], ["2.out"]]
    assert found.rows == dict.fromkeys(found.rows, 11)


def test_an_input_that_is_written_to_in_between_is_another_one():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values):
            values = values.clone()
            return self.first(values) + self.second(values.mul_(2))

    net = Written()
    found = survey(net, [torch.randn(5, 4)], lambda module, batch: module(batch), dict(net.named_children()))
    assert found.groups == [["first"], ["second"]]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_products_of_windows_are_the_convolution(groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3, groups=groups, bias=False)
    images = torch.randn(3, 4, 6, 5)
    rows = torch.cat(list(input_rows(conv, images)))
    expected = conv(images).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(products(rows, conv.weight.flatten(1)), expected, rtol=1e-4, atol=1e-5)
