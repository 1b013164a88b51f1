"""What the wheel contains, and what `reproduce` says to those who have only the wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from isthmus import __version__
from isthmus.cli import reproduce

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def test_the_wheel_has_the_data_files_and_no_experiments(tmp_path):
    pytest.importorskip("setuptools", "77")
    for name in ("src", "experiments"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    wheel = tmp_path / built.stdout.splitlines()[-1]
    assert wheel.name.startswith(f"isthmus-{__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "isthmus"
    wanted = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {f"isthmus/{path.relative_to(package).as_posix()}" for path in wanted} <= names
    assert "isthmus/py.typed" in names
    assert not [name for name in names if name.startswith(("experiments", "tests"))]


@pytest.mark.parametrize("arguments", [["reproduce", "1", "--dry-run"], ["plan", "--figure", "wallclock"]])
def test_without_the_repository_one_line_says_where_it_is(arguments, tmp_path, monkeypatch, isthmus):
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)
    status, out, err = isthmus(*arguments)
    assert (status, out) == (2, "")
    assert err == f"isthmus: {reproduce.WHERE}\n"
