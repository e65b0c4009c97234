from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memprec._isolation import unchanged


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_global_generators_are_put_back():
    with unchanged():
        first = draw()
    assert draw() == first


def test_state_is_put_back_after_an_error():
    drawn = []

    def fail():
        with unchanged():
            drawn.append(draw())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == drawn[0]


class Holder:
    def __init__(self, inner=None):
        self.inner = inner
        self.count = 0
        self.log = []
        self.table = {}

    def touch(self):
        self.count += 1
        self.log.append(self.count)
        self.table[self.count] = "x"
        self.extra = "new"


OWN = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
    "numpy": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "numpy_legacy": (lambda: np.random.RandomState(1), lambda g: float(g.rand())),
    "python": (lambda: random.Random(1), lambda g: g.random()),
}
PATHS = {
    "attribute": Holder,
    "list": lambda g: Holder([g]),
    "dict": lambda g: Holder({"g": g}),
    "tuple": lambda g: Holder((1, g)),
    "nested": lambda g: Holder(Holder(Holder(g))),
    "partial": lambda g: functools.partial(print, g),
    "closure": lambda g: lambda: g,
    "method": lambda g: Holder(g).touch,
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("path", PATHS)
def test_generators_in_reach_are_put_back(kind, path):
    make, use = OWN[kind]
    generator = make()
    with unchanged(PATHS[path](generator)):
        first = use(generator)
    assert use(generator) == first


def test_attributes_lists_and_dicts_are_put_back():
    outer = Holder(Holder())
    before = dict(vars(outer.inner))
    log = outer.inner.log
    with unchanged(outer):
        outer.inner.touch()
        outer.inner.log = ["replaced"]
    assert vars(outer.inner) == before
    assert outer.inner.log is log
    assert log == []


def test_modules_and_skipped_objects_are_left_alone():
    module, skipped = nn.Linear(2, 2), Holder()
    holder = Holder([module, skipped])
    holder.up = holder
    with unchanged(holder, skip=[skipped]):
        skipped.touch()
        module.weight.data.zero_()
    assert skipped.count == 1
    assert not module.weight.any()


def test_untouched_containers_keep_their_identity_and_order():
    holder = Holder()
    holder.table = {"b": 1, "a": 2}
    table = holder.table
    with unchanged(holder):
        pass
    assert holder.table is table
    assert list(table) == ["b", "a"]
