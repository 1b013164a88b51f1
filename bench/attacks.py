"""What one bad replica costs: held-out loss after some rounds, with one of four or one of eight gone bad.

    .venv/bin/python bench/attacks.py                            # simulated, every kind, one of four
    .venv/bin/python bench/attacks.py --fleet 8 --seeds 0 1 2    # one of eight, means of three seeds
    .venv/bin/python bench/attacks.py --real --kinds flip        # real processes over a folder as the bucket

The bad one has a valid key, and sends well-formed updates whose norm is just under the limit (`--usual`: that
of an honest one). "before" is the recipe with outer.clip = "none", bucket.norm_limit = 20,
bucket.sign_agreement = 0 and score.batches = 0; "clip" leaves signs and scores alone, "signs" only the
scores; "score" leaves the signs alone; "now" has the defaults. `honest` is the same fleet with nobody bad:
the cost of an attack is the difference to it under the first setting. The simulator averages and refuses by
the code of the real fleet (`outer/aggregate.py`, `protocol/compare.py`). Prints one JSON line for each run.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attacker import BAD, BELOW, KINDS, forged, norm_of

from isthmus.config import Recipe, load_recipe
from isthmus.data.corpus import open_corpus
from isthmus.outer.codec import codec_for
from isthmus.outer.exchange import Contribution
from isthmus.protocol.compare import compare
from isthmus.protocol.scores import RoundScores
from isthmus.protocol.signs import SignReader
from isthmus.replica.usefulness import UpdateScorer
from isthmus.runlog import Row
from isthmus.runlog.live import open_view
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import simulate_rounds
from isthmus.simulator.run import pick_device, pick_plan, pick_precision
from isthmus.sparse import Bundle

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
LONG = ("norms", "scores")  # of a line: not printed
TINY = {"tiny": 1e-3, "empty": 1e-9}  # kinds of their own: an honest update, scaled


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
    return load_recipe(args.recipe, [*wanted, *SETTINGS[setting], *args.set])


class HostileExchange(LocalExchange):
    """The exchange of a simulated fleet in which one is bad, and updates are refused as a closer does."""

    def __init__(
        self, recipe: Recipe, fleet: SimulatedFleet, bad: str, kind: str, usual: bool = False
    ) -> None:
        super().__init__(recipe)
        self.usual = usual  # the bad one's norm is its own, and not just under the limit
        self.recipe, self.fleet, self.bad, self.kind = recipe, fleet, bad, kind
        outer = recipe.outer
        self.codec = codec_for(fleet.device, outer.chunk_side, outer.keep, outer.values)
        self.signs = SignReader(recipe)
        held_out = open_corpus(recipe.data.corpus).validation
        self.scorer = UpdateScorer(recipe, held_out, self.codec, fleet.device, fleet.dtype)
        self.probation: dict[str, int] = {}
        self.scores: list[dict[str, float]] = []
        self.before: dict[str, float] = {}
        self.norms: list[dict[str, float]] = []
        self.refused: list[str] = []

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        sent = {each.replica: self._unpacked(each) for each in own}
        norms = {name: _norm(bundle) for name, bundle in sent.items()}
        if self.kind != "honest":
            honest = sorted(norm for name, norm in norms.items() if name != self.bad)
            # Just under the limit: of the median of all, the bad one counted as the largest.
            norm = 0.98 * self.recipe.bucket.norm_limit * honest[len(norms) // 2]
            norm = norms[self.bad] * TINY[self.kind] if self.kind in TINY else norm
            norm = norms[self.bad] if self.usual else norm
            others = [bundle for name, bundle in sent.items() if name != self.bad]
            kind = "shrink" if self.kind in TINY else self.kind
            sent[self.bad] = forged(self.codec, kind, sent[self.bad], others, norm, round_number)
            norms[self.bad] = _norm(sent[self.bad])
            own = [
                self._packed(each, sent[each.replica]) if each.replica == self.bad else each for each in own
            ]
        signs = {name: self.signs.read(bundle) for name, bundle in sent.items()}
        draw = hashlib.sha256(f"{self.recipe.seed} {round_number}".encode()).digest()
        self.scorer.begin(self.fleet.anchor, round_number, draw)
        members = {member.name: member for member in self.recipe.fleet()}

        def score(name: str) -> float:
            return self.scorer.score(sent[name], members[name])

        scores = RoundScores(self.recipe.score, norms, self.probation, draw, score)
        refused = compare(signs, norms, self.before, scores, self.recipe.bucket).refused
        self.scores.append(dict(scores.listed(norms)))
        self.probation = scores.next_probation(refused)
        self.refused += [f"{round_number} {name}" for name in refused]
        self.norms.append(norms)
        self.before = {name: norm for name, norm in norms.items() if name not in refused}
        super().close(round_number, own)  # counts bytes
        return [each for each in own if each.replica not in refused]

    def _unpacked(self, one: Contribution) -> Bundle:
        parts = [self.codec.unpack_many(data) for _, data in sorted(one.shards.items())]
        return Bundle.of({name: payload for part in parts for name, payload in part.items()})

    def _packed(self, one: Contribution, bundle: Bundle) -> Contribution:
        shards = {i: self.codec.pack_many(bundle.part(names)) for i, names in enumerate(self.fleet.shards)}
        return Contribution(one.replica, shards, one.facts)


def _norm(bundle: Bundle) -> float:
    return norm_of({name: payload.values for name, payload in bundle.items()})


class Rows(list[Row]):
    """Where the rounds' rows go."""


