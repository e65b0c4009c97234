"""A program with a LightningCLI and every feature in its YAML; started by ``test_cli.py``."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path

from lightning_memprec import MasterWeightPrecision, load_quantized

CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 4
  limit_val_batches: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_memprec.MasterWeightPrecision
      init_args:
        precision: 16-master
        keep_fp32: [LayerNorm]
  logger:
    - class_path: NAME.loggers.CSVLogger
      init_args:
        save_dir: FOLDER
        name: log
        version: ""
  callbacks:
    - class_path: lightning_memprec.MemoryPreflight
      init_args:
        device: A100-80GB
        report_path: FOLDER/preflight.json
    - class_path: lightning_memprec.GradScalerMonitor
      init_args:
        every_n_steps: 2
        report_path: FOLDER/scaler.json
    - class_path: lightning_memprec.StagnationMonitor
      init_args:
        every_n_steps: 1
    - class_path: NAME.callbacks.EMAWeightAveraging
      init_args:
        decay: 0.5
    - class_path: NAME.callbacks.LearningRateMonitor
    - class_path: NAME.callbacks.ModelCheckpoint
      init_args:
        dirpath: FOLDER/best
    - class_path: lightning_memprec.PostTrainingQuantization
      init_args:
        dirpath: FOLDER
        source: averaged
"""
OURS = ("MemoryPreflight", "GradScalerMonitor", "StagnationMonitor", "PostTrainingQuantization")


def main(name: str, folder: str) -> None:
    cli_class = importlib.import_module(f"{name}.cli").LightningCLI
    demos = importlib.import_module(f"{name}.demos.boring_classes")

    class Model(demos.BoringModel):
        def __init__(self):
            super().__init__()
            nn = importlib.import_module("torch.nn")
            self.layer = nn.Sequential(nn.LayerNorm(32), self.layer)

    def run(*arguments: str):
        sys.argv = ["train.py", "fit", *arguments]
        return cli_class(Model, demos.BoringDataModule)

    def printed(*arguments: str) -> str:
        out = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
            run(*arguments)
        return out.getvalue()

    config = Path(folder, "run.yaml")
    config.write_text(CONFIG.replace("FOLDER", folder).replace("NAME", name))
    dump = printed("--config", str(config), "--print_config")
    config.write_text(dump)

    trainer = run("--config", str(config)).trainer
    assert isinstance(trainer.precision_plugin, MasterWeightPrecision)
    ours = {type(each).__name__: each for each in trainer.callbacks if type(each).__name__ in OURS}
    assert set(ours) == set(OURS)
    assert ours["MemoryPreflight"].verdict.status == "fits"
    assert ours["GradScalerMonitor"].health.totals.steps == {0: 4}
    taken = 4 - ours["GradScalerMonitor"].health.totals.skipped[0]
    assert len(ours["StagnationMonitor"].history["avoided_loss_ratio"]) == taken
    assert load_quantized(ours["PostTrainingQuantization"].path, Model)
    for written in ("preflight.json", "scaler.json", "log/metrics.csv", "log/config.yaml"):
        assert Path(folder, written).exists(), written
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
