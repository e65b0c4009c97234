import threading

import pytest
import torch
import torch.nn.functional as F

from lightning_memprec.memory.interpose import Interposer

aten = torch.ops.aten
UPPER, LOWER = Interposer("AutocastHPU", nested=False), Interposer("AutocastIPU")


def recorder(name, calls):
    def kernel(func, *args, **kwargs):
        calls.append(name)
        return func(*args, **kwargs)

    return kernel


@pytest.fixture
def calls():
    yield []
    UPPER.use({})
    LOWER.use({})


def meta(*shape):
    return torch.empty(shape, device="meta", requires_grad=True)


def test_kernel_is_reached_inside_the_block_only(calls):
    LOWER.use({aten.dropout.default: recorder("dropout", calls)})
    F.dropout(meta(2, 3))
    with LOWER.active():
        F.dropout(meta(2, 3))
        with LOWER.active(enabled=False):
            F.dropout(meta(2, 3))
        F.dropout(meta(2, 3))
    F.dropout(meta(2, 3))
    assert calls == ["dropout"] * 2


def test_kernel_may_replace_the_operator_and_autograd_follows(calls):
    LOWER.use({aten.dropout.default: lambda func, x, p, train: x.exp()})
    x = meta(2, 3)
    with LOWER.active():
        out = F.dropout(x)
    assert out.grad_fn.name() == "ExpBackward0"
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_composite_operators_reach_kernels_of_their_parts(calls):
    LOWER.use({aten.matmul.default: recorder("matmul", calls), aten.mm.default: recorder("mm", calls)})
    with LOWER.active():
        meta(2, 3) @ meta(3, 2)
    assert calls == ["matmul", "mm"]


def test_parts_are_hidden_when_not_nested(calls):
    UPPER.use({aten.matmul.default: recorder("matmul", calls), aten.mm.default: recorder("mm", calls)})
    with UPPER.active():
        meta(2, 3) @ meta(3, 2)
        meta(2, 3).mm(meta(3, 2))
    assert calls == ["matmul", "mm"]


def test_hpu_key_runs_before_ipu_key(calls):
    UPPER.use({aten.matmul.default: recorder("upper", calls)})
    LOWER.use({aten.matmul.default: recorder("lower", calls), aten.mm.default: recorder("part", calls)})
    with LOWER.active(), UPPER.active():
        meta(2, 3) @ meta(3, 2)
    assert calls == ["upper", "lower", "part"]


def test_a_later_set_of_kernels_replaces_the_former(calls):
    LOWER.use({aten.dropout.default: recorder("first", calls)})
    LOWER.use({aten.mm.default: recorder("second", calls)})
    with LOWER.active():
        assert F.dropout(meta(2, 3)).shape == (2, 3)
        meta(2, 3).mm(meta(3, 2))
    assert calls == ["second"]


def test_host_tensors_reach_kernels_and_are_computed(calls):
    LOWER.use({aten.mm.default: recorder("mm", calls)})
    with LOWER.active():
        out = torch.ones(2, 3).mm(torch.ones(3, 2))
    assert calls == ["mm"]
    assert torch.equal(out, torch.full((2, 2), 3.0))


def test_state_is_restored_after_an_error(calls):
    def broken(func, *args, **kwargs):
        raise ValueError("kernel")

    LOWER.use({aten.dropout.default: broken})
    with pytest.raises(ValueError, match="kernel"), LOWER.active():
        F.dropout(meta(2, 3))
    assert F.dropout(meta(2, 3)).shape == (2, 3)


def test_other_threads_do_not_reach_kernels(calls):
    LOWER.use({aten.dropout.default: recorder("dropout", calls)})
    with LOWER.active():
        thread = threading.Thread(target=F.dropout, args=(meta(2, 3),))
        thread.start()
        thread.join()
    assert calls == []
