"""How a replica stands, according to its worker's and launcher's heartbeats: for `status` and the page."""

from collections.abc import Sequence

from msgspec.structs import replace

from isthmus.disk import in_words
from isthmus.protocol.heartbeat import WAITING, Heartbeat


def said_by_launcher(last: Heartbeat, waiting: Heartbeat) -> Heartbeat:
    """A worker's last heartbeat, with what its launcher says now that none runs."""
    return replace(
        last,
        state=WAITING,
        awaiting=waiting.awaiting,
        waited_seconds=waiting.waited_seconds,
        missing=waiting.missing,
        vitals=waiting.vitals,
    )


def missing_in_words(missing: Sequence[int], num_stages: int) -> list[str]:
    """The absent stages, by name; empty if unknown."""
    known = [stage for stage in missing if stage < num_stages]
    if not known or num_stages == 1:
        return []
    named = " and ".join(", ".join(map(str, known)).rsplit(", ", 1))
    others = "the other waits" if num_stages - len(known) == 1 else "the others wait"
    rest = f"; {others}" if len(known) < num_stages else ""
    return [f"lacks stage{'s' * (len(known) > 1)} {named}{rest}"]


def trouble(heartbeat: Heartbeat, age_seconds: float) -> list[str]:
    """What went wrong on the replica's machine, one line each; `age_seconds` is the heartbeat's."""
    vitals, said = heartbeat.vitals, []
    seconds = None if vitals.last_error_seconds is None else vitals.last_error_seconds + age_seconds
    ago = f", {seconds:.0f} s ago" if seconds is not None else ""
    why = f": {vitals.last_error}" if vitals.last_error else ""
    if vitals.restarts:
        times = f"{vitals.restarts:,} time{'s' * (vitals.restarts != 1)}"
        said.append(f"was started again {times}, the last{ago}{why}".replace(", the last,", ", the last"))
    elif why:
        said.append(f"failed{ago.removeprefix(',')}{why}")
    if vitals.disk_is_short:
        free, needed = in_words(vitals.disk_free_bytes), in_words(vitals.disk_needed_bytes)
        said.append(f"has {free} free on the disk of its state, and its next save needs {needed}")
    return said
