"""Options of methods that learn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.methods import Method, resolve
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction import GPTQ
from lightning_memprec.quantization.targets import find_targets


def test_options_reach_the_solver():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8))
    data = [torch.randn(64, 16) @ torch.randn(16, 16)]
    options = {"act_order": True, "sequential": False, "damping": 0.1, "block_size": 3}
    targets, _ = find_targets(net, Scheme(bits=3))
    solution = GPTQ(**options)(net, targets, data, lambda module, batch: module(batch))
    plain = copy.deepcopy(net)
    quantize_(net, "gptq", bits=3, calibration=data, method_options=options)
    quantize_(plain, "gptq", bits=3, calibration=data)
    assert torch.equal(net[0].weight, solution["0"]["weight"].values)
    assert not torch.equal(net[0].weight, plain[0].weight)


def test_the_registered_method_keeps_its_defaults():
    changed = resolve("gptq", {}, {"act_order": True})
    assert changed.solver == GPTQ(act_order=True)
    assert resolve("gptq", {}).solver == GPTQ()
    assert resolve("gptq", {}, {"damping": 1}).solver == GPTQ(damping=1)  # An integer may stand for a float.


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gptq", {"act_ordr": True}, r"'gptq' has no option 'act_ordr'\. Its options are: .*act_order \(False\)"),
        ("gptq", {"act_order": "yes"}, r"'act_order' of 'gptq' must be bool, got 'yes'\. Its default is False"),
        ("gptq", {"act_order": 1}, "must be bool, got 1"),
        ("gptq", {"block_size": True}, "must be int, got True"),
        ("gptq", {"block_size": 1.5}, r"must be int, got 1\.5"),
        ("gptq", {"damping": -1.0}, "`damping` must be larger than 0"),
        ("obq", {"act_order": True}, r"Its options are: damping \(0\.01\), sequential \(True\)"),
        ("weight_only", {"damping": 0.1}, r"'weight_only' has no options, got \{'damping': 0\.1\}"),
    ],
    ids=["unknown", "text", "integer for bool", "bool for integer", "float for integer", "range", "other method",
         "no solver"],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(method, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_(
            nn.Sequential(nn.Linear(4, 4)), method, calibration=[torch.ones(2, 4)], method_options=options
        )


def test_a_function_as_a_solver_takes_no_options(monkeypatch):
    from lightning_memprec.quantization import methods
    from lightning_memprec.quantization.rounding import round_to_nearest

    def solver(model, targets, batches, forward):
        return round_to_nearest(targets)

    monkeypatch.setitem(methods._METHODS, "plain", Method("plain", Scheme(), solver))
    assert resolve("plain", {}, {}).solver is solver
    with pytest.raises(ValueError, match="has no options"):
        resolve("plain", {}, {"damping": 0.1})
