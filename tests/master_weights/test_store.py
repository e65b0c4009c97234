from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_memprec.master_weights.pair import differs
from lightning_memprec.master_weights.store import MasterStore

DTYPES = [torch.bfloat16, torch.float16]
OPTIMIZERS = {
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Muon": lambda p: torch.optim.Muon(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}


def parameters(dtype, seed=0):
    torch.manual_seed(seed)
    originals = [torch.randn(5, 4), torch.randn(3, 5)]
    return (
        [nn.Parameter(o.clone()) for o in originals],
        [nn.Parameter(o.to(dtype)) for o in originals],
        originals,
    )


def connect(halves, originals, make):
    """Connect an optimizer that was made from half parameters, whose FP32 values are known."""
    store, optimizer = MasterStore(), make(halves)
    store.originals.update(zip(halves, originals, strict=True))
    store.connect([optimizer])
    return store, optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_are_bit_equal_to_an_fp32_optimizer(name, dtype):
    singles, halves, originals = parameters(dtype)
    reference = OPTIMIZERS[name](singles)
    store, optimizer = connect(halves, [o.clone() for o in originals], OPTIMIZERS[name])
    for _ in range(20):
        for single, half in zip(singles, halves, strict=True):
            half.grad = torch.randn_like(half)
            single.grad = half.grad.float()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        for single, half in zip(singles, halves, strict=True):
            assert torch.equal(store.value(half), single)
            assert torch.equal(half, single.to(dtype))
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert {k: getattr(v, "dtype", None) for k, v in saved["state"][key].items()} == {
            k: getattr(v, "dtype", None) for k, v in state.items()
        }


def test_sparse_gradients_reach_the_masters():
    single = nn.Embedding(6, 3, sparse=True)
    half = copy.deepcopy(single).to(torch.bfloat16)
    reference = torch.optim.SparseAdam(single.parameters())
    store, optimizer = connect([half.weight], [single.weight.detach().clone()], torch.optim.SparseAdam)
    for indices in ([0, 2, 2], [1, 2, 5]):
        single(torch.tensor(indices)).sum().backward()
        half(torch.tensor(indices)).sum().backward()
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
    assert torch.equal(store.value(half.weight), single.weight)


def test_one_master_for_a_parameter_of_two_optimizers():
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizers = [torch.optim.SGD([half], lr=0.1), torch.optim.SGD([half], lr=0.1)]
    store = MasterStore()
    store.connect(optimizers)
    assert optimizers[0].param_groups[0]["params"][0] is optimizers[1].param_groups[0]["params"][0]
    assert len(store.pairs) == 1


def test_groups_keep_their_lists_and_what_is_not_half():
    half, single = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([half, single])
    held = optimizer.param_groups[0]["params"]
    MasterStore().connect([optimizer])
    assert optimizer.param_groups[0]["params"] is held
    assert held[1] is single
    assert held[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_difference_is_bitwise(dtype):
    master = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1.0, 1.0 + 2.0**-20, 1e-30])
    half = master.to(dtype)
    assert not differs(half, master).any()
    half[0] = -0.0
    half[4] = 1.5
    assert differs(half, master).tolist() == [True, False, False, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_stops_where_masters_move(dtype):
    # Adam at lr 1e-5 from 1.0: an update is far below half the spacing of half numbers there.
    make = lambda p: torch.optim.Adam(p, lr=1e-5)  # noqa: E731
    pure = nn.Parameter(torch.ones(4, dtype=dtype))
    half = nn.Parameter(torch.ones(4, dtype=dtype))
    gradient = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=dtype)
    stuck, (store, optimizer) = make([pure]), connect([half], [torch.ones(4)], make)
    stuck.param_groups[0]["eps"] = 1e-3  # 1e-8 is 0 in float16, where pure Adam then divides by zero.
    for _ in range(1000):
        pure.grad, half.grad = gradient.clone(), gradient.clone()
        stuck.step()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(pure, torch.ones_like(pure))
    down, up = 0.98998642, 1.01001358
    assert torch.allclose(store.value(half), torch.tensor([down, up, down, up]), rtol=0, atol=2e-7)
    expected = {torch.bfloat16: (0.98828125, 1.0078125), torch.float16: (0.98974609375, 1.009765625)}[dtype]
    assert half.tolist() == [*expected, *expected]


@pytest.mark.parametrize(
    ("dtype", "up", "down"),
    [(torch.bfloat16, 2.0**-8, 2.0**-9), (torch.float16, 2.0**-11, 2.0**-12)],
    ids=str,
)
def test_rounding_next_to_one(dtype, up, down):
    # An update of exactly half the spacing is a tie, which goes to the even neighbour: 1.0.
    one = torch.ones((), dtype=torch.float64)
    for update, moves in ((up, False), (1.01 * up, True), (-down, False), (-1.01 * down, True)):
        assert ((one + update).to(dtype) != 1) == moves


