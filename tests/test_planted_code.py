"""Code that lies beside what people hand around: no command imports from the folder that it is started in."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from little import Little, rounds
from small_recipes import RACK, recipe_text

from isthmus.cli.main import main

LIMIT_SECONDS = 120
# `python -m` has imported some of Python's own modules, and found the package, before a line of ours runs.
OTHERS = ("cryptography", "matplotlib", "numpy", "obstore", "pyarrow", "rich", "safetensors", "tokenizers")
OTHERS += ("torch", "sitecustomize", "usercustomize")
OURS_AND_PYTHONS = ("isthmus", "json", "logging", "subprocess", "threading", "typing")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A recipe, a bucket with the file of its replica, another with a settled round, a finished run, its
    exported model, and texts."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "r.toml").write_text(
        recipe_text(RACK, name="tiny", outer={"inner_steps": 1, "rounds": 1, "keep": 8})
    )
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["init", "r.toml", "bucket"]) == 0
        assert main(["simulate", "r.toml", "--run", "run", "--quiet"]) == 0
        assert main(["export", "run", "--to", "hf", "hf", "--force"]) == 0
        (folder / "texts").mkdir()
        for name in ("a", "b"):
            (folder / "texts" / f"{name}.txt").write_text("Once upon a time there was a fox. " * 2000)
    finally:
        os.chdir(before)
    rounds(Little(str(folder / "settled"), folder / "little").replicas(), [1])
    return folder


@contextmanager
def planted(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Modules in `folder`, each of which writes its name into a file when it is imported: that file."""
    ran = folder.parent / f"{folder.name}-ran"
    files = [folder / f"{name}.py" for name in names]
    ran.unlink(missing_ok=True)
    try:
        for file in files:
            file.write_text(f"open({str(ran)!r}, 'a').write({file.stem!r} + ' ')\n")
        yield ran
    finally:
        for file in files:
            file.unlink()


def run(
    folder: Path, *words: str, flags: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-m", "isthmus", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


COMMANDS = {
    "join by a friend's file": ("keys/tiny", "join rack.isthmus.toml --threads 1"),
    "train": (".", "train r.toml --run trained --quiet"),
    "simulate": (".", "simulate r.toml --run simulated --quiet"),
    "doctor": (".", "doctor --preset nano --seconds 0.1"),
    "data prepare": ("texts", "data prepare a.txt b.txt --to ../corpus --vocab 300"),
    "generate, in a run directory": ("run", "generate . Once --max-tokens 2"),
    "generate, in an exported folder": ("hf", "generate . Once --max-tokens 2"),
    "eval": ("run", "eval ."),
    "export": ("run", "export . --to hf ../again --force"),
    "report": ("run", "report ."),
    "ledger verify": ("settled", "ledger verify ."),
    "ledger rebuild": ("settled", "ledger rebuild . --to ../theta.safetensors"),
    "status": ("settled", "status ."),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_module_beside_a_file_runs_when_a_command_reads_it(name, world):
    folder, words = COMMANDS[name]
    with planted(world / folder, OTHERS) as ran:
        done = run(world / folder, *words.split())
    assert not ran.exists(), f"these ran: {ran.read_text()}"
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_processes_of_a_fleet_take_nothing_from_there_not_even_isthmus(world):
    with planted(world, OTHERS + OURS_AND_PYTHONS) as ran:
        done = run(world, *["train", "r.toml", "--run", "of-all", "--quiet"], flags=("-P",))
    assert not ran.exists(), f"these ran: {ran.read_text()}"
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_empty_entry_of_pythonpath_is_not_that_folder_for_us_nor_for_our_processes(world):
    # As `export PYTHONPATH=$PYTHONPATH:/more` leaves it where it was not set.
    env = os.environ | {"PYTHONPATH": f":{os.environ.get('PYTHONPATH') or '/more'}"}
    with planted(world, OTHERS[:-2]) as ran:  # Python itself imports sitecustomize, long before us
        done = run(world, *["train", "r.toml", "--run", "of-env", "--quiet"], flags=("-P",), env=env)
    assert not ran.exists(), f"these ran: {ran.read_text()}"
    assert done.returncode == 0, done.stderr[-2000:]


LIBRARY = """
import subprocess, sys
from isthmus.__main__ import main
sys.argv = ["isthmus", "status", "settled"]
main()
subprocess.run([sys.executable, "-c", "import ctypes"], check=True)
"""  # as torch probes the CPU for --compile


def test_a_process_that_a_library_starts_takes_nothing_from_there_either(world):
    with planted(world, ("ctypes",)) as ran:
        subprocess.run([sys.executable, "-P", "-c", LIBRARY], cwd=world, check=True, capture_output=True)
    assert not ran.exists()
