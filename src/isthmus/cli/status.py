"""`isthmus status`: who is in a run, how far it is, and whom it waits for."""

import argparse
import json
import time
from typing import Any


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "status",
        help="members, round, who is awaited, rates and losses of a run",
        description="Read a run's bucket and say how it stands: its round, every replica's state, rate "
        "and loss, and whom the open round waits for.",
        epilog="examples:\n  isthmus status s3://my-runs/first\n  isthmus status runs/demo --json\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=status)


def status(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger

    facts = gather(open_ledger(args.url))
    print(json.dumps(facts, indent=2) if args.json else table(facts))
    return 0


def gather(ledger: Any) -> dict[str, Any]:
    recipe, store = ledger.run.recipe, ledger.store
    last = ledger.last_round()
    manifest = ledger.manifest(last) if last else None
    members = []
    now = clock(store)
    for member in recipe.fleet():
        beat = ledger.heartbeat(member.name)
        body, age = ({}, None) if beat is None else (beat[0], max(0.0, now - beat[1]))
        state = body.get("state", "not seen")
        if (
            age is not None
            and age > 5 * recipe.bucket.heartbeat_seconds
            and state not in ("left", "finished")
        ):
            state = "silent"
        delivered = last < recipe.outer.rounds and ledger.has_commit(member.name, last + 1)
        members.append(
            {
                "replica": member.name,
                "kind": member.config.kind,
                "stages": member.config.stages,
                "state": state,
                "heartbeat_age_seconds": age,
                "round": body.get("round"),
                "inner_step": body.get("inner_step"),
                "loss": body.get("loss"),
                "tokens_per_second": body.get("tokens_per_second"),
                "delivered": delivered,
            }
        )
    expected = manifest.members if manifest else [m["replica"] for m in members]
    awaited = [
        m["replica"]
        for m in members
        if m["replica"] in expected and not m["delivered"] and m["state"] not in ("left", "finished")
    ]
    return {
        "run": recipe.name,
        "run_id": ledger.run.run_id,
        "round": last,
        "rounds": recipe.outer.rounds,
        "last_round_seconds": manifest.seconds if manifest else None,
        "deadline_seconds": (recipe.bucket.deadline_seconds or manifest.deadline_seconds)
        if manifest
        else None,
        "refused": dict(manifest.refused) if manifest else {},
        "awaited": awaited if last < recipe.outer.rounds else [],
        "members": members,
    }


def clock(store: Any) -> float:
    """The store's, or this machine's for those who may only read."""
    from isthmus.store.retry import StoreError

    try:
        return store.now()
    except StoreError:
        return time.time()


def table(facts: dict[str, Any]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    settled = f"round {facts['round']}" if facts["round"] else "none"
    lines = [f'run "{facts["run"]}" ({facts["run_id"]}): {settled} of {facts["rounds"]} is settled']
    if facts["last_round_seconds"] is not None:
        lines[0] += f", the last took {facts['last_round_seconds']:.1f} s"
    lines.append(
        f"{'replica':<16}{'kind':<11}{'state':<14}{'seen':>7}{'step':>8}{'loss':>8}{'tok/s':>10}  this round"
    )
    for m in facts["members"]:
        kind = m["kind"] if m["stages"] == 1 else f"{m['stages']} stages"
        seen = "-" if m["heartbeat_age_seconds"] is None else f"{m['heartbeat_age_seconds']:.0f} s"
        lines.append(
            f"{m['replica']:<16}{kind:<11}{m['state']:<14}{seen:>7}{number(m['inner_step'], 'd'):>8}"
            f"{number(m['loss'], '.3f'):>8}{number(m['tokens_per_second'], ',.0f'):>10}"
            f"  {'delivered' if m['delivered'] else '-'}"
        )
    if facts["awaited"]:
        lines.append(f"round {facts['round'] + 1} waits for {', '.join(facts['awaited'])}")
    for name, reason in facts["refused"].items():
        lines.append(f"round {facts['round']} refused {name}: {reason}")
    return "\n".join(lines)
