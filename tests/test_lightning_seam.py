from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def python(code, *arguments):
    """Run code in a fresh interpreter: what is imported first matters here."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_package_import_does_not_import_lightning():
    code = """
import sys, lightning_memprec, lightning_memprec.callbacks
print([n for n in ("lightning", "lightning.pytorch", "pytorch_lightning") if n in sys.modules])
"""
    assert python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMESPACES)
def test_only_the_namespace_in_use_is_imported(name):
    code = f"""
import sys, {name}
from lightning_memprec.callbacks import MemoryPreflight
print([n for n in {NAMESPACES} if n in sys.modules], issubclass(MemoryPreflight, {name}.Callback))
"""
    done = python(code)
    assert done.stdout.strip() == f"['{name}'] True", done.stderr


def test_namespace_imported_later_is_adopted():
    code = """
from lightning_memprec import MemoryPreflight
class Mine(MemoryPreflight):
    pass
import lightning.pytorch
assert issubclass(Mine, lightning.pytorch.Callback)
import pytorch_lightning
assert isinstance(Mine(), pytorch_lightning.Callback)
assert issubclass(MemoryPreflight, lightning.pytorch.Callback)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMESPACES)
def test_lightning_cli_end_to_end(name, tmp_path):
    script = Path(__file__).with_name("lightning_cli_run.py")
    command = [sys.executable, "-W", "ignore", str(script), name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr


def test_namespace_of_a_trainer_subclass():
    from lightning_memprec._lightning import namespace_of

    for name in NAMESPACES:
        pl = importlib.import_module(name)

        class Mine(pl.Trainer):
            pass

        trainer = Mine(logger=False, accelerator="cpu", enable_checkpointing=False)
        assert namespace_of(trainer) is pl
    with pytest.raises(TypeError, match="Expected a Lightning Trainer"):
        namespace_of(object())
