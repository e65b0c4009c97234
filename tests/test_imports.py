"""What an import brings in, seen from fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")


def python(code, *, blocked=()):
    code = BLOCK.format(blocked=blocked) + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_imports_neither_torch_nor_lightning():
    code = "import lightning_memprec; print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'numpy', 'lightning', 'pytorch_lightning', 'rich', 'jsonargparse'}))"  # noqa: E501
    assert python(code) == "[]"


def test_the_estimate_brings_in_torch_and_little_else():
    code = """
import torch
before = set(sys.modules)
from lightning_memprec import estimate_memory, MemoryEstimate, TraceError
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(added & {"lightning", "pytorch_lightning", "bitsandbytes", "torchmetrics", "transformers", "matplotlib", "rich", "jsonargparse"}))
"""  # noqa: E501
    assert python(code) == "[]"


def test_a_plain_module_is_estimated_where_lightning_is_not_installed():
    code = """
import torch
from lightning_memprec import estimate_memory
for name in ("lightning", "pytorch_lightning"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
estimate = estimate_memory(
    torch.nn.Linear(256, 256, bias=False), torch.ones(1, 256), optimizer=torch.optim.Adam, precision="bf16-mixed",
    gradient_clip_val=1.0, device="A100-80GB",
)
print(estimate.breakdown.parameters_bytes)
"""
    assert python(code, blocked=LIGHTNING) == str(4 * 256 * 256)


@pytest.mark.parametrize(
    "module",
    [
        "memory.formula",
        "memory.remedies",
        "master_weights.export",
        "master_weights.inspect",
        "master_weights.store",
        "master_weights.low_memory",
        "scaling.choose",
        "scaling.compare",
        "scaling.health",
        "quantization.convert",
        "_devices",
        "memory.recipes",
        "report.text",
        "report.verdict",
        "_units",
    ],
)
def test_pure_modules_import_where_lightning_is_not_installed(module):
    python(f"import lightning_memprec.{module}", blocked=LIGHTNING)


def test_importing_the_package_costs_little():
    code = """
import time
start = time.perf_counter()
import lightning_memprec
print(time.perf_counter() - start)
"""
    assert float(python(code)) < 0.2