def simulated(recipe: Recipe, kind: str, bad: str, args: argparse.Namespace) -> dict[str, Any]:
    device: str = args.device
    where = pick_device(device)
    precision, corpus = pick_precision(recipe, where), open_corpus(recipe.data.corpus)
    plan = pick_plan(recipe, where, precision, compiled=False)
    fleet = SimulatedFleet(recipe, corpus, where, precision, plan, compiled=False)
    exchange, rows = HostileExchange(recipe, fleet, bad, kind, args.usual), Rows()
    with open_view(recipe, 0, recipe.outer.rounds, rows=[], quiet=True) as view:
        simulate_rounds(recipe, fleet, exchange, rows, view)
    spread = [max(norms.values()) / statistics.median_high(norms.values()) for norms in exchange.norms]
    return _losses(rows[-1]) | {
        "refused": exchange.refused,
        "largest_over_median": round(max(spread), 2),
        "scores": exchange.scores,
        "norms": [{name: float(f"{norm:.4g}") for name, norm in norms.items()} for norms in exchange.norms],
    }


def real(recipe: Recipe, kind: str, bad: str, args: argparse.Namespace) -> dict[str, Any]:
    """`isthmus train`: launchers and workers as `join` starts them, over a folder as the bucket."""
    scale = TINY.get(kind, 1.0 if args.usual else BELOW * recipe.bucket.norm_limit)
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        from isthmus.config import dump_recipe

        path, run_dir, hook = Path(folder, "recipe.toml"), Path(folder, "run"), Path(folder, "hook")
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        if kind != "honest":
            hook.mkdir()
            (hook / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
            before = os.pathsep.join([str(hook), str(HERE), environment.get("PYTHONPATH", "")])
            environment["PYTHONPATH"] = before.rstrip(os.pathsep)
            environment[BAD] = f"{bad}:{'shrink' if kind in TINY else kind}:{scale}"
        command = [sys.executable, "-m", "isthmus", "train", str(path), "--run", str(run_dir)]
        done = subprocess.run(
            [*command, "--device", args.device], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
        return _read(run_dir)


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
    from isthmus.protocol.access import open_ledger
    from isthmus.runlog import RunDir

    run = RunDir.open(run_dir)
    ledger = open_ledger(str(run_dir / "bucket"))
    refused, norms, scores = [], [], []
    for t in range(1, run.recipe.outer.rounds + 1):
        manifest = ledger.manifest(t)
        assert manifest is not None
        norms.append({entry.replica: float(f"{entry.norm:.4g}") for entry in manifest.entries})
        refused += [f"{t} {name}" for name, _ in manifest.refused]
        scores.append(dict(manifest.scores))
    spread = [max(each.values()) / statistics.median_high(each.values()) for each in norms]
    found = {"refused": refused, "largest_over_median": round(max(spread), 2)}
    found |= {"norms": norms, "scores": scores}
    return _losses(run.rows()[-1]) | found


def _losses(row: Row) -> dict[str, Any]:
    return {name: round(getattr(row, name), 4) for name in ("loss_full", "loss_pipelined", "loss_mixed")}


def last_full(recipe: Recipe) -> str:
    return [member.name for member in recipe.fleet() if member.config.kind == "full"][-1]


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for seed in args.seeds:
        for kind in args.kinds:
            for setting in args.settings:
                recipe, began = recipe_for(args, seed, setting), time.monotonic()
                engine = real if args.real else simulated
                found = engine(recipe, kind, args.bad or last_full(recipe), args)
                about = {"kind": kind, "setting": setting, "fleet": args.fleet, "seed": seed}
                about |= {"engine": engine.__name__, "seconds": round(time.monotonic() - began, 1)}
                yield about | found


def table(lines: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Mean over the seeds: the loss, and what it is more than honest "before"."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["kind"], line["setting"]), []).append(line)
    base = {line["seed"]: line["loss_mixed"] for line in cells.get(("honest", args.settings[0]), [])}
    rows = [
        f"| one of {args.fleet} | " + " | ".join(f"{s}: loss | cost | refused" for s in args.settings) + " |"
    ]
    rows.append("| --- |" + " ---: | ---: | ---: |" * len(args.settings))
    for kind in [kind for kind in args.kinds if any((kind, s) in cells for s in args.settings)]:
        words = []
        for setting in args.settings:
            some = cells.get((kind, setting))
            if not some:
                words.append("| |")
                continue
            costs = [line["loss_mixed"] - base[line["seed"]] for line in some if line["seed"] in base]
            loss = statistics.mean(line["loss_mixed"] for line in some)
            cost = f"{statistics.mean(costs):+.3f}" if costs else ""
            words.append(f"{loss:.3f} | {cost} | {sum(len(line['refused']) for line in some)}")
        rows.append(f"| {kind} | " + " | ".join(words) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="real processes instead of the simulator")
    parser.add_argument("--fleet", type=int, default=4, help="replicas, half of them full (default 4)")
    parser.add_argument("--bad", help="the bad replica (default: the last full one)")
    every = ["honest", *(kind for kind in KINDS if kind != "shrink"), *TINY]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--usual", action="store_true", help="the bad one's norm is an honest one's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recipe", default=DEMO)
    parser.add_argument("--corpus", default="builtin:sample")
    parser.add_argument("--compression", default="1/8")
    parser.add_argument("--eval-batches", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--to", help="append the JSON lines to this file")
    parser.add_argument("--table", metavar="FILE", help="run nothing; the tables of such a file")
    args = parser.parse_args()
    if args.table:
        every_line = [json.loads(line) for line in Path(args.table).read_text(encoding="utf-8").splitlines()]
        for fleet in sorted({line["fleet"] for line in every_line}):
            args.fleet = fleet
            print(table([line for line in every_line if line["fleet"] == fleet], args), end="\n\n")
        return
    lines = []
    for line in runs(args):
        lines.append(line)
        print(json.dumps({key: value for key, value in line.items() if key not in LONG}), flush=True)
        if args.to:
            with open(args.to, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(table(lines, args))


if __name__ == "__main__":
    main()
