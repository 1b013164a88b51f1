"""Nothing in src unpickles data: by reading the source, and by watching a replica of two processes train."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_recipes import pipelined, recipe_text, replicas

SOURCE = Path(__file__).parents[1] / "src" / "isthmus"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
# torch.distributed's collectives over objects, and the ways in which multiprocessing carries them.
NAMES = {
    *("send_object_list", "recv_object_list", "all_gather_object", "gather_object"),
    *("broadcast_object_list", "scatter_object_list", "monitored_barrier_object"),
    *("SimpleQueue", "JoinableQueue", "Pipe", "SyncManager", "BaseManager", "Manager"),
    *("DynamicRendezvousHandler", "C10dRendezvousBackend", "EtcdRendezvousBackend", "create_backend"),
    *("read_pickle", "to_pickle", "weights_only", "allow_pickle", "Unpickler"),
}
# A supervisor forks its own workers: a function's name, strings and a pipe of its own, which carries JSON.
OURS = {
    "supervisor.py": ("multiprocessing.connection",),
    "workers.py": (
        *("imports multiprocessing", "multiprocessing.connection", "multiprocessing.process"),
        "imports Pipe",
    ),
    "worker.py": ("multiprocessing.connection",),
    "leaving.py": ("multiprocessing.connection",),
    "hf.py": ("uses torch.load", "passes weights_only"),  # the state in a checkpoint of the user's Trainer
}
PACKAGES = ("multiprocessing", "torch.multiprocessing", "torch.distributed.rpc")


def dotted(node: ast.expr) -> str:
    """torch.load for the expression torch.load; "" for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    aliases = {"np": "numpy", "numpy": "numpy", "torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {name.asname: name.name for name in node.names if name.asname}
            modules, names = [name.name for name in node.names], []
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            names = [name.name for name in node.names]
        else:
            modules, names = [], []
        for module in modules:
            if module.split(".")[0] in MODULES or module.startswith(PACKAGES):
                yield node.lineno, f"imports {module}"
            if "elastic.rendezvous" in module and module.rsplit(".", 1)[-1] not in ("rendezvous", "api"):
                yield node.lineno, f"imports {module}"
            if module in ("torch", "numpy") and "load" in names:
                yield node.lineno, f"imports load from {module}"
        for name in names:
            if name in NAMES or name in MODULES or name in ("multiprocessing", "rpc"):
                yield node.lineno, f"imports {name}"
        if isinstance(node, ast.Attribute):
            path = dotted(node)
            first, _, rest = path.partition(".")
            path = f"{aliases.get(first, first)}.{rest}" if rest else path
            if node.attr in NAMES or path in (
                "torch.load",
                "numpy.load",
                "torch.hub.load",
                "torch.multiprocessing",
            ):
                yield node.lineno, f"uses {path or node.attr}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield node.value.lineno, f"passes {node.arg}"
        if isinstance(node, ast.Call) and dotted(node.func) in ("__import__", "importlib.import_module"):
            yield node.lineno, "imports a module by a name that cannot be read here"
        if isinstance(node, ast.Call) and dotted(node.func) in ("eval", "exec"):
            yield node.lineno, f"calls {dotted(node.func)}"
        if isinstance(node, ast.Constant) and node.value in ("c10d", "etcd", "etcd-v2"):
            yield node.lineno, f"names the rendezvous {node.value!r}, which keeps its state pickled"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_source_file_unpickles(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [f"line {line}: {what}" for line, what in offences(tree)]
    assert [each for each in found if not (path.name in OURS and each.endswith(OURS[path.name]))] == []


# Python runs a module of this name, found on its path, before anything else.
WATCH = """
import os, sys, threading
import pickle, _pickle

def watched(real, name):
    def call(*args, **kwargs):
        note(name)
        return real(*args, **kwargs)
    return call

def note(name):
    frame, frames = sys._getframe(2), []
    while frame is not None and len(frames) < 60:
        frames.append(frame.f_globals.get("__name__", "?"))
        frame = frame.f_back
    with open(os.path.join(os.environ["WATCH_DIR"], str(os.getpid())), "a") as file:
        file.write(name + " " + " ".join(frames) + "\\n")

class Unpickler(pickle.Unpickler):
    def __init__(self, *args, **kwargs):
        note("Unpickler")
        super().__init__(*args, **kwargs)

pickle.loads, pickle.load = watched(pickle.loads, "loads"), watched(pickle.load, "load")
_pickle.loads, _pickle.load = watched(_pickle.loads, "_loads"), watched(_pickle.load, "_load")
pickle.Unpickler = pickle._Unpickler = _pickle.Unpickler = Unpickler
with open(os.path.join(os.environ["WATCH_DIR"], str(os.getpid())), "a") as file:
    file.write("started " + " ".join(getattr(sys, "orig_argv", [])) + "\\n")
"""

FLEETS = {
    "stages": pipelined("edge", stages=2, compression="1/4"),
    "shards": replicas("rack", processes=2, sharding="full"),
}


@pytest.mark.soak
@pytest.mark.parametrize("fleet", FLEETS)
def test_a_replica_of_two_processes_trains_without_unpickling_a_byte(fleet: str, tmp_path: Path):
    recipe = recipe_text(
        FLEETS[fleet],
        model={"layers": 2},
        outer={"inner_steps": 2, "rounds": 2, "keep": 8},
        bucket={"anchor_every": 1},
    )
    for folder in ("watch", "seen"):
        (tmp_path / folder).mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    (tmp_path / "r.toml").write_text(recipe)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "watch"), str(SOURCE.parent)]),
        "WATCH_DIR": str(tmp_path / "seen"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "isthmus.cli.main", "train", "r.toml", "--run", "run", "--quiet"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["round"] == 2
    lines = [line for path in (tmp_path / "seen").iterdir() for line in path.read_text().splitlines()]
    assert [line for line in lines if line.startswith("started") and "forkserver" in line]
    control = "import pickle; pickle.loads(pickle.dumps(1))"
    subprocess.run([sys.executable, "-c", control], env=environment, check=True)
    assert any("loads __main__\n" in path.read_text() for path in (tmp_path / "seen").iterdir())
    ours = ("isthmus", "__main__", "torch.distributed")
    calls = [line.split() for line in lines if not line.startswith("started")]
    # Another package may unpickle its own data while it is imported.
    guilty = [call for call in calls if not any(name.startswith("importlib") for name in call)]
    guilty = [call for call in guilty if not call[1].startswith("multiprocessing")]  # see OURS
    guilty = [call for call in guilty if any(name.startswith(ours) for name in call[1:])]
    assert guilty == []
