from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import NAMESPACES, loader, make_module, make_trainer


@pytest.mark.slow
def test_fsdp2_is_refused_with_a_line_that_keeps_fp32_masters():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fsdp2_run.py"))]
    done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refusal, dtypes = done.stdout.splitlines()[-2:]
    assert refusal.startswith("MisconfigurationException `MasterWeightPrecision` cannot be used with")
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)" in refusal
    assert dtypes == "{torch.float32} {torch.bfloat16}"


@pytest.mark.parametrize("name", NAMESPACES)
def test_deepspeed_is_refused(name):
    # DeepSpeed itself needs a GPU; the strategy is known by its name, and so are classes derived from it.
    base = importlib.import_module(f"{name}.strategies").SingleDeviceStrategy
    derived = type("Derived", (type("DeepSpeedStrategy", (base,), {}),), {})
    trainer = make_trainer(MasterWeightPrecision(), name=name, strategy=derived("cpu"))
    with pytest.raises(
        Exception, match=r'use `Trainer\(strategy="deepspeed", precision="bf16-mixed"\)`'
    ) as caught:
        trainer.fit(make_module(name=name), loader())
    assert (
        type(caught.value)
        is importlib.import_module(f"{name}.utilities.exceptions").MisconfigurationException
    )


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_plugin_is_accepted_by_both_trainers(name):
    importlib.import_module(name)  # As every program has before it makes a plugin.
    plugin = MasterWeightPrecision()
    trainer = make_trainer(plugin, name=name)
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "bf16-true"
    assert trainer.scaler is None
    assert make_trainer(MasterWeightPrecision("16-master"), name=name).scaler.get_scale() == 2.0**15


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="must be 'bf16-master' or '16-master', got 'bf16-true'"):
        MasterWeightPrecision("bf16-true")


def test_the_model_summary_knows_the_precision(capsys):
    trainer = make_trainer(MasterWeightPrecision(), enable_model_summary=True, fast_dev_run=1)
    trainer.fit(make_module(), loader())  # A precision it does not know would be a warning.


CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_memprec.plugins.MasterWeightPrecision
      init_args:
        precision: 16-master
        keep_fp32: KEPT
        scaler:
          class_path: torch.amp.GradScaler
          init_args:
            device: cpu
            init_scale: 128.0
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's use of jsonargparse.
@pytest.mark.parametrize("kept", ["[Linear]", "Linear"], ids=["list", "string"])
@pytest.mark.parametrize("name", NAMESPACES)
def test_lightning_cli(name, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.replace("KEPT", kept))
    demos = importlib.import_module(f"{name}.demos.boring_classes")
    cli = importlib.import_module(f"{name}.cli").LightningCLI(
        demos.BoringModel,
        demos.BoringDataModule,
        save_config_callback=None,
        seed_everything_default=False,
        args=["fit", "--config", str(config)],
    )
    plugin = cli.trainer.precision_plugin
    assert type(plugin) is MasterWeightPrecision
    assert plugin.keep_fp32 == ["Linear"]
    assert cli.trainer.scaler.get_scale() == 128.0
    assert cli.trainer.global_step == 2
