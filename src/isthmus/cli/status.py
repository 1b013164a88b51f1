"""`isthmus status`: which replicas are in a run, how far it is, and whom it waits for."""

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from isthmus.cli.arguments import add_json
from isthmus.disk import in_words
from isthmus.printing import visible
from isthmus.runlog import RunDir

if TYPE_CHECKING:
    from isthmus.protocol.fleet_state import FleetState

WRONG_CLOCK_SECONDS = 5.0


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "status",
        help="members, round, who is awaited, rates and losses of a run",
        description="Read a run's bucket and print how it stands: its round, every replica's state, rate "
        "and loss, and the replicas that the open round waits for. It writes nothing, so ages are by this "
        "machine's clock.",
        epilog="examples:\n  isthmus status s3://my-runs/first\n  isthmus status runs/demo --json\n"
        "  watch -n 5 isthmus status s3://my-runs/first      again and again\n",
    )
    parser.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    add_json(parser)
    parser.set_defaults(run=status)


def status(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.fleet_state import look
    from isthmus.protocol.place import find_place

    run = find_place(args.url).run
    ledger = open_ledger(args.url)
    found = look(ledger)
    if run and not found.held_out:
        found = replace(found, held_out=_recorded(run))
    print(json.dumps(asdict(found), indent=2) if args.json else table(found))
    return 0


def _recorded(run: RunDir) -> dict[str, Any] | None:
    """Return the newest held-out loss of a run directory: `train` measures it and writes it there."""
    rows = [row for row in run.rows() if row.loss_mixed is not None]
    if not rows:
        return None
    last = rows[-1]
    losses = {"full": last.loss_full, "pipelined": last.loss_pipelined, "mixed": last.loss_mixed}
    return {"round": last.round, **losses, "by": "train"}


def table(found: "FleetState") -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    settled = f"round {found.round}" if found.round else "none"
    wide = max([16, *(2 + len(m.replica) for m in found.members)])
    lines = [f'run "{found.run}" ({found.run_id}): {settled} of {found.rounds} is settled']
    if found.last_round_seconds is not None:
        lines[0] += f", the last took {found.last_round_seconds:.1f} s"
    lines.append(
        f"{'replica':<{wide}}{'kind':<11}{'closes':<8}{'state':<14}{'seen':>7}{'step':>8}{'loss':>8}{'tok/s':>10}{'disk':>10}"
        "  this round"
    )
    for m in found.members:
        kind = m.kind if m.stages == 1 else f"{m.stages} stages"
        seen = "-" if m.heartbeat_age_seconds is None else f"{m.heartbeat_age_seconds:.0f} s"
        disk = "-" if m.disk_free_bytes is None else in_words(m.disk_free_bytes)
        lines.append(
            f"{m.replica:<{wide}}{kind:<11}{'yes' if m.closes else '-':<8}{m.state:<14}"
            f"{seen:>7}{number(m.inner_step, 'd'):>8}{number(m.loss, '.3f'):>8}"
            f"{number(m.tokens_per_second, ',.0f'):>10}{disk:>10}  {'delivered' if m.delivered else '-'}"
        )
    lines += [f"{m.replica} waits: {visible(m.waits_for)}" for m in found.members if m.waits_for]
    lines += [f"{m.replica} {visible(words)}" for m in found.members for words in m.trouble]
    if found.clock_behind_seconds > WRONG_CLOCK_SECONDS:
        lines.append(
            f"this machine's clock is {found.clock_behind_seconds:.0f} s behind the bucket's: what was seen "
            "is older than it says"
        )
    if found.revoked:
        lines.append(f"revoked: {', '.join(found.revoked)}")
    if found.awaited:
        lines.append(f"round {found.round + 1} waits for {', '.join(found.awaited)}")
    if said := found.held_out:
        lines.append(f"held-out loss {said['mixed']:.3f} after round {said['round']}, by {said['by']}")
    lines += [
        f"round {found.round}: {count:,} tokens between the stages of {name} had values outside the range of "
        "its few-bit wire, which cuts them off"
        for name, count in found.outside_tokens.items()
    ]
    for name, reason in found.refused.items():
        lines.append(f"round {found.round}: refused {name}: {visible(reason)}")
    return "\n".join(lines)
