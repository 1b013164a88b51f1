"""`isthmus reproduce fleet`: do real processes compute what the simulator's rows did?

The rows of the regime come from the simulator. Here each is run twice on a CPU, by the simulator and by
`isthmus train`: every replica and every stage a process, gloo between stages, a bucket between replicas.
Recipes are shortened as for `commits` (same_code.py), in float64, so that the order of sums cannot hide a
difference, and no update is scored: batches of two short sequences are too noisy for it. A line of
results/fleet.jsonl has the losses after every round and the bytes of both. Averaging at every step is the
simulator's alone.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.lines import LOSSES, Line, append, read_file
from experiments.same_code import shortened, unstated
from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.errors import RunError

NAME = "fleet"
FILE = f"{NAME}.jsonl"
EXACT = ("inner.precision=fp64", "score.batches=0")
SENT = (
    "activations",
    "gradients",
    "tokens",
    "payload_up",
)  # what a fleet comes to download depends on who closes


def can_be_real(line: Line) -> bool:
    return parse_recipe(line["recipe"]).outer.method != "adamw"


def read_twins(folder: Path) -> dict[str, Line]:
    """By the digest of a row's own line; of one run twice, the last counts."""
    return {line["of"]: line for line in read_file(folder / FILE)}


def alike(twin: Line) -> bool:
    """Losses after every round in all digits of a line, and bytes of the whole run."""
    return twin["curve"] == twin["fleet_curve"] and twin["bytes"] == twin["fleet_bytes"]


def run_twins(
    wanted: Sequence[Line], corpus: str, folder: Path, commit: str, say: Callable[[str], None]
) -> list[str]:
    """Run each row both ways and append its line; returns what failed."""
    faults = []
    for number, line in enumerate(wanted, start=1):
        try:
            twin = _run(line, corpus, commit)
            append(folder / FILE, twin)
            told = f"mixed {twin['loss_mixed']:.6f} by both" if alike(twin) else "they differ"
        except RunError as error:
            told = str(error)
            faults.append(f"{line['row']}: {told}")
        say(f"[{number}/{len(wanted)}] {line['row']}: {told}")
    return faults


def exact(line: Line, corpus: str, vocab: int) -> Recipe:
    """A row's recipe, shortened, in float64."""
    first = [f"{key}={value}" for key, value in unstated(line["recipe"]).items()]
    return parse_recipe(line["recipe"], [*first, *shortened(line["recipe"], corpus, vocab), *EXACT])


def _run(line: Line, corpus: str, commit: str) -> Line:
    import torch

    from experiments.trial import origin
    from isthmus.data.corpus import open_corpus

    text = open_corpus(corpus)
    place = corpus if corpus.startswith("builtin:") else str(Path(corpus).resolve())
    recipe = exact(line, place, text.vocab_size)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(dump_recipe(recipe), encoding="utf-8")
        began = time.monotonic()
        fleet = _rounds("train", file, Path(folder) / "fleet")
        seconds = time.monotonic() - began
        simulated = _rounds("simulate", file, Path(folder) / "simulated")
    found = origin(line["row"], NAME, recipe, text, torch.device("cpu"), recipe.inner.precision, commit)
    tokens = recipe.outer.rounds * recipe.round_tokens
    return found | {
        "of": line["digest"],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        **{name: round(simulated[-1][name], 6) for name in LOSSES},
        "failed": None,
        "curve": _curve(simulated),
        "fleet_curve": _curve(fleet),
        "bytes": _sent(simulated),
        "fleet_bytes": _sent(fleet),
    }


def _rounds(engine: str, file: Path, run: Path) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "isthmus",
        engine,
        str(file),
        "--run",
        str(run),
        "--device",
        "cpu",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise RunError(f"{engine}: {(done.stderr.splitlines() or ['it said nothing'])[-1]}")
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _curve(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    return [[row["round"], *(round(row[name], 6) for name in LOSSES)] for row in rows]


def _sent(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {kind: sum(row["bytes"][kind] for row in rows if row["round"]) for kind in SENT}
