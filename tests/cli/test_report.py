"""``lightning-memprec report``, and the files that ``estimate`` writes."""

from __future__ import annotations

import json
import pickle
import warnings

import pytest
import torch
import yaml

from lightning_memprec import estimate_memory
from lightning_memprec.cli.main import main
from lightning_memprec.memory.result import Remedy
from lightning_memprec.report import format_estimate, format_html, judge, save_report

PROGRAM = """
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Reads(BoringModel):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum() if self.layer.weight.sum() > 0 else None
"""


@pytest.fixture(scope="module")
def estimate():
    return estimate_memory(
        lambda: torch.nn.Linear(64, 64), torch.empty(8, 64), optimizer=torch.optim.Adam, device="T4-16GB"
    )


@pytest.fixture
def file(tmp_path, estimate):
    save_report(tmp_path / "run.json", estimate, *report_on(estimate))
    return tmp_path / "run.json"


def report_on(estimate):
    verdict = judge(estimate.minimum_device_bytes, 2**20, safety_margin=0.05, when="setup")
    return verdict, (Remedy("a", "a change", "how()", 5, 6, True),), ("A note.",)


def test_the_text_is_that_of_the_estimate(file, estimate, capsys):
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == format_estimate(estimate, *report_on(estimate)) + "\n"


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--format", "html"], None), (["--out"], "new/page.html"), (["--format", "html", "-o"], "page.txt")],
)
def test_the_page_is_that_of_the_estimate(file, estimate, capsys, tmp_path, options, name):
    path = tmp_path / (name or "")
    assert main(["report", str(file), *options, *([str(path)] if name else [])]) == 0
    out = capsys.readouterr().out
    assert (path.read_text() if name else out) == format_html(estimate, *report_on(estimate))
    assert bool(out) == (name is None)


def test_text_goes_into_a_file_too(file, estimate, tmp_path):
    assert main(["report", str(file), "--out", str(tmp_path / "a.txt")]) == 0
    assert (tmp_path / "a.txt").read_text() == format_estimate(estimate, *report_on(estimate)) + "\n"


def test_an_estimate_alone_is_shown(tmp_path, estimate, capsys):
    path = tmp_path / "estimate.json"
    path.write_text(json.dumps(estimate.to_dict()))
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == format_estimate(estimate) + "\n"


def test_a_report_without_an_estimate_says_why(tmp_path, capsys):
    save_report(tmp_path / "r.json", None, judge(None, None, reason="No batch came to hand."))
    assert main(["report", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out == "UNDETERMINED: No batch came to hand.\n"


@pytest.mark.parametrize("form", ["text", "html"])
def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys, estimate, form):
    values = estimate.to_dict()
    values["by_module"][0]["name"] = "\x1b]0;title\x07\ud800\u202e"
    values["assumptions"][0]["text"] = "over\x1b[2Jwritten"
    (tmp_path / "e.json").write_text(json.dumps(values))
    assert main(["report", str(tmp_path / "e.json"), "--format", form]) == 0
    out = capsys.readouterr().out
    assert "\ud800" not in out
    assert ("\x1b" in out) == (form == "html")  # A browser shows it as a box.
    if form == "text":
        assert r"\x1b]0;title\x07\ud800\u202e" in out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "No such file"),
        ("{", [], "is no JSON"),
        ("{}", [], "holds no report"),
        ('{"schema_version": 99}', [], "`schema_version` 99"),
        ('{"schema_version": 1}', [], "`estimate.peak_allocated_bytes` is missing"),
        ("good", ["--out", "run.pickle"], "estimate --snapshot"),
        ("good", ["--out", "r.json/page.html"], "r.json"),
        ("good", ["--out", "other.json"], "End the name in .html or .txt, or give `--format`"),
        ("good", ["--out", "./r.json", "--format", "html"], "would be lost. Name another file in `--out`"),
    ],
    ids=["missing", "broken", "other", "future", "empty", "snapshot", "folder", "json", "itself"],
)
def test_what_cannot_be_shown_exits_with_2_and_says_why(
    tmp_path, estimate, capsys, content, options, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(json.dumps(estimate.to_dict()) if content == "good" else content)
    assert main(["report", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("lightning-memprec report: error: ")
    assert not captured.out
    assert sorted(p.name for p in tmp_path.iterdir()) == (["r.json"] if content else [])


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "reported.py").write_text(PROGRAM)
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "trainer": {"accelerator": "cpu"},
                "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
                "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Lightning 2.6 calls jsonargparse 4.49+ by deprecated names.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield tmp_path


def test_estimate_writes_a_page_and_a_snapshot(program, capsys):
    files = ["--html", "new/run.html", "--snapshot", "new/run.pickle"]
    assert main(["estimate", "--config", "run.yaml", "--device-memory", "1GiB", "--json", *files]) == 0
    (program / "run.json").write_text(capsys.readouterr().out)
    assert main(["report", "run.json", "--out", "again.html"]) == 0
    assert (program / "again.html").read_text() == (program / "new" / "run.html").read_text()
    snapshot = pickle.loads((program / "new" / "run.pickle").read_bytes())
    assert snapshot["device_traces"][0]


def test_a_page_that_cannot_be_written_is_bad_usage(program, capsys):
    (program / "file").write_text("")
    options = ["--config", "run.yaml", "--device-memory", "1GiB", "--html", "file/run.html"]
    assert main(["estimate", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lightning-memprec estimate: error: ")
    assert "FITS" not in captured.out


def test_a_page_without_an_estimate_gives_the_reason(program, capsys):
    (program / "run.yaml").write_text(
        (program / "run.yaml")
        .read_text()
        .replace("lightning.pytorch.demos.boring_classes.BoringModel", "reported.Reads")
    )
    options = [
        "--config",
        "run.yaml",
        "--device-memory",
        "1GiB",
        "--html",
        "run.html",
        "--snapshot",
        "run.pickle",
    ]
    assert main(["estimate", *options]) == 5
    assert "UNDETERMINED" in (program / "run.html").read_text()
    assert not (program / "run.pickle").exists()
