"""`isthmus ledger repair`: how a run goes on whose counted payloads are lost for good."""

import argparse
import json
import sys

from isthmus.errors import ConfigError
from isthmus.printing import visible

HELP = "where counted payloads are lost for good, decide from which round the run goes on"
DESCRIPTION = """Finds the first round whose payloads cannot be read anywhere and that no anchor leads past,
and says what is lost. With --yes it signs the decision that this round and the settled ones after it are
void: the next round starts from the last model before them. Nothing is ever skipped without such a decision.
Needs a closer's key."""


def register(actions: argparse._SubParsersAction) -> None:
    action = actions.add_parser("repair", help=HELP, description=DESCRIPTION)
    action.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    action.add_argument("--replica", required=True, metavar="NAME", help="the closer who decides")
    action.add_argument("--key", metavar="FILE", help="its private key (default: keys/RUN/NAME.key)")
    action.add_argument("--reason", default="", metavar="TEXT", help="stays with the decision")
    action.add_argument("--yes", action="store_true", help="sign it; without this nothing is written")
    action.add_argument("--json", action="store_true", help="print JSON instead of text")
    action.set_defaults(run=repair)


def repair(args: argparse.Namespace) -> int:
    import time

    from isthmus.protocol.access import open_as, open_ledger
    from isthmus.protocol.damage import find_damage

    ledger, _ = open_as(open_ledger(args.url).store, args.replica, args.key or "")
    if args.replica not in ledger.run.closers:
        closers = ", ".join(ledger.run.closers)
        raise ConfigError(f"{args.replica} may not decide this: it is no closer of the run; {closers} may")

    def now() -> float:  # who only looks writes nothing
        return ledger.store.now(f"members/{args.replica}/clock") if args.yes else time.time()

    def say(text: str) -> None:
        print(f"isthmus: {visible(text)}", file=sys.stderr)

    damage = find_damage(ledger, args.reason, now, say)
    if args.yes and not ledger.repairs.decide(damage.decision):
        raise ConfigError(f"rounds up to {damage.decision.last} have been decided on meanwhile; look again")
    if args.json:
        lost = [{"replica": name, "shard": shard.index, "reason": why} for name, shard, why in damage.lost]
        print(json.dumps(damage.decision.to_dict() | {"lost": lost, "written": args.yes}))
        return 0
    for line in damage.to_lines():
        print(visible(line))
    print(
        f"decided, and signed by {args.replica}: repairs/{damage.decision.last:06d}.json"
        if args.yes
        else "nothing is written; --yes signs it"
    )
    return 0
