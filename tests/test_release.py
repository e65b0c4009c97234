"""What a release promises: its version, its lower bounds, and the files it ships."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lightning_memprec

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there.
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
# Tools that look at the code from outside: no test of the package depends on their version.
TOOLS = {"build", "import-linter", "mypy", "ruff", "twine"}


def canonical(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [
        *project["dependencies"],
        *(need for extra in sorted({*extras} - {"docs", "nvml", "others"}) for need in extras[extra]),
    ]
    found = [
        match.groups() for need in needs if (match := re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", need))
    ]
    return [(package, bound) for package, bound in found if package not in TOOLS]


def release(version):
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize(("package", "bound"), [pytest.param(*pair, id=pair[0]) for pair in bounds()])
def test_each_lower_bound_is_the_version_that_make_test_oldest_installs(package, bound):
    pins = re.findall(
        r"^([\w.-]+)==([\d.]+)$", (ROOT / "requirements" / "oldest.txt").read_text(), re.MULTILINE
    )
    oldest = {canonical(name): release(version) for name, version in pins}[canonical(package)]
    # A bound names no third number: the first release of that minor that can be installed is meant.
    assert oldest[: len(release(bound))] == release(bound)


def test_the_changelog_describes_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", lightning_memprec.__version__]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return folder


def files_below(folder, *, without="*.pyc"):
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not path.match(without)
    }


@pytest.mark.extended
def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_below("lightning_memprec")
    assert "lightning_memprec/py.typed" in names


@pytest.mark.extended
def test_the_sdist_holds_what_runs_the_tests_and_builds_the_site(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"benchmarks", "docs", "examples", "lightning_memprec", "requirements", "tests"}
    assert names >= {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "PKG-INFO",
        "README.md",
        "mkdocs.yml",
    }
    assert not [name for name in names if name.endswith((".pyc", ".ckpt", ".pt", ".log"))]


@pytest.mark.extended
def test_the_page_on_a_package_index_has_no_dead_links(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode()
    assert "# lightning_memprec" in page
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []
