from __future__ import annotations

import math

import pytest
import torch

from lightning_memprec.scaling.norms import tensor_norms, total_norm
from lightning_memprec.scaling.pending import Loss, PendingStep
from lightning_memprec.scaling.readback import Readback
from lightning_memprec.scaling.survey import Survey

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_norms_agree_with_float64(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((), (7,), (33, 5), (2, 3, 4))]
    expected = [float(tensor.double().norm()) for tensor in tensors]
    norms = tensor_norms(tensors)
    assert norms.dtype == torch.float32
    # Sums of up to 165 squares in FP32: a few rounding errors of 6e-8.
    assert norms.tolist() == pytest.approx(expected, rel=1e-6)
    assert total_norm(norms.tolist()) == pytest.approx(
        float(torch.nn.utils.get_total_norm([tensor.double() for tensor in tensors])), rel=1e-6
    )


def test_norms_of_large_fp16_values_do_not_overflow():
    assert tensor_norms([torch.full((100,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(
        600_000, rel=1e-6
    )


def test_norms_of_mixed_dtypes_keep_their_order():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16), torch.tensor([5.0])]
    assert tensor_norms(tensors).tolist() == [3.0, 4.0, 5.0]


def test_duplicate_indices_of_sparse_gradients_are_summed_first():
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (4,), check_invariants=False)
    assert tensor_norms([sparse, torch.ones(4)]).tolist() == [3.0, 2.0]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_survey_names_the_first_bad_gradient_and_the_largest_parameter(bad):
    parameters = [torch.nn.Parameter(torch.full((4,), value)) for value in (1.0, 3.0, 2.0, 0.5)]
    for parameter, value in zip(parameters, (1.0, bad, bad, None), strict=True):
        parameter.grad = None if value is None else torch.tensor([0.0, value, 0.0, 0.0])
    names = dict(zip(map(id, parameters), "abcd", strict=True))
    found = Survey(parameters, parameters).read(lambda parameter: names[id(parameter)])
    assert found.culprit == "b"
    assert (found.param_name, found.param_norm) == ("b", 6.0)
    assert found.grad_norm is not None
    assert not math.isfinite(found.grad_norm)


def test_survey_of_nothing_finds_nothing():
    assert Survey([torch.nn.Parameter(torch.ones(2))]).read(lambda _: "").grad_norm is None


def test_readback_keeps_what_was_sent():
    tensors = [torch.tensor(1.0), torch.tensor([2.0, 3.0], dtype=torch.float64), torch.tensor(4.0)]
    readback = Readback(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert readback.read() == [1.0, 2.0, 3.0, 4.0]


def test_readback_of_one_scalar_is_a_copy():
    value = torch.tensor(1.0)
    readback = Readback([value])
    value.zero_()
    assert readback.read() == [1.0]


def resolve(scale, *losses):
    pending = PendingStep(0, 9)
    pending.send(None if scale is None else torch.tensor(scale), [Loss(i, x) for i, x in enumerate(losses)])
    return pending.resolve(lambda _: "")


@pytest.mark.parametrize(
    ("scale", "losses", "expected", "batch"),
    [
        (8.0, [torch.tensor(16.0), torch.tensor(8.0)], 3.0, None),
        (None, [torch.tensor(16.0)], 16.0, None),
        (8.0, [torch.tensor(1.0), torch.tensor(INF)], INF, 1),
        # FSDP's scaler casts the scaled loss back to FP16: an overflow is the scale's, NaN is not.
        (8.0, [torch.tensor(INF, dtype=torch.float16)], None, None),
        (8.0, [torch.tensor(NAN, dtype=torch.float16)], NAN, 0),
        (None, [torch.tensor(INF, dtype=torch.float16)], INF, 0),
        # At a scale of 0 every loss is 0.
        (0.0, [torch.tensor(0.0)], None, None),
        (8.0, [], None, None),
    ],
)
def test_losses_are_unscaled(scale, losses, expected, batch):
    record = resolve(scale, *losses)
    assert record.loss == pytest.approx(expected, nan_ok=True)
    assert record.bad_batch_idx == batch
