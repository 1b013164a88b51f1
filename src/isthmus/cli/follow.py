"""`isthmus status --follow`: redraw the table on a terminal, or print a line for each change elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from isthmus.cli.status import table
from isthmus.printing import unguarded, visible
from isthmus.protocol.fleet_state import FleetState

FOLLOW_SECONDS = 3.0
CLEAR = "\x1b[H\x1b[J"  # go to the top and clear what is below


def follow(
    look: Callable[[], FleetState], stream: TextIO | None = None, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Poll until the run is over or Ctrl-C; both exit normally. A bucket that does not answer is retried."""
    from isthmus.runlog.live import is_interactive
    from isthmus.store.retry import StoreError

    out: TextIO = sys.stdout if stream is None else stream
    screen = is_interactive(out)
    before: FleetState | None = None
    with suppress(KeyboardInterrupt):
        while True:
            try:
                now = look()
            except StoreError as error:
                if before is None:
                    raise
                print(f"isthmus: {visible(error)}; still trying", file=sys.stderr)
                sleep(FOLLOW_SECONDS)
                continue
            if screen:
                unguarded(out).write(CLEAR)
                print(table(now), file=out)
                print("\n(every 3 s; Ctrl-C ends this, and not the run)", file=out, flush=True)
            else:
                for line in [table(now)] if before is None else changes(before, now):
                    print(line, file=out, flush=True)
            if now.round >= now.rounds:
                return 0
            before = now
            sleep(FOLLOW_SECONDS)
    return 0


def changes(before: FleetState, now: FleetState) -> list[str]:
    """Return one line per change."""
    said = []
    if now.round > before.round:
        said.append(round_line(now))
    earlier = {member.replica: member for member in before.members}
    for member in now.members:
        was = earlier.get(member.replica)
        if was is None:
            said.append(f"{member.replica} has come: {member.state}")
            continue
        usual = {was.state, member.state} <= {"training", "delivering", "catching up", "starting"}
        if member.state != was.state and not usual:
            why = f" ({visible(member.waits_for)})" if member.waits_for else ""
            said.append(f"{member.replica}: {was.state} -> {member.state}{why}")
        if (member.restarts, member.missing) != (was.restarts, was.missing):
            said += [f"{member.replica} {visible(words)}" for words in member.trouble]
    return said


def round_line(now: FleetState) -> str:
    losses = [member.loss for member in now.members if member.loss is not None]
    parts = [f"round {now.round}/{now.rounds}"]
    parts += [f"{now.last_round_seconds:.1f} s"] if now.last_round_seconds is not None else []
    parts += [f"loss {sum(losses) / len(losses):.3f}"] if losses else []
    if said := now.held_out:
        parts.append(f"held-out {said['mixed']:.3f} (round {said['round']})")
    parts += [f"refused {', '.join(now.refused)}"] if now.refused else []
    return "  ".join(parts)
