"""A program with a LightningCLI, started by ``test_lightning_seam.py`` for each Lightning namespace."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path

import pytest

# Before Lightning, as import sorters have it for `pytorch_lightning`.
from lightning_memprec import MemoryOverflowError
from lightning_memprec.callbacks import MemoryPreflight

CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_memprec.MemoryPreflight
      init_args:
        device_memory: {memory}
        on_overflow: raise
"""


def main(name: str, folder: str) -> None:
    cli_class = importlib.import_module(f"{name}.cli").LightningCLI
    demos = importlib.import_module(f"{name}.demos.boring_classes")

    def run(*arguments: str):
        sys.argv = ["train.py", "fit", *arguments]
        return cli_class(demos.BoringModel, demos.BoringDataModule, save_config_callback=None)

    def printed(*arguments: str) -> str:
        out = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
            run(*arguments)
        return out.getvalue()

    config = Path(folder, "run.yaml")
    config.write_text(CONFIG.format(memory="1GiB"))
    cli = run("--config", str(config))
    callback = cli.trainer.callbacks[0]
    assert isinstance(callback, MemoryPreflight)
    assert callback.verdict.status == "fits"
    assert cli.trainer.global_step == 2

    config.write_text(CONFIG.format(memory="1KiB") + "        safety_margin: 0.5\n")
    with pytest.raises(MemoryOverflowError) as caught:
        run("--config", str(config))
    assert caught.value.capacity_bytes == 1024

    short = ["--trainer.callbacks+=MemoryPreflight", "--trainer.callbacks.device=A100-80GB"]
    dump = printed(*short, "--print_config")
    assert "class_path: lightning_memprec.MemoryPreflight" in dump, dump
    assert "device: A100-80GB" in dump, dump
    config.write_text(dump)
    assert printed("--config", str(config), "--print_config") == dump
    text = printed("--trainer.callbacks.help=lightning_memprec.MemoryPreflight")
    assert "Fraction of the memory to keep free" in text, text
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
