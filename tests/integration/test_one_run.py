"""Every feature in one run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

from lightning_memprec import MasterWeightPrecision, MemoryPreflight, quantize_
from tests.memory.zoo.reference import peak_of

from .runs import (
    NAMESPACES,
    WATCHING,
    Killed,
    counted,
    dataset,
    exported,
    find,
    fit,
    killer,
    last_checkpoint,
    left_behind,
    logged,
    make_callbacks,
    make_module,
    same,
)

OURS = tuple(kind.__name__ for kind in WATCHING)


def make_plugin(precision, name="lightning.pytorch"):
    if precision.endswith("-master"):
        return MasterWeightPrecision(precision)
    plugins = importlib.import_module(f"{name}.plugins")
    if precision == "32-true":
        return plugins.Precision()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15) if precision == "16-mixed" else None
    return plugins.MixedPrecision(precision, "cpu", scaler)


def saved(folder):
    """Every checkpoint of a run, without what our callbacks filed there."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["callbacks"] = {
            key: str(state).replace(str(folder), "")
            for key, state in checkpoint["callbacks"].items()
            if not key.startswith(OURS)
        }
        found[str(path.relative_to(folder))] = checkpoint
    return found


@pytest.mark.parametrize(
    ("precision", "name", "options"),
    [
        ("16-master", NAMESPACES[0], {}),
        ("16-master", NAMESPACES[1], {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("bf16-master", NAMESPACES[0], {"gradient_clip_val": 0.5}),
        ("16-mixed", NAMESPACES[0], {"gradient_clip_val": 0.5}),
        ("bf16-mixed", NAMESPACES[1], {}),
        ("32-true", NAMESPACES[0], {}),
    ],
)
def test_a_watched_run_is_bit_for_bit_the_run_without(precision, name, options, tmp_path):
    found = []
    for watched in (False, True):
        folder = tmp_path / str(watched)
        callbacks = [
            each for each in make_callbacks(folder, name) if watched or not isinstance(each, WATCHING)
        ]
        trainer = fit(folder, callbacks, make_plugin(precision, name), name=name, **options)
        found.append([left_behind(trainer), saved(folder), logged(folder, without="memprec/")])
    for without, beside in zip(*found, strict=True):
        assert same(without, beside)
    assert trainer.global_step == 12 // options.get("accumulate_grad_batches", 1)
    assert found[1][1]
    assert find(trainer, MemoryPreflight).verdict.when == "setup"
    assert find(trainer, MemoryPreflight).estimate.precision == precision
    totals = counted(trainer)["totals"]
    assert totals["steps"] == {"0": trainer.global_step}
    assert totals["skipped"] == {"0": 2 if precision.startswith("16") else 0}
    assert (folder / "out" / "int8" / "model.safetensors").exists()
    assert json.loads((folder / "preflight.json").read_text())
    assert json.loads((folder / "scaler.json").read_text())
    keys = {key.split("/")[1] for row in logged(folder) for key in row if key.startswith("memprec/")}
    assert keys == {"preflight", "memory", "grad_scaler", "stagnation", "quantization"}
    assert not (folder / "out of memory").exists()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("precision", ["16-master", "16-mixed"])
@pytest.mark.parametrize(
    ("hook", "step", "name"),
    [
        ("on_train_batch_start", 3, NAMESPACES[0]),
        ("on_before_optimizer_step", 9, NAMESPACES[0]),
        ("on_before_optimizer_step", 6, NAMESPACES[1]),
        ("on_validation_end", 6, NAMESPACES[0]),
    ],
)
def test_a_killed_and_resumed_run_is_bit_for_bit_the_uninterrupted_one(precision, hook, step, name, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer = fit(whole, plugin=make_plugin(precision, name), name=name)
    expected = [left_behind(trainer), counted(trainer)]

    callbacks = [*make_callbacks(broken, name), killer(name, hook, step)]
    with pytest.raises(Killed):
        fit(broken, callbacks, make_plugin(precision, name), name=name)
    assert not (broken / "out").exists()
    last = last_checkpoint(broken)
    assert last.stem == f"step={step // 2 * 2}"
    resumed = fit(broken, plugin=make_plugin(precision, name), name=name, ckpt=last)
    assert same(expected, [left_behind(resumed), counted(resumed)])
    assert exported(broken) == exported(whole)
    best = [find(each, "ModelCheckpoint").best_model_path for each in (trainer, resumed)]
    assert best[0].replace("whole", "broken") == best[1]


@pytest.mark.parametrize("source", ["averaged", "best"])
def test_the_order_of_callbacks_does_not_matter(source, tmp_path):
    found = []
    for index, order in enumerate((lambda each: each, reversed, lambda each: [*each[4:], *each[:4]])):
        folder = tmp_path / str(index)
        callbacks = list(order(make_callbacks(folder, source=source)))
        trainer = fit(folder, callbacks)
        # What a process has resident is never twice the same.
        rows = sorted(sorted(row.items()) for row in logged(folder, without="memprec/memory/"))
        estimate = find(trainer, MemoryPreflight).estimate
        found.append(
            [left_behind(trainer), saved(folder), counted(trainer), rows, estimate, exported(folder)]
        )
    for other in found[1:]:
        for first, second in zip(found[0], other, strict=True):
            assert same(first, second)


FRESH = """
import sys
import torch
from lightning_memprec import load_quantized

def build():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )

folder = sys.argv[1]
saved = torch.load(f"{folder}/outputs.pt", weights_only=True)
net = load_quantized(f"{folder}/out/int8", build).eval()
assert torch.equal(net(saved["x"]), saved["y"])
assert "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules
"""


def test_the_int8_file_is_that_of_the_averaged_masters_and_loads_in_a_fresh_process(tmp_path):
    trainer = fit(tmp_path, make_callbacks(tmp_path, submodule="net"))
    # At the end of a run Lightning moves the average into the module; the state dict is that of the masters.
    net = make_module().net
    net.load_state_dict({key[4:]: value for key, value in trainer.model.state_dict().items()})
    assert any((value != value.half()).any() for value in net.state_dict().values())
    quantize_(net)
    x = dataset(8, seed=8).tensors[0]
    with torch.no_grad():
        torch.save({"x": x, "y": net.eval()(x)}, tmp_path / "outputs.pt")
    command = [sys.executable, "-W", "error", "-c", FRESH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("averaged", [False, True], ids=["", "averaged"])
@pytest.mark.parametrize("precision", ["16-master", "16-mixed"])
def test_the_estimate_is_the_peak_of_that_very_run(precision, averaged, tmp_path):
    def callbacks(case):
        # Quantization takes its memory when training is over.
        left_out = {"PostTrainingQuantization"} | (set() if averaged else {"EMAWeightAveraging"})
        return [each for each in make_callbacks(tmp_path / case) if type(each).__name__ not in left_out]

    def run(case, callbacks, module):
        fit(
            tmp_path / case,
            callbacks,
            make_plugin(precision),
            module,
            max_epochs=1,
            limit_train_batches=2,
        )

    # Wide, so that the samples which the StagnationMonitor keeps are less than a hundredth.
    size = {"width": 1536, "depth": 2}
    preflight, *others = callbacks("estimated")
    preflight.stop_after = True
    run("estimated", [preflight, *others], make_module(**size))
    module, (_, *others) = make_module(**size), callbacks("measured")
    sizes = [parameter.nbytes for parameter in module.parameters()]  # before the masters halve them
    real = sum(sizes) + peak_of(lambda: run("measured", others, module))
    expected = preflight.estimate.peak_allocated_bytes
    if averaged:
        # The report names what it leaves out: the averaged copy. Lightning's update of it makes three more tensors
        # of the largest weight, when the step's own temporaries are gone.
        fixed = preflight.estimate.breakdown.fixed_bytes
        expected = sum(sizes) + max(expected, fixed + 3 * max(sizes))
    assert expected == pytest.approx(real, rel=0.01)
