from __future__ import annotations

import copy
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import TraceError
from lightning_memprec.memory.meta_copy import meta_copy, move_to_meta


def twin(tensor):
    return torch.empty_like(tensor, device="meta")


def tensors(module):
    return [*module.parameters(), *module.buffers()]


def test_structure_is_kept_and_nothing_has_storage():
    module = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Embedding(5, 2, dtype=torch.bfloat16)
    ).eval()
    module[0].weight.requires_grad_(False)
    copied = meta_copy(module, twin)
    assert [type(m) for m in copied.modules()] == [type(m) for m in module.modules()]
    assert all(t.is_meta for t in tensors(copied))
    assert [(t.shape, t.dtype, t.requires_grad) for t in tensors(copied)] == [
        (t.shape, t.dtype, t.requires_grad) for t in tensors(module)
    ]
    assert not copied.training
    assert not any(t.is_meta for t in tensors(module))


def test_tensors_that_lie_in_a_parameter_lie_in_its_copy():
    module = nn.Linear(4, 4)
    module.part = module.weight.detach()[1:3]
    copied = meta_copy(module, twin)
    assert copied.part.untyped_storage()._cdata == copied.weight.untyped_storage()._cdata
    assert (copied.part.storage_offset(), copied.part.shape) == (4, (2, 4))


def test_tied_parameters_stay_tied():
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    copied = meta_copy(module, twin)
    assert copied["b"].weight is copied["a"].weight
    assert len(list(copied.parameters())) == 3


def test_non_float_parameters_and_attributes_on_parameters_are_kept():
    module = nn.Module()
    module.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    module.weight = nn.Parameter(torch.ones(3))
    module.weight.no_decay = True
    copied = meta_copy(module, twin)
    assert copied.codes.dtype is torch.int8
    assert copied.weight.no_decay


def test_tensors_in_containers_and_in_a_graph_are_copied():
    module = nn.Linear(2, 2)
    module.cache = {"out": [module(torch.ones(1, 2))]}  # `copy.deepcopy` alone refuses this one.
    assert meta_copy(module, twin).cache["out"][0].is_meta


def test_weight_norm_used_once_is_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = torch.nn.utils.weight_norm(nn.Linear(2, 3))
    module(torch.ones(1, 2))
    assert meta_copy(module, twin)(torch.empty(4, 2, device="meta")).shape == (4, 3)


@pytest.mark.parametrize("parametrize", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules_are_copied(parametrize):
    module = getattr(torch.nn.utils.parametrizations, parametrize)(nn.Linear(4, 4))
    copied = meta_copy(module, twin)
    assert all(t.is_meta for t in tensors(copied))
    assert copied(torch.empty(2, 4, device="meta")).shape == (2, 4)


def test_lazy_modules_are_copied():
    copied = meta_copy(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), twin)
    copied(torch.empty(2, 7, device="meta"))
    assert copied[0].weight.shape == (3, 7)
    assert all(t.is_meta for t in tensors(copied))


def test_functions_that_close_over_the_module_use_the_copy():
    class Closures(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            layers = [self.inner]
            self.by_self = lambda x: self.inner(x)
            self.by_list = lambda x: layers[0](x)
            self.by_default = types.MethodType(lambda self, x: self.inner(x), self)
            self.inner.register_forward_hook(lambda module, args, out: out + self.inner.bias)
            self.plain = len

    module = Closures()
    copied = meta_copy(module, twin)
    for function in (copied.by_self, copied.by_list, copied.by_default):
        assert function(torch.empty(1, 2, device="meta")).is_meta
    assert not module.by_self(torch.ones(1, 2)).is_meta
    assert copied.plain is len


def test_functions_keep_their_defaults_and_attributes():
    module = nn.Linear(2, 2)

    def call(x, scale=2, *, shift=3):
        return module(x) * scale + shift

    call.tag = "mine"
    module.call = call
    copied = meta_copy(module, twin).call
    assert (copied.__defaults__, copied.__kwdefaults__, copied.tag) == ((2,), {"shift": 3}, "mine")
    assert copied.__closure__[0].cell_contents is not module


def test_data_is_shared_and_generators_are_cloned():
    module = nn.Linear(2, 2)
    module.dataset = TensorDataset(torch.zeros(4))
    module.loader = DataLoader(module.dataset)
    module.generator = torch.Generator().manual_seed(3)
    owner = object()
    module.owner = owner
    state = module.generator.get_state()
    copied = meta_copy(module, twin, shared=(owner,))
    assert copied.dataset is module.dataset
    assert copied.loader is module.loader
    assert copied.owner is owner
    assert torch.equal(copied.generator.get_state(), state)
    torch.rand(5, generator=copied.generator)
    assert torch.equal(module.generator.get_state(), state)


def test_what_refuses_to_be_copied_is_shared(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].lock = threading.Lock()
    with open(tmp_path / "log", "w") as file:
        module.file = file
        copied = meta_copy(module, twin)
    assert copied.file is file
    assert copied[0].lock is module[0].lock
    assert copied[0].weight.is_meta


def test_iterators_are_not_used_up_but_refused():
    module = nn.Linear(2, 2)
    module.numbers = (i for i in range(3))
    with pytest.raises(TraceError, match=r"`Linear` cannot be copied.*zero-argument callable"):
        meta_copy(module, twin)
    assert next(module.numbers) == 0


def test_data_is_shared_wherever_it_hides():
    class DataModule:
        def __init__(self):
            self.sets = {"train": TensorDataset(torch.zeros(4)), "arrays": [np.zeros(2**18), np.zeros(3)]}

    module = nn.Linear(2, 2)
    module.data = DataModule()
    copied = meta_copy(module, twin)
    assert copied.data is not module.data
    assert copied.data.sets["train"] is module.data.sets["train"]
    large, small = copied.data.sets["arrays"]
    assert np.shares_memory(large, module.data.sets["arrays"][0])
    with pytest.raises(ValueError, match="read-only"):
        large[0] = 1
    small[0] = 1
    assert module.data.sets["arrays"][1][0] == 0
    assert module.data.sets["arrays"][0].flags.writeable


@pytest.mark.parametrize("fails", [False, True])
def test_deepcopy_works_as_before_afterwards(fails):
    module = nn.Linear(2, 2)
    if fails:
        module.numbers = (i for i in range(3))
        with pytest.raises(TraceError):
            meta_copy(module, twin)
        del module.numbers
    else:
        meta_copy(module, twin)
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
    assert torch.equal(copy.deepcopy(torch.ones(2)), torch.ones(2))

    def function():
        return module

    assert copy.deepcopy(function) is function
    array = np.zeros(2**18)
    assert not np.shares_memory(copy.deepcopy(array), array)
    dataset = TensorDataset(torch.ones(2))
    assert copy.deepcopy(dataset) is not dataset


def test_move_to_meta_keeps_ties_hooks_and_what_is_there():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")})
    module["b"].bias = module["a"].bias
    module.register_forward_hook(hook := lambda *args: None)
    kept = module["b"].weight
    move_to_meta(module, twin)
    assert all(t.is_meta for t in tensors(module))
    assert module["b"].bias is module["a"].bias
    assert module["b"].weight is kept
    assert list(module._forward_hooks.values()) == [hook]
