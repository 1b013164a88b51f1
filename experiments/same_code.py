"""`isthmus reproduce commits`: do the commits that made two compared rows compute the same?

Where the rows of a comparison were run by two commits, both run the recipe of the earlier one, on a CPU, with
the row's width, layers, fleet and settings, and with sequences and rounds so few that it takes seconds. Equal
losses after every round say that the comparison would have been the same with one commit. They say nothing of
the GPU's own kernels, which a CPU does not run. Lines go to results/commits.jsonl.
"""

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.lines import FIRST, Line, append, read_file
from experiments.runner import CHECKOUT, git
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunError

NAME = "commits"
FILE = f"{NAME}.jsonl"
SHORT = (
    "model.ffn=64", "model.context=32", "inner.batch=2", "inner.micro_batches=1", "inner.warmup_steps=5",
    "outer.inner_steps=5", "outer.rounds=6", "data.eval_batches=8", "data.eval_every=1",
)  # fmt: skip
# Run by the code of a commit, where this package may lie elsewhere; a key that it knows and the text does
# not state has the value that it had before there was such a key.
CHILD = """
import json, os, sys
import isthmus
from isthmus.config import parse_recipe
if not isthmus.__file__.startswith(os.path.realpath(os.getcwd())):
    sys.exit("another code than the commit's would have run: " + isthmus.__file__)
try:
    from experiments.trial import run_trial
except ImportError:
    from isthmus.reproduce.trial import run_trial
task = json.load(sys.stdin)
known = parse_recipe(task["recipe"])
first = [
    f"{key}={value}" for key, value in task["first"].items()
    if hasattr(getattr(known, key.partition(".")[0]), key.partition(".")[2])
]
recipe = parse_recipe(task["recipe"], [*first, *task["settings"]])
line = run_trial(task["row"], "commits", recipe, "cpu", task["commit"])
print(json.dumps(line), file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A row by the code of a commit."""

    row: str
    of: str  # the digest of the row's line
    recipe: str  # its recipe
    commit: str


# By the digest of a row's line, and by commit: the losses after every round.
Curves = Mapping[tuple[str, str], list[list[float]]]


def read_curves(folder: Path) -> Curves:
    """Of a row run twice by a commit, the last counts."""
    return {(line["of"], line["commit"]): line["curve"] for line in read_file(folder / FILE)}


def same(curves: Curves, digest: str, one: str, other: str) -> bool | None:
    """Whether both commits compute this row alike, to the last digit of a line; None where it was not run."""
    found = [curves.get((digest, commit)) for commit in (one, other)]
    return None if None in found else found[0] == found[1]


def wanted(pairs: Sequence[tuple[Line, Line]], curves: Curves) -> list[Replay]:
    """What is missing to show that two lines of one seed could have been of one commit: the earlier one's
    recipe, which the later commit can read, by both. A commit with a "+" had changes that are not in git."""
    found: dict[tuple[str, str], Replay] = {}
    committed = [pair for pair in pairs if not any("+" in line["commit"] for line in pair)]
    when = {commit: _time(commit) for commit in {line["commit"] for pair in committed for line in pair}}
    for pair in sorted(committed, key=lambda pair: min(when[line["commit"]] for line in pair)):
        early, late = sorted(pair, key=lambda line: when[line["commit"]])
        of = early["digest"]
        recipe = next((one.recipe for one in found.values() if one.of == of), early["recipe"])
        for line in (early, late):
            found.setdefault((of, line["commit"]), Replay(early["row"], of, recipe, line["commit"]))
    return [one for key, one in found.items() if key not in curves]


def _time(commit: str) -> int:
    try:
        return int(git("log", "-1", "--format=%ct", commit))
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(f"git does not know the commit {commit} here; fetch its history") from None


def run_replays(
    replays: Sequence[Replay], corpus: str, folder: Path, jobs: int, say: Callable[[str], None]
) -> list[str]:
    """Run each by its commit's code and append its line as soon as it is there; returns what failed."""
    from isthmus.data.corpus import open_corpus

    vocab, faults = open_corpus(corpus).vocab_size, []
    corpus = corpus if corpus.startswith("builtin:") else str(Path(corpus).resolve())
    with TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        trees = {commit: _tree(commit, Path(place) / commit) for commit in {one.commit for one in replays}}
        begun = {pool.submit(_run, one, trees[one.commit], corpus, vocab): one for one in replays}
        try:
            for number, done in enumerate(as_completed(begun), start=1):
                one = begun[done]
                try:
                    line = done.result()
                    append(folder / FILE, line)
                    told = line["failed"] or f"mixed {line['loss_mixed']:.6f}"
                except (ConfigError, RunError) as error:
                    told = str(error)
                    faults.append(f"{one.row} by {one.commit}: {told}")
                say(f"[{number}/{len(replays)}] {one.row} by {one.commit}: {told}")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # Ctrl-C waits for what has begun, and for no more
    return faults


def _tree(commit: str, place: Path) -> Path:
    """The files of a commit; the checkout stays as it is."""
    done = subprocess.run(["git", "-C", str(CHECKOUT), "archive", commit], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(place, filter="data")
    return place.resolve()


def shortened(recipe: str, corpus: str, vocab: int) -> list[str]:
    """Settings that leave the method as it is and make its run take seconds."""
    given = parse_recipe(recipe)
    settings = [*SHORT, f"model.vocab={vocab}", f"data.corpus={json.dumps(corpus)}"]
    if given.subspace.grassmann_every:
        settings.append("subspace.grassmann_every=5")
    if given.finish.rounds:
        settings.append("finish.rounds=2")
    return settings


def _run(one: Replay, tree: Path, corpus: str, vocab: int) -> Line:
    settings = shortened(one.recipe, corpus, vocab)
    task = dataclasses.asdict(one) | {"settings": settings, "first": unstated(one.recipe)}
    # One thread: the order of sums is then that of the code alone.
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", CHILD]
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, encoding="utf-8", cwd=tree, env=env
    )
    last = (done.stderr.splitlines() or ["it said nothing"])[-1]
    if done.returncode:
        raise RunError(last)
    return json.loads(last) | {"of": one.of}


def unstated(recipe: str) -> dict[str, str]:
    """The first defaults of keys that a line's recipe does not state."""
    import tomllib

    stated = tomllib.loads(recipe)
    pairs = [(key, *key.split(".")) for key in FIRST]
    return {
        key: json.dumps(FIRST[key]) for key, section, name in pairs if name not in stated.get(section, {})
    }
