"""What README, docs and examples show is run here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_memprec
from lightning_memprec.cli.main import build_parser

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
        nodes = [node for node in ast.parse(code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports = [ast.unparse(node) for node in nodes]
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


def commands(text):
    """Words of each command in a shell block; comments, and what a shell does with the result, are cut."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        ends = [i for i, word in enumerate(words) if word in {"|", "||", "&&", ">"}]
        if words:
            yield words[: ends[0]] if ends else words


@pytest.mark.parametrize("text", [*blocks("bash"), *blocks("console")])
def test_commands_exist(text):
    for program, *arguments in commands(text if "$ " not in text else first_command(text)):
        if program == "lightning-memprec":
            build_parser().parse_args(arguments)
        elif program == "python" and arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), arguments[
                0
            ]


def first_command(text):
    """The command of a console block, without what it printed."""
    return re.match(r"\$ (?:.*\\\n)*.*\n", text)[0]


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


def stated_figures():
    """Rows of the tables of `how-exact.md`, each with the page that is named last, which explains it."""
    page, rows = None, []
    for line in (ROOT / "docs" / "how-exact.md").read_text().splitlines():
        page = next(iter(re.findall(r"\]\(([\w-]+\.md)", line)), page)
        figures = re.findall(r"\d+\.\d+", line)
        if line.startswith("|") and figures:
            rows.append(pytest.param(page, figures, id=f"{page}:{line[2:30]}"))
    return rows


@pytest.mark.parametrize(("page", "figures"), stated_figures())
def test_gathered_figures_are_those_of_their_pages(page, figures):
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / page).read_text()
    assert [figure for figure in figures if figure not in pages] == []


def test_every_benchmark_is_among_the_gathered_figures():
    page = (ROOT / "docs" / "how-exact.md").read_text()
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "reconstruction_peers"]
    runnable = {path.stem for path in scripts if '__name__ == "__main__"' in path.read_text()}
    assert {name for name in runnable if not re.search(rf"benchmarks\.{name}\b", page)} == set()


# Runs the commands one after the other in one process, as a shell would in one each.
RUNNER = """
import json, runpy, sys, traceback
import lightning.pytorch
sys.modules["rich"] = None  # As in a fresh environment: rich breaks lines elsewhere.
sys.path.insert(0, "")
from lightning_memprec.cli.main import main
for words in json.loads(sys.argv[1]):
    print("\\n@@@", *words, flush=True)
    try:
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        else:
            main(words[1:])
    except Exception:
        print(traceback.format_exc())
    sys.stdout.flush()
"""


def words_of(line):
    """A line without its figures and bars, which may differ from one machine to another."""
    return re.sub(r"[-+]?[\d,.]+", "0", " ".join(line.rstrip("#█ ").split()))


@pytest.mark.slow
def test_first_run_prints_what_it_shows(tmp_path):
    page = (ROOT / "docs" / "first-run.md").read_text()
    steps = []  # Pairs of commands and of what they print.
    for language, title, text in re.findall(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```', page, re.M | re.S):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "text":
            steps[-1][1].extend(line for line in text.splitlines() if line not in {"", "..."})
        else:
            steps.append((list(commands(text)), []))
    steps = [(run, shown) for run, shown in steps if run[0][:3] != ["python", "-m", "venv"]]
    result = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps([words for run, _ in steps for words in run])],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=True,
    )
    outputs = result.stdout.replace(f"{tmp_path}/", "").split("\n@@@ ")[1:]
    assert len(outputs) == len(steps)
    for output, (run, shown) in zip(outputs, steps, strict=True):
        printed = {words_of(line) for line in output.splitlines()}
        missing = [line for line in shown if words_of(line) not in printed]
        assert not missing, f"{run} does not print {missing}, but:\n{output}"
    assert (tmp_path / "preflight.html").exists()


def documented():
    """Objects that the page of the API shows."""
    found = []
    for target in re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        module, _, name = target.rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    return found


def public_names():
    """Names that the package and its subpackages export, and those that pages and examples import from modules."""
    for package in ("", ".callbacks", ".plugins", ".report", ".quantization.reconstruction"):
        module = f"lightning_memprec{package}"
        yield from ((module, name) for name in importlib.import_module(module).__all__ if name[0] != "_")
    for path in [*PAGES, *(ROOT / "examples").rglob("*.py")]:
        imports = re.findall(
            r"^from (lightning_memprec\.[a-z][\w.]*) import ([\w, ]+)$", path.read_text(), re.M
        )
        yield from ((module, name) for module, names in imports for name in names.split(", "))


@pytest.mark.parametrize(("module", "name"), sorted(set(public_names())))
def test_api_page_has_every_public_name(module, name):
    value = getattr(importlib.import_module(module), name)
    assert any(shown is value for shown in documented()), f"add `::: {module}.{name}` to docs/api.md"


def script_of_docs(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_picture_of_the_layers_is_that_of_the_contract():
    drawing = script_of_docs("draw_layers")
    layers = drawing.layers_of((ROOT / "pyproject.toml").read_text())
    assert (ROOT / "docs" / "assets" / "layers.svg").read_text() == drawing.draw(layers), (
        "run `python docs/draw_layers.py`"
    )


def test_text_without_layers_is_refused_by_the_drawing():
    with pytest.raises(ValueError, match=r"Give that of pyproject\.toml"):
        script_of_docs("draw_layers").layers_of("[project]")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted(path.name for path in PAGES[1:])
