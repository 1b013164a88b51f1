"""What bad replicas cost: held-out loss after some rounds, with some of four or of eight gone bad.

    .venv/bin/python bench/attacks.py                            # simulated, every kind, one of four
    .venv/bin/python bench/attacks.py --fleet 8 --seeds 0 1 2    # one of eight, means of three seeds
    .venv/bin/python bench/attacks.py --fleet 8 --num-bad 2      # two of eight, who send the same
    .venv/bin/python bench/attacks.py --real --kinds flip        # real processes over a folder as the bucket

A bad one has a valid key, and sends well-formed updates whose norm is just under the limit (`--usual`: that
of an honest one). "before" is the recipe with outer.clip = "none", bucket.norm_limit = 20,
bucket.sign_agreement = 0 and score.batches = 0; "clip" leaves signs and scores alone, "signs" only the
scores; "score" leaves the signs alone; "now" has the defaults. `honest` is the same fleet with nobody bad:
the cost of an attack is the difference to it under the first setting. Prints one JSON line for each run.
With `--to FILE` it goes on where it was stopped. `bench/attack_tables.py FILE` prints the tables.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attack_tables import cost_table
from attacker import BAD, BELOW, KINDS
from hostile import SLOW, TINY, Attack, simulate_attack

from isthmus.config import Recipe, dump_recipe, load_recipe
from isthmus.data.corpus import open_corpus
from isthmus.protocol.access import open_ledger
from isthmus.runlog import RunDir

HERE = Path(__file__).resolve().parent
DEMO = "demo-paper"
NO_SIGNS, NO_SCORE = "bucket.sign_agreement=0", "score.batches=0"
SETTINGS = {
    "before": ['outer.clip="none"', "bucket.norm_limit=20", NO_SIGNS, NO_SCORE],
    "clip": [NO_SIGNS, NO_SCORE],
    "signs": [NO_SCORE],
    "score": [NO_SIGNS],
    "now": [],
}
LONG = ("norms", "scores", "refused", "set")  # of a line: not printed
# Of a real fleet on a busy machine: nobody is left behind, and who is refused is judged in every round.
PATIENT = ["bucket.deadline_seconds=1800", "bucket.missed_rounds=1000"]


def recipe_for(args: argparse.Namespace, seed: int, setting: str) -> Recipe:
    corpus = open_corpus(args.corpus)
    half = args.fleet // 2
    wanted = [
        f"seed={seed}",
        f"outer.rounds={args.rounds}",
        f"data.corpus={json.dumps(args.corpus)}",
        f"data.eval_batches={args.eval_batches}",
        f"data.eval_every={args.rounds}",
        f"model.vocab={max(1024, corpus.vocab_size)}",
        f"replicas.rack.count={half}",
        f"replicas.edge.count={args.fleet - half}",
        f'replicas.edge.compression="{args.compression}"',
    ]
    return load_recipe(args.recipe, [*wanted, *PATIENT, *SETTINGS[setting], *args.set])


def run_real(recipe: Recipe, attack: Attack, device: str) -> dict[str, Any]:
    """`isthmus train`: launchers and workers as `join` starts them, over a folder as the bucket."""
    scale = TINY.get(attack.kind, 1.0 if attack.usual else BELOW * recipe.bucket.norm_limit)
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        path, run_dir, hook = Path(folder, "recipe.toml"), Path(folder, "run"), Path(folder, "hook")
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        if attack.kind != "honest":
            hook.mkdir()
            (hook / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
            before = os.pathsep.join([str(hook), str(HERE), environment.get("PYTHONPATH", "")])
            environment["PYTHONPATH"] = before.rstrip(os.pathsep)
            environment[BAD] = f"{attack.bad[0]}:{attack.made_by}:{scale}"
        _train([str(path), "--run", str(run_dir), "--device", device], environment)
        return _read(run_dir)


def _train(words: list[str], environment: dict[str, str]) -> None:
    """Its progress passes through to our own stderr."""
    command = [sys.executable, "-m", "isthmus", "train", *words]
    last: collections.deque[str] = collections.deque(maxlen=40)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            last.append(line)
            print(f"    {line}", end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise SystemExit("".join(last))


# Before a worker's own first line: the process of the bad replica changes what it sends.
HOOK = f"""
import os, sys
words = " ".join(sys.orig_argv)
name = os.environ["{BAD}"].split(":")[0]
if "isthmus.runtime.worker" in words and f'"replica": "{{name}}"' in words.replace('":"', '": "'):
    import attacker
    attacker.turn_bad()
