"""What only reads a run's bucket answers without torch, which takes seconds to load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules], file=sys.stderr)"
COMMAND = f"import sys; from isthmus.cli.main import main; code = main(sys.argv[1:]); {HEAVY}; sys.exit(code)"
LOOK = (
    "import json, sys; from isthmus.page.source import open_source; "
    "from isthmus.page.state import StateBuilder; from isthmus.page.server import Server, Watcher; "
    "from isthmus.page.tensorboard import EventWriter; "
    f"print(json.dumps(StateBuilder().build(open_source(sys.argv[1]).look()))); {HEAVY}"
)


@pytest.fixture(scope="module")
def made(settled, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket that a replica may leave."""
    return shutil.copytree(settled.folder, tmp_path_factory.mktemp("light") / "made")


def answer(code: str, *arguments: str) -> str:
    """stdout of a new Python, which must have loaded nothing heavy."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    return done.stdout


def test_status_loads_no_torch(made: Path):
    assert "round 2 of 3 is settled" in answer(COMMAND, "status", str(made / "bucket"))
    assert json.loads(answer(COMMAND, "status", str(made / "bucket"), "--json"))["round"] == 2


def test_the_ledger_is_shown_without_torch(made: Path):
    rows = json.loads(answer(COMMAND, "ledger", "show", str(made / "bucket"), "--json"))
    assert [sorted(row["contributors"]) for row in rows] == [["rack-0", "rack-1"]] * 2


def test_watching_a_bucket_loads_no_torch(made: Path):
    state = json.loads(answer(LOOK, str(made / "bucket")))
    assert (state["run"]["round"], state["last"]["train_by_kind"].keys()) == (2, {"rack"})


def test_leaving_loads_no_torch(made: Path):
    key = str(made / "keys" / "rack-0.key")
    said = answer(COMMAND, "leave", str(made / "bucket"), "--replica", "rack-0", "--key", key)
    assert said.startswith("rack-0 will leave at the end of the round that it is in")
