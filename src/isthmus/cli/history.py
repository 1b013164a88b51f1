"""`isthmus ledger show` and `ledger verify`: print a run's history and check it."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.printing import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isthmus.data.progress import Progress
    from isthmus.protocol.ledger import Ledger, Manifest

SHOWN = 20  # rounds, unless more are asked for
MANY = 100  # rounds: work on more shows its progress


def add_range(action: argparse.ArgumentParser, start: str, end: str) -> None:
    action.add_argument("--from", dest="start", type=int, metavar="A", help=start)
    action.add_argument("--to", dest="end", type=int, metavar="B", help=end)


def asked_range(args: argparse.Namespace, last: int) -> tuple[int, int]:
    """Return (--from or 0, --to or the newest round); refuse rounds that do not exist."""
    start, end = args.start or 0, last if args.end is None else args.end
    for t in (start, end):
        if not 0 <= t <= last:
            raise ConfigError(f"round {t} is not settled; this run has the rounds 0 to {last}")
    if start > end:
        raise ConfigError(f"--from {start} is after --to {end}; give them in order")
    return start, end


def show(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger

    ledger = open_ledger(args.url)
    last = ledger.last_round()
    start, end = asked_range(args, last)
    first = max(1, start)
    if args.start is None and not (args.all or args.json):
        first = max(1, end - SHOWN + 1)
    scores = _scores(args, ledger, first, end)
    rows = (row_of(ledger, manifest, scores) for manifest in ledger.between(first, end))
    if args.json:
        print(json.dumps(list(rows), indent=2))
        return 0
    name, run_id = ledger.run.recipe.name, ledger.run.run_id
    print(f'run "{name}" ({run_id}), {last} round{"s" * (last != 1)}; norm by contributor')
    for row in rows:
        norms = "  ".join(f"{name} {norm:.3g}" for name, norm in row["contributors"].items())
        print(
            f"{row['round']:>5}  {row['seconds']:7.1f} s  {row['payload_bytes'] / 1e6:8.2f} MB  closed by "
            f"{row['closer']:<12} {norms}"
        )
        if row["usefulness"]:
            said = "  ".join(f"{name} {score:+.4f}" for name, score in row["usefulness"].items())
            print(f"       alone, in nats of held-out loss (below 0 helps)  {said}")
        for name, said in row["held_out"].items():
            if said["round"] == row["round"] - 1:  # a member repeats it until it measures again
                print(f"       held-out loss of theta^({said['round']}) {said['mixed']:.4f}, by {name}")
        for name, reason in row["refused"].items():
            print(f"       refused {name}: {visible(reason)}")
    if first > 1 and args.start is None:
        print(f"rounds {first} to {end} of {last}; --all shows all, --from A --to B others", file=sys.stderr)
    return 0


def _scores(args: argparse.Namespace, ledger: "Ledger", first: int, last: int) -> dict[int, dict[str, float]]:
    """Return scores by round, with --usefulness."""
    if not args.usefulness:
        return {}
    from isthmus.data.tokens import validation_batches
    from isthmus.export.source import run_text
    from isthmus.export.usefulness import usefulness

    recipe, found = ledger.run.recipe, dict[int, dict[str, float]]()
    size = recipe.inner.batch, recipe.model.context, recipe.data.eval_batches
    batches = validation_batches(run_text(ledger, args.corpus), *size)
    with shown("scoring rounds", last - first + 1) as progress:
        for t, scores in usefulness(ledger, batches, first, last):
            found[t] = {name: round(score, 6) for name, score in scores.items()}
            progress.update(t - first + 1)
    return found


def row_of(
    ledger: "Ledger", manifest: "Manifest", usefulness: Mapping[int, Mapping[str, float]]
) -> dict[str, Any]:
    return {
        "round": manifest.round,
        "seconds": manifest.seconds,
        "closer": manifest.closer,
        "contributors": {entry.replica: round(entry.norm, 6) for entry in manifest.entries},
        "refused": dict(manifest.refused),
        "usefulness": usefulness.get(manifest.round),
        "payload_bytes": sum(shard.size for entry in manifest.entries for shard in entry.shards),
        "held_out": {
            entry.replica: asdict(entry.facts.held_out) for entry in manifest.entries if entry.facts.held_out
        },
        "anchor_before": manifest.anchor,
    }


@contextmanager
def shown(label: str, total: int) -> "Iterator[Progress]":
    """Yield a display for work on `total` rounds; a few rounds need none."""
    from isthmus.data.progress import Progress, on_stderr

    with closing(on_stderr() if total > MANY else Progress()) as progress:
        progress.phase(label, total)
        yield progress


def verify(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.audit import audit

    ledger = open_ledger(args.url)
    last = ledger.last_round()
    if not last:
        raise ConfigError("no round of this run is settled yet; there is nothing to verify")
    start, end = asked_range(args, last)
    with shown("verifying rounds", end - start + 1) as progress:
        found = audit(ledger, start, end, lambda done, _: progress.update(done))
    print(json.dumps(found.to_dict()) if args.json else "\n".join(found.to_lines()))
    return 0