"""


def _read(run_dir: Path) -> dict[str, Any]:
    """What the manifests say. `missing`: who gave nothing to a round, counted or refused."""
    run = RunDir.open(run_dir)
    ledger = open_ledger(str(run_dir / "bucket"))
    names = {member.name for member in run.recipe.fleet()}
    refused, norms, scores, missing = [], [], [], []
    for t in range(1, run.recipe.outer.rounds + 1):
        manifest = ledger.manifest(t)
        assert manifest is not None
        norms.append({entry.replica: entry.norm for entry in manifest.entries})
        refused += [f"{t} {name}: {reason}" for name, reason in manifest.refused]
        scores.append(dict(manifest.scores))
        given = norms[-1].keys() | {name for name, _ in manifest.refused}
        missing += [f"{t} {name}" for name in sorted(names - given)]
    found = {"row": run.rows()[-1], "refused": refused, "missing": missing}
    return found | {"norms": norms, "scores": scores}


def last_full(recipe: Recipe, number: int) -> tuple[str, ...]:
    return tuple(member.name for member in recipe.fleet() if member.config.kind == "full")[-number:]


def about(args: argparse.Namespace, seed: int, kind: str, setting: str) -> dict[str, Any]:
    """What makes a run of its own: a line that says the same is not measured again."""
    bad = 0 if kind == "honest" else args.num_bad
    norm = "usual" if args.usual else "blind" if args.real or args.blind else "known"
    return {
        "kind": kind,
        "setting": setting,
        "fleet": args.fleet,
        "num_bad": bad,
        "norm": norm if bad else "usual",
        "seed": seed,
        "rounds": args.rounds,
        "engine": "real" if args.real else "simulated",
        "set": args.set,
    }


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    asked = [(s, k, g) for s in args.seeds for k in args.kinds for g in args.settings]
    for number, (seed, kind, setting) in enumerate(asked, 1):
        what = about(args, seed, kind, setting)
        done = [json.loads(line) for line in _lines(args.to)]  # anew: another process may share the work
        known = [line for line in done if what.items() <= line.items()]
        if known:
            yield known[0]
            continue
        print(f"{number} of {len(asked)}: {kind}, {setting}, seed {seed}", file=sys.stderr, flush=True)
        recipe, began = recipe_for(args, seed, setting), time.monotonic()
        attack = Attack(kind, last_full(recipe, args.num_bad), args.usual, args.real or args.blind)
        found = (run_real if args.real else simulate_attack)(recipe, attack, args.device)
        row = found.pop("row")
        losses = {
            name: round(getattr(row, name), 4) for name in ("loss_full", "loss_pipelined", "loss_mixed")
        }
        found["norms"] = [{name: float(f"{x:.4g}") for name, x in each.items()} for each in found["norms"]]
        seconds = round(time.monotonic() - began, 1)
        bad = () if kind == "honest" else attack.bad
        line = what | {"bad": bad, "seconds": seconds} | losses | found
        if args.to:
            with open(args.to, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        yield line


def _lines(path: str | None) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if path and Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="real processes instead of the simulator")
    parser.add_argument("--fleet", type=int, default=4, help="replicas, half of them full (default 4)")
    parser.add_argument("--num-bad", type=int, default=1, help="bad ones, the last full ones (default 1)")
    every = ["honest", *KINDS, SLOW, *TINY]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--usual", action="store_true", help="the bad one's norm is an honest one's")
    parser.add_argument(
        "--blind", action="store_true", help="simulated: its norm goes by its own, as a real one's"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recipe", default=DEMO)
    parser.add_argument("--corpus", default="builtin:sample")
    parser.add_argument("--compression", default="1/8")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--to", help="append the JSON lines to this file; what is in it is not run again")
    args = parser.parse_args()
    if not 1 <= args.num_bad <= args.fleet // 2:
        parser.error(f"--num-bad is {args.num_bad}; it is 1 to {args.fleet // 2}, the full ones of the fleet")
    if args.real and (args.num_bad > 1 or {"against", "apart", SLOW} & set(args.kinds)):
        parser.error(
            "--real has one bad replica, which knows no other's update: no --num-bad, against, apart, slow"
        )
    lines = []
    for line in runs(args):
        lines.append(line)
        print(json.dumps({key: value for key, value in line.items() if key not in LONG}), flush=True)
    print(cost_table(lines))


if __name__ == "__main__":
    main()
