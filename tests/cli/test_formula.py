import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprec.__about__ import __version__
from lightning_memprec.cli.main import main
from lightning_memprec.memory.formula import estimate_formula
from lightning_memprec.memory.transformer import TransformerShape

SIZES = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--sequence", "2048"]


def run_formula(capsys, *arguments):
    code = main(["formula", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(text):
    """Return the figures of the table, by part: GiB and GB."""
    parts = ("parameters", "gradients", "optimizer states", "activations", "logits", "loss copies", "total")
    found = {}
    for line in text.splitlines():
        for part in parts:
            if line.startswith(f"{part}  "):
                found[part] = tuple(float(word) for word in line[20:].split()[:2])
    return found


def test_table_of_the_7b_example(capsys):
    code, out, err = run_formula(
        capsys, "--parameters", "7B", *SIZES, "--recipe", "amp-adam", "--vocabulary", "32000"
    )
    assert code == 0
    assert err == ""
    table = rows(out)
    assert table["parameters"] == (26.08, 28.0)
    assert table["optimizer states"] == (52.15, 56.0)
    assert table["activations"] == (33.5, 35.97)
    assert table["logits"] == (0.12, 0.13)
    assert table["total"] == (138.66, 148.89)
    assert "This is a closed form: no model was run." in out
    assert "`lightning-memprec estimate` traces your own training step" in out


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("7B", 7 * 10**9),
        ("1.5b", 1_500_000_000),
        ("350M", 350_000_000),
        ("124439808", 124_439_808),
        ("2e9", 2 * 10**9),
    ],
)
def test_json_agrees_with_the_function(capsys, text, parameters):
    options = [
        "--recompute",
        "--fused-attention",
        "--devices",
        "4",
        "--zero-stage",
        "2",
        "--batch",
        "2",
        "--json",
    ]
    code, out, _ = run_formula(capsys, "--parameters", text, *SIZES, *options, "--recipe", "half-adam")
    shape = TransformerShape(layers=32, hidden=4096, heads=32, sequence=2048, batch=2)
    expected = estimate_formula(
        parameters=parameters,
        shape=shape,
        recipe="half-adam",
        recompute=True,
        fused_attention=True,
        devices=4,
        zero_stage=2,
    )
    assert code == 0
    assert json.loads(out) == expected.to_dict() | {"device": None}


@pytest.mark.parametrize(
    ("device", "parameters", "fits", "minimum_devices"),
    [("H100-80GB", "4B", True, 1), ("NVIDIA H100 80GB HBM3", "7B", False, 2), ("t4", "7B", False, 8)],
)
def test_device_is_compared(capsys, device, parameters, fits, minimum_devices):
    code, out, _ = run_formula(capsys, "--parameters", parameters, "--device", device)
    assert code == (0 if fits else 3)
    assert ("kernels: fits." if fits else "kernels: does not fit.") in out
    assert f"needs at least {minimum_devices} of them" in out
    assert "unsharded peaks" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # 112 GB; in stage 1 the 8 bytes of states are shared, in stage 3 all 16.
        (
            ["--zero-stage", "3", "--device-memory", "20GB"],
            "With ZeRO stage 3, the run needs at least 6 of them",
        ),
        (
            ["--zero-stage", "1", "--device-memory", "70GB"],
            "With ZeRO stage 1, the run needs at least 4 of them",
        ),
        (
            ["--zero-stage", "1", "--device-memory", "50GB"],
            "No number of them is enough: what ZeRO stage 1 leaves",
        ),
        (["--device-memory", "20GB"], "Divided evenly, the unsharded total needs at least 6 of them"),
        # 28 GB of weights stay.
        (["--offload", "optimizer", "--device-memory", "20GB"], "needs at least 2 of them"),
        (["--offload", "optimizer", "--device-memory", "30GB"], "The device offers 27.94 GiB: fits."),
        (["--device", "t4", "--device-memory", "1TB"], "T4-16GB offers 931.32 GiB, of which about"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_devices_are_counted_with_offload_and_stage(capsys, arguments, words):
    code, out, _ = run_formula(capsys, "--parameters", "7B", *arguments)
    assert code == (3 if "does not fit." in out else 0)
    assert words in out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 0), (["--device-memory", "200GB"], 0), (["--device-memory", "24GiB"], 3), (["--device", "T4"], 3)],
    ids=["nothing-to-compare", "fits", "too-small", "device"],
)
def test_the_exit_code_tells_whether_it_fits(capsys, arguments, code):
    assert run_formula(capsys, "--parameters", "7B", *arguments)[0] == code
    assert run_formula(capsys, "--parameters", "7B", *arguments, "--json")[0] == code


def test_offloaded_memory_is_shown(capsys):
    _, out, _ = run_formula(
        capsys, "--parameters", "1B", "--recipe", "half-master-adam", "--offload", "optimizer"
    )
    (line,) = (line for line in out.splitlines() if line.startswith("in host memory"))
    assert line.split()[-2:] == ["13.04", "14.00"]


def test_example_of_the_documentation(capsys):
    page = Path(__file__).parents[2].joinpath("docs", "closed-form.md").read_text(encoding="utf-8")
    command, printed = re.search(
        r"```console\n\$ lightning-memprec formula (.*?B)\n(.*?)\.\.\.\n", page, re.DOTALL
    ).groups()
    _, out, _ = run_formula(capsys, *shlex.split(command.replace("\\\n", " ")))
    assert out.startswith(printed)


def test_what_is_not_counted_is_said(capsys):
    assert "Activations are not counted: add --layers" in run_formula(capsys, "--parameters", "7B")[1]
    assert "Logits and loss are not counted: add --vocabulary" in run_formula(capsys, *SIZES)[1]
    assert "not counted" not in run_formula(capsys, *SIZES, "--vocabulary", "100")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No model was described. Give --parameters, or --layers"),
        (["--layers", "3"], "sizes are incomplete. Add --hidden, --heads, --sequence."),
        (["--parameters", "7B", "--devices", "0"], "must be positive"),
        ([*SIZES, "--batch", "-1"], "`--batch` must be at least 1, got -1"),
    ],
    ids=str,
)
def test_bad_values_return_2_with_a_message(capsys, arguments, message):
    code, out, err = run_formula(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "seven"], "cannot read 'seven' as a count"),
        (["--parameters", "7B", "--device", "A100"], "Did you mean A100-80GB, A100-40GB?"),
        (["--parameters", "7B", "--device", "H900"], "by `--device-memory` alone"),
        (["--parameters", "7B", "--device-memory", "much"], "argument --device-memory"),
        (["--parameters", "7B", "--recipe", "fp4"], "invalid choice: 'fp4'"),
        (["--parameters", "7B", "--zero-stage", "4"], "invalid choice: 4"),
    ],
    ids=str,
)
def test_bad_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["formula", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["formula", "--help"], ["estimate", "--help"], ["--version"]], ids=str
)
def test_help_and_version_import_neither_torch_nor_lightning(arguments):
    program = (
        "import sys, atexit\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'jsonargparse'}\n"
        "atexit.register(lambda: print('imported:', sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from lightning_memprec.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert "imported: []" in done.stderr
    assert (__version__ if arguments == ["--version"] else "usage: lightning-memprec") in done.stdout


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memprec", "formula", "--parameters", "1B"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert "1,000,000,000 parameters, fp32-adam (16 B each)" in done.stdout
    failed = subprocess.run(
        [sys.executable, "-m", "lightning_memprec", "formula"], capture_output=True, check=False, timeout=60
    )
    assert failed.returncode == 2
