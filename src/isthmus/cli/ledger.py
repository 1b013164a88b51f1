"""`isthmus ledger`: show, verify, rebuild or sweep a run's bucket."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import add_json
from isthmus.cli.history import add_range, show, verify
from isthmus.errors import ConfigError, RunError, RunStopped

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

EPILOG = """examples:
  isthmus ledger show runs/demo/bucket                       the last 20 rounds; --all, or --from A --to B
  isthmus ledger verify s3://my-runs/first                   replays every round it still can
  isthmus ledger verify s3://my-runs/first --from 900        only from the newest anchor up to round 900 on
  isthmus ledger rebuild s3://my-runs/first --round 40 --to theta-40.safetensors
  isthmus ledger rebuild s3://my-runs/first --without edge-1 --to FOLDER    for model.start of a new run
  isthmus ledger sweep s3://my-runs/first                    drops payloads up to the second-newest anchor
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ledger",
        help="a run's history in its bucket: show, verify, rebuild, sweep",
        description="The bucket is the run's history: who gave what, and every theta^(t), bit for bit.",
        epilog=EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("show", show, "rounds, contributors, norms, bytes, timings"),
        ("verify", verify, "replay the rounds and check everything that a closer could have made up"),
        ("rebuild", rebuild, "write theta^(T) as one file, or as a folder that model.start takes"),
        ("sweep", sweep, "delete payloads older than the second-newest complete anchor; manifests stay"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
        add_json(action)
        if name == "show":
            add_range(action, "the first round (default: the last 20; with --json all)", "the last round")
            action.add_argument("--all", action="store_true", help="all rounds")
            action.add_argument(
                "--usefulness",
                action="store_true",
                help="replay the rounds, and score each update on the held-out text; takes the run's corpus",
            )
            action.add_argument("--corpus", metavar="DIR", help="the corpus, if not where the recipe says")
        if name == "verify":
            add_range(
                action,
                "replay from the newest anchor up to round A, and read no manifest before it (default: from "
                "theta^(0), or from the oldest round that still has its payloads, and all manifests)",
                "the last round (default: the newest)",
            )
        if name == "rebuild":
            action.add_argument(
                "--round", type=int, metavar="T", help="which theta^(T) (default: the newest)"
            )
            action.add_argument(
                "--without",
                action="append",
                default=[],
                metavar="NAME",
                help="leave a replica out; may be repeated",
            )
            action.add_argument(
                "--to",
                required=True,
                metavar="PATH",
                help="the file to write, if it ends in .safetensors; otherwise a folder for model.start",
            )
        action.set_defaults(run=run)


def rebuild(args: argparse.Namespace) -> int:
    from isthmus.export.start import write_start
    from isthmus.model.checkpoint import save_tensors
    from isthmus.protocol.access import find_member, open_ledger
    from isthmus.protocol.replay import Replay

    target = Path(args.to)
    if target.exists():
        raise ConfigError(f"{target} exists; give --to another path")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}; create it, or give --to another path")
    ledger = open_ledger(args.url)
    if ledger.run.tensors and target.suffix != ".safetensors":
        raise ConfigError("the weights of a run of your own loops go into a file; give --to NAME.safetensors")
    for name in args.without:
        find_member(ledger.run, name)
    last = ledger.last_round()
    wanted = last if args.round is None else args.round
    if not 0 <= wanted <= last:
        raise ConfigError(f"round {wanted} is not settled; this run has the rounds 0 to {last}")
    replay = Replay(ledger, wanted, args.without, log=lambda text: print(f"isthmus: {text}", file=sys.stderr))
    for _ in ledger.between(replay.round + 1, wanted):
        replay.step()
    if target.suffix == ".safetensors":
        save_tensors(target, replay.anchor)
    else:
        write_start(target, ledger.run.recipe.model, replay.anchor)
    facts = {"round": wanted, "without": args.without, "digest": replay.digest(), "file": str(target)}
    left_out = f" without {', '.join(args.without)}" if args.without else ""
    print(json.dumps(facts) if args.json else f"theta^({wanted}){left_out}, {facts['digest'][:16]}: {target}")
    return 0


def _complete_anchors(ledger: "Ledger", count: int) -> list[int]:
    """Return the newest anchors that are whole and trusted: the payloads they replace cannot be restored."""
    from isthmus.protocol.replay import Replay
    from isthmus.store import StoreError

    complete: list[int] = []
    replay = Replay(ledger)
    for t in reversed(ledger.anchor_rounds()):
        if t and len(complete) < count:
            try:
                replay.jump(t)
                complete.append(t)
            except (StoreError, RunStopped):
                raise
            except RunError as error:
                print(f"isthmus: {error}", file=sys.stderr)
    return complete


def sweep(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.retention import sweep_payloads

    ledger = open_ledger(args.url)
    anchors = _complete_anchors(ledger, 2)
    if len(anchors) < 2:
        raise ConfigError(
            f"this run has {len(anchors)} complete anchor{'s' * (len(anchors) != 1)} that can be believed; "
            "sweeping needs two, to keep the newest safe"
        )
    keep_after = anchors[-1]
    dropped = sum(sweep_payloads(ledger, name, keep_after) for name in sorted(ledger.names))
    facts = {"deleted": dropped, "kept_after_round": keep_after}
    text = (
        f"deleted {dropped} objects of rounds up to {keep_after}; all later payloads and all manifests stay"
    )
    print(json.dumps(facts) if args.json else text)
    return 0
