"""The wheel, built and installed alone, does from an empty folder what README's first steps say."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from isthmus import __version__
from isthmus.config.shipped import shipped_names
from isthmus.runlog import RunDir

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
SMALL = [
    word
    for setting in (
        "model.layers=2", "inner.batch=2", "inner.micro_batches=1", "outer.inner_steps=1", "outer.rounds=1",
        "data.eval_batches=1", "replicas.rack.count=1", "replicas.edge.count=1",
    )
    for word in ("--set", setting)
]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because the backend leaves build/ behind."""
    pytest.importorskip("setuptools", "77")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "experiments"):
        ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, capture_output=True, text=True, check=True
    )
    return tree / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone in a folder; its dependencies are those of this interpreter. Needs no network."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--target", folder, wheel], check=True)
    return folder


@pytest.fixture
def installed(target: Path, tmp_path: Path):
    """Run the installed command in an empty folder: installed("plan", "demo") -> what it printed."""

    def run(*arguments: str, status: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(target)}
        done = subprocess.run(
            [sys.executable, target / "bin" / "isthmus", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_the_wheel_has_the_data_files_and_no_experiments(wheel: Path):
    assert wheel.name.startswith(f"isthmus-{__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "isthmus"
    wanted = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {f"isthmus/{path.relative_to(package).as_posix()}" for path in wanted} <= names
    assert {f"isthmus/recipes/{name}.toml" for name in shipped_names()} | {"isthmus/py.typed"} <= names
    assert not [name for name in names if name.startswith(("experiments", "tests", "recipes"))]


def test_recipes_are_found_by_name_from_an_empty_folder(installed, target: Path, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = [sys.executable, "-c", "import isthmus; print(isthmus.__file__)"]
    found = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(target / "isthmus" / "__init__.py")  # and not the checkout's
    assert [line.split()[0] for line in installed("new", "--list").splitlines()] == shipped_names()
    assert "demo" in installed("plan", "demo")
    installed("new", "mine.toml", "--like", "demo")
    assert "mine" in installed("plan", "mine.toml")
    installed("init", "demo", "bucket")
    assert (tmp_path / "bucket" / "run.json").is_file()
    assert 'did you mean "demo"?' in installed("plan", "dem", status=2)
    assert "python -m experiments" in installed("reproduce", "1", status=2)
    assert "178m-recommended" in installed("completion", "bash")


def test_the_first_steps_lead_from_an_empty_folder_to_a_model(installed, tmp_path: Path):
    """Text and a recipe of one's own, a run of it, then a fleet of real processes, and what its last lines
    name."""
    (tmp_path / "my-texts").mkdir()
    for i in range(200):
        (tmp_path / "my-texts" / f"{i}.txt").write_text(f"On day {i} it was the sea that came to us. " * 40)
    installed("data", "prepare", "my-texts/", "--to", "corpus/", "--vocab", "300")
    installed("new", "mine.toml")
    installed(
        "simulate", "mine.toml", "--run", "own", "--set", "data.corpus=corpus/", *SMALL, "--device", "cpu"
    )
    assert RunDir.open(tmp_path / "own").about.get("status") == "finished"
    last = installed("train", "demo", *SMALL, "--device", "cpu").splitlines()[-3:]
    assert [row.round for row in RunDir.open(tmp_path / "runs" / "demo").rows()] == [0, 1]
    for line, word in zip(last, ("generate", "export", "watch"), strict=True):
        assert f"isthmus {word} runs/demo" in line
    assert "isthmus extend runs/demo --rounds 1" in last[2]
    text = installed("generate", "runs/demo", "It was the", "--max-tokens", "2", "--device", "cpu")
    assert text.startswith("It was the")
    installed("export", "runs/demo", "--to", "hf", "demo-hf")
    assert (tmp_path / "demo-hf" / "config.json").is_file()
    assert "goes on from 1 to 2 rounds" in installed("extend", "runs/demo", "--rounds", "1")