@pytest.mark.parametrize(("dtype", "stops"), [(torch.bfloat16, 256), (torch.float16, 2048)], ids=str)
def test_accumulation_is_exact_in_fp32(dtype, stops):
    from lightning_memprec.master_weights import gradients

    half = nn.Parameter(torch.zeros(1, dtype=dtype))
    store, _ = connect([half], [torch.zeros(1)], lambda p: torch.optim.SGD(p, lr=1.0))
    plain = nn.Parameter(torch.zeros(1, dtype=dtype))
    for _ in range(stops + 8):
        plain.sum().backward()
        store.before_backward(alone=True)
        half.sum().backward()
        store.after_backward()
    assert plain.grad.item() == stops
    assert half.grad.item() == stops + 8
    gradients.drop(store.pairs[half])
    assert half.grad is None
    assert half.grad_dtype == dtype


def test_clearing_either_side_clears_both():
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    store, optimizer = connect([half], [torch.zeros(1)], lambda p: torch.optim.SGD(p, lr=1.0))

    def backward():
        store.before_backward(alone=True)
        half.sum().backward()
        store.after_backward()
        return optimizer.param_groups[0]["params"][0].grad.item()

    assert [backward(), backward()] == [1.0, 2.0]
    optimizer.zero_grad()
    assert backward() == 1.0
    half.grad = None
    assert backward() == 1.0
    optimizer.zero_grad(set_to_none=False)
    assert backward() == 1.0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_hooks_do_nothing_in_a_copy(copied):
    module = nn.Sequential(nn.Linear(3, 3))
    store = MasterStore()
    half = module.to(torch.bfloat16)
    store.attach(half)
    store.connect([torch.optim.SGD(half.parameters(), lr=0.1)])
    assert module.state_dict()["0.weight"].dtype == torch.float32
    other = copied(module)
    assert other.state_dict()["0.weight"].dtype == torch.bfloat16
    other.load_state_dict({key: value.float() + 1 for key, value in module.state_dict().items()})
    assert torch.equal(module.state_dict()["0.weight"].bfloat16(), module[0].weight)


def test_loading_fills_the_masters_exactly():
    module = nn.Sequential(nn.Linear(3, 3)).to(torch.bfloat16)
    store = MasterStore()
    store.attach(module)
    store.connect([torch.optim.SGD(module.parameters(), lr=0.1)])
    wanted = {key: torch.randn_like(value, dtype=torch.float32) for key, value in module.state_dict().items()}
    module.load_state_dict(wanted)
    assert all(torch.equal(module.state_dict()[key], value) for key, value in wanted.items())
    assert torch.equal(module[0].weight, wanted["0.weight"].bfloat16())
    with pytest.warns(UserWarning, match="mantissas beyond it were lost"):
        module.load_state_dict({key: value.bfloat16() for key, value in wanted.items()})
    module.load_state_dict({key: value.bfloat16() for key, value in wanted.items()})  # Said once.


@pytest.mark.parametrize(
    "write", [lambda p: p.fill_(0.5), lambda p: p.data.fill_(0.5)], ids=["in place", "through data"]
)
def test_who_wrote_last_is_told_apart(write):
    # A parameter's version counter follows it through a cast; its master must not share it.
    module = nn.Linear(3, 1)
    store = MasterStore()
    for parameter in module.parameters():
        store.remember(parameter, torch.bfloat16)
    module.to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store.attach(module)
    store.connect([optimizer])
    with torch.no_grad():
        write(module.weight)
    optimizer.step()
    assert (module.weight == 0.5).all()
    assert (module.state_dict()["weight"] == 0.5).all()


def test_nothing_of_the_gradients_outlives_the_run():
    module = nn.Linear(3, 1).to(torch.bfloat16)
    store = MasterStore()
    store.attach(module)
    store.connect([torch.optim.SGD(module.parameters(), lr=0.1)])
    store.before_backward()
    module(torch.ones(1, 3).bfloat16()).sum().backward()
    store.after_backward()
    assert module.weight.grad.dtype == torch.float32
    store.to_host()
    assert module.weight.grad is None
    module.float()(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_a_pickled_store_is_empty():
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    store, _ = connect([half], [torch.zeros(1)], lambda p: torch.optim.SGD(p, lr=1.0))
    assert not pickle.loads(pickle.dumps(store)).pairs


def test_masters_changed_outside_a_step_reach_the_parameters():
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    store, optimizer = connect([half], [torch.zeros(2)], lambda p: torch.optim.SGD(p, lr=1.0))
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].add_(0.3)
    store.refresh()
    assert torch.equal(half, torch.full((2,), 0.3).bfloat16())
