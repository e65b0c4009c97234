from __future__ import annotations

import functools
import types
from contextlib import suppress

import pytest
import torch

from lightning_memprec._user_state import unchanged_globals

LIMIT = 1
TABLE = {"a": 1}
NAMES = ["a", "b"]
RENAMED = object()


@functools.lru_cache
def answer(question):
    return question * 2


class Net:
    steps = 0
    seen = {"first": None}


def rebind():
    global LIMIT
    LIMIT = 2


def unbind():
    global RENAMED
    del RENAMED


def bind():
    globals()["NEW"] = 1


CHANGES = {
    "rebind": rebind,
    "unbind": unbind,
    "bind": bind,
    "dict": lambda: TABLE.update(b=2),
    "list": lambda: NAMES.__setitem__(0, "c"),
    "class attribute": lambda: setattr(Net, "steps", 5),
    "new class attribute": lambda: setattr(Net, "extra", 5),
    "container of a class": lambda: Net.seen.clear(),
}


def state():
    names = {name: value for name, value in globals().items() if not name.startswith("__")}
    return (
        names,
        dict(TABLE),
        list(NAMES),
        {k: v for k, v in vars(Net).items() if k[0] != "_"},
        dict(Net.seen),
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_is_undone(change):
    before = state()
    with unchanged_globals():
        change()
        assert state() != before
    assert state() == before


def test_change_is_undone_when_the_block_raises():
    with suppress(KeyError), unchanged_globals():
        rebind()
        raise KeyError
    assert LIMIT == 1


def test_cache_that_took_something_up_is_emptied_and_another_kept():
    answer.cache_clear()
    answer(1)
    with unchanged_globals():
        answer(1)
    assert answer.cache_info().currsize == 1
    with unchanged_globals():
        answer(2)
    assert answer.cache_info().currsize == 0


def test_class_in_no_module_is_looked_after():
    class Local:
        count = 0

    Local.__module__ = __name__
    with unchanged_globals(Local):
        Local.count = 1
    assert Local.count == 0


def test_operators_stay_where_they_are():
    """C++ keeps a borrowed reference to them."""
    torch.library.define("memprec_test::known", "(Tensor x) -> Tensor")
    with unchanged_globals():
        packet = torch.ops.memprec_test.known
    assert vars(torch.ops)["memprec_test"].known is packet


def test_installed_packages_are_left_alone():
    marker = types.SimpleNamespace()
    try:
        with unchanged_globals():
            torch._marker = marker
        assert torch._marker is marker
    finally:
        del torch._marker
