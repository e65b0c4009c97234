"""What was measured goes on after a resume."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.stagnation_monitor import StagnationMonitor

from .runs import loader, make_module, make_trainer


def run(monitor, ckpt=None, epochs=1, module=None):
    torch.manual_seed(0)
    module = make_module() if module is None else module
    trainer = make_trainer(monitor, precision="bf16-true", max_epochs=epochs, log_every_n_steps=1)
    trainer.fit(
        module,
        loader(torch.utils.data.TensorDataset(torch.ones(32, 6), torch.ones(32).long())),
        ckpt_path=ckpt,
    )
    return trainer


def test_counts_go_on_after_a_resume(tmp_path):
    first, resumed = StagnationMonitor(every_n_steps=2), StagnationMonitor(every_n_steps=2)
    run(first).save_checkpoint(tmp_path / "a.ckpt")
    run(resumed, tmp_path / "a.ckpt", epochs=2)
    assert [step for step, _ in resumed.history["lost_update_ratio"]] == [2, 4, 6, 8]
    assert resumed.history["lost_update_ratio"][:2] == first.history["lost_update_ratio"]
    assert "measured on 4 steps" in resumed.in_words()


def test_a_second_fit_starts_anew():
    monitor = StagnationMonitor(every_n_steps=2)
    for _ in range(2):
        run(monitor)
    assert [step for step, _ in monitor.history["lost_update_ratio"]] == [2, 4]


def test_a_test_run_with_a_checkpoint_does_not_put_the_counts_back(tmp_path):
    monitor = StagnationMonitor(every_n_steps=2)
    module = make_module(test_step=lambda self, batch, batch_idx: None)
    trainer = run(monitor, module=module)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    run(monitor, tmp_path / "early.ckpt", epochs=2, module=module)
    history = monitor.history
    data = loader(torch.utils.data.TensorDataset(torch.ones(8, 6), torch.ones(8).long()))
    make_trainer(monitor).test(
        module, data, ckpt_path=tmp_path / "early.ckpt", verbose=False, weights_only=True
    )
    assert monitor.history == history


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"lost_update_ratio": None, "avoided_loss_ratio": None},
        {"lost_update_ratio": {"lost": "many", "intended": 1, "ratios": []}},
        {"lost_update_ratio": {"lost": 10**400, "intended": 1, "ratios": []}},
        {"lost_update_ratio": {"lost": 1, "intended": 1, "ratios": [(1, 2, 3)]}},
    ],
    ids=["empty", "none", "text", "huge", "triple"],
)
def test_a_spoilt_state_is_told_and_the_counts_start_anew(state):
    monitor = StagnationMonitor()
    with pytest.warns(UserWarning, match="could not read its state in the checkpoint .*start anew"):
        monitor.load_state_dict(state)
    assert monitor.history == {}
