"""What README, docs and examples show is run here."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import lightning_memprec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = rf"(?:{'|'.join(n for n in lightning_memprec.__all__ if n[0].isupper())})\([^)]*\)"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(text, id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] == language and (text := match[2])
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, capsys):
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    if {"model", "data"} & names or 'accelerator="gpu"' in code:
        # A run of the reader's own: its imports must work, and its arguments must be ones we have.
        imports = [line for line in code.splitlines() if line.startswith(("import ", "from "))]
        code = "\n".join([*imports, *re.findall(OURS, code)])
    exec(compile(code, "block", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_build_what_they_show(text):
    trainer = yaml.safe_load(text)["trainer"]
    for entry in [*trainer.get("callbacks", []), *trainer.get("plugins", [])]:
        module, _, name = entry["class_path"].rpartition(".")
        getattr(importlib.import_module(module), name)(**entry.get("init_args", {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_planning_for_another_card_ends_before_training(capsys):
    example("plan_for_another_card").main(layers=2)
    out = capsys.readouterr().out
    assert "RTX3060-12GB" in out
    assert "FITS" in out or "MemoryOverflowError: Training needs about" in out


@pytest.mark.slow
def test_demo_refuses_mends_and_trains(capsys):
    example("demo").main(epochs=1)
    out = capsys.readouterr().out
    assert "MemoryOverflowError: Training needs about" in out
    assert "FITS" in out
    difference = re.search(r"difference ([+-]\d+\.\d+)%", out)
    assert abs(float(difference[1])) < 0.5  # The bound of the zoo for transformers.
