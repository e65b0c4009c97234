"""A program with a LightningCLI of each Lightning namespace, started by ``test_ptq_cli.py``."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path

# Before Lightning, as import sorters have it for `pytorch_lightning`.
from lightning_memprec import PostTrainingQuantization, load_quantized

CLASS = "lightning_memprec.PostTrainingQuantization"
CONFIG = f"""
trainer:
  accelerator: cpu
  max_steps: 2
  limit_val_batches: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: {CLASS}
      init_args:
        method: vectorwise
        dirpath: FOLDER
        scheme:
          group_size: 8
"""


def main(name: str, folder: str) -> None:
    cli_class = importlib.import_module(f"{name}.cli").LightningCLI
    demos = importlib.import_module(f"{name}.demos.boring_classes")

    class Model(demos.BoringModel):
        def __init__(self, width: int = 2):
            super().__init__()
            self.layer = importlib.import_module("torch").nn.Sequential(self.layer)

    def run(*arguments: str):
        sys.argv = ["train.py", "fit", *arguments]
        return cli_class(Model, demos.BoringDataModule, save_config_callback=None)

    def printed(*arguments: str) -> str:
        out = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
            run(*arguments)
        return out.getvalue()

    config = Path(folder, "run.yaml")
    config.write_text(CONFIG.replace("FOLDER", folder))
    cli = run("--config", str(config))
    callback = cli.trainer.callbacks[0]
    assert isinstance(callback, PostTrainingQuantization)
    assert callback.path == Path(folder, "int8")
    assert load_quantized(callback.path, Model).layer[0].scheme.group_size == 8

    dump = printed("--config", str(config), "--print_config")
    assert "max_kept_layers: 8" in dump, dump
    config.write_text(dump)
    assert printed("--config", str(config), "--print_config") == dump
    text = printed(f"--trainer.callbacks.help={CLASS}")
    assert "Largest loss of the metric" in text, text
    print(name)


if __name__ == "__main__":
    _, folder, *names = sys.argv
    for each in names:
        main(each, folder)
