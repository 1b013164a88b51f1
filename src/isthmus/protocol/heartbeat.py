"""A replica's regular report about itself, and how long it may stay silent; its requests to leave."""

import math
import re
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from isthmus.config import Recipe
from isthmus.config.fleet import MOST_STAGES
from isthmus.layout.requests import MOST_BEAT_SECONDS
from isthmus.protocol.documents import Document, LeaveDocument, Round, Start, decode, encode
from isthmus.protocol.membership import Membership
from isthmus.protocol.objects import Objects
from isthmus.protocol.trust import Refused
from isthmus.runlog.facts import MAX_WORD, Count, Facts, Figure
from isthmus.store import StoreRefused
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.store import Info

GONE = ("left", "finished")  # the replica has ended and said so
CATCHING_UP = "catching up"
READY = "ready"  # it has caught up and trains from the next round on
BEHIND = ("starting", CATCHING_UP)  # it cannot begin the next round with the others
LEAVING = ("leaving", "left")  # the next round does not wait for it
LIVE = "live"  # live.json, a worker's heartbeat
WAITING = "waiting"  # a supervisor without a worker; in waiting.json, never in live.json
MISSED_HEARTBEATS = 5
MAX_HEARTBEAT_BYTES = 2**16
MOST_MISSING = 64  # stages that one heartbeat lists as missing
Word = Annotated[str, Meta(max_length=MAX_WORD, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Stage = Annotated[int, Meta(ge=0, lt=MOST_STAGES)]
Positive = Annotated[float, Meta(ge=0.0, le=2.0**63)]


class Vitals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine behind a heartbeat: its last fault, and its free disk space."""

    restarts: Count = 0  # of workers, since the supervisor started
    last_error: Word = ""
    last_error_seconds: Positive | None = None  # age of the error when this was written
    disk_free_bytes: Positive | None = None  # on the disk of its private state
    disk_needed_bytes: Positive | None = None  # for the next save of it

    @property
    def disk_is_short(self) -> bool:
        free, needed = self.disk_free_bytes, self.disk_needed_bytes
        return free is not None and needed is not None and free < needed


class Heartbeat(Document, frozen=True, kw_only=True):
    """members/<replica>/live.json; also waiting.json, where a supervisor says why no worker runs.

    An empty text or a zero means unknown.
    """

    incarnation: Start = ""
    beat: Count = 0  # grows with every heartbeat of an incarnation
    kind: Word = ""
    stages: Count = 0
    state: Word = ""  # starting, catching up, training, delivering, leaving, left, finished
    round: Round = 0
    holds: Round = 0  # the round whose anchor it holds
    inner_step: Count = 0
    loss: Figure | None = None
    tokens_per_second: Figure | None = None
    awaiting: Word = ""
    waited_seconds: Figure | None = None  # how long it could not train, when this was written
    farewell: Facts = Facts()  # facts counted after its last commit
    pid: Count = 0
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")] = ""  # the machine's name
    every_seconds: Figure | None = None  # until the next one comes; None: as often as the recipe says
    # absent stages; the others only wait
    missing: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=MOST_STAGES)], ...], Meta(max_length=MOST_MISSING)
    ] = ()
    vitals: Vitals = Vitals()

    @property
    def gone(self) -> bool:
        return self.state in GONE

    @property
    def waits(self) -> bool:
        """Whether something keeps it from training, such as a full bucket."""
        return bool(self.awaiting) and self.waited_seconds is not None and not self.gone

    @property
    def leaving(self) -> bool:
        return self.state in LEAVING


Beat = tuple[Heartbeat, float]  # with its write time by the store's clock


def fitting(heartbeat: Heartbeat) -> Heartbeat:
    """Leave out what readers would refuse, such as a word that is too long. Without its heartbeat a replica
    would look as if it were gone."""
    found = Heartbeat()
    for name in heartbeat.__struct_fields__:
        with suppress(Refused):
            trial = replace(found, **{name: getattr(heartbeat, name)})
            found = decode(encode(trial), Heartbeat, "heartbeat")
    return found


def own_host() -> str:
    """This machine's name in the form that a heartbeat allows."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]


def waiting_text(heartbeat: Heartbeat, age_seconds: float) -> str:
    """What a supervisor waits for, and how long: by its own clock until it wrote, then by the reader's."""
    seconds = max(0.0, (heartbeat.waited_seconds or 0.0) + age_seconds)
    return f"{heartbeat.awaiting} (for {seconds:.0f} s)"


def silent_after(recipe: Recipe, heartbeat: Heartbeat | None = None) -> float:
    """Seconds without a heartbeat after which a replica is silent and its name is free again.

    A heartbeat states when the next one comes. The extra time allows for a bad network, so it does not grow
    with the interval. A stated interval counts only up to a limit.
    """
    every = recipe.bucket.heartbeat_seconds
    said = heartbeat.every_seconds or 0.0 if heartbeat else 0.0
    return max(every, min(said, MOST_BEAT_SECONDS)) + (MISSED_HEARTBEATS - 1) * every


class Heartbeats:
    """The heartbeats and requests to leave of all replicas."""

    def __init__(self, objects: Objects, membership: Membership) -> None:
        self.objects, self.store, self.membership = objects, objects.store, membership

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write our heartbeat; a waiting supervisor writes to a file of its own."""
        name = WAITING if heartbeat.state == WAITING else LIVE
        sealed = self.objects.seal("heartbeat", fitting(heartbeat))
        self.store.put(beat_key(self.objects.signer.replica, name), sealed, durable=False)

    def scan(self) -> "dict[tuple[str, str], Info]":
        """(replica, live or waiting) -> write time and size, from one listing."""
        listed = self.store.scan("members")
        keys = {(r, n): beat_key(r, n) for r in sorted(self.membership.names) for n in (LIVE, WAITING)}
        return {which: listed[key] for which, key in keys.items() if key in listed}

    def heartbeat(self, replica: str, name: str = LIVE) -> Beat | None:
        """(the replica's last heartbeat, when it was written by the store's clock), or None. An invalid one
        counts as none."""
        key, keys = beat_key(replica, name), self.membership.run.keys
        with suppress(Refused, StoreRefused):
            found = self.store.foreign(partial(self.store.get_dated, key, max_bytes=MAX_HEARTBEAT_BYTES))
            if found is not None:
                signer, heartbeat = self.objects.open(found[0], "heartbeat", Heartbeat, keys)
                return (heartbeat, found[1].modified_unix_seconds) if signer == replica else None
        return None

    def heartbeats(self, now: float) -> tuple[dict[str, Beat], dict[str, Beat]]:
        """(heartbeats, notes of supervisors without a worker), each by replica: one listing, and a
        request for each that counts. `now` is the store's time. Readers only."""
        written, recipe = self.scan(), self.membership.run.recipe
        beats = self._read([name for name, kind in written if kind == LIVE], LIVE)
        idle: list[str] = []
        for (name, kind), info in written.items():
            live_at = beats[name][1] if name in beats else -math.inf
            if kind == WAITING and live_at <= info.modified_unix_seconds >= now - silent_after(recipe):
                # Not while a worker's heartbeats arrive.
                idle += [name] * (now - live_at >= 2 * recipe.bucket.heartbeat_seconds)
        return beats, self._read(idle, WAITING)

    def _read(self, names: list[str], document: str) -> dict[str, Beat]:
        found = together([partial(self.heartbeat, name, document) for name in names])
        return {name: beat for name, beat in zip(names, found, strict=True) if beat}

    def ask_to_leave(self, incarnation: str) -> None:
        """Ask this incarnation of our replica, wherever it runs, to leave at the end of its round."""
        sealed = self.objects.seal("leave", LeaveDocument(incarnation=incarnation))
        self.store.put(leave_key(self.objects.signer.replica, incarnation), sealed)

    def asked_to_leave(self, incarnation: str) -> bool:
        """Whether a holder of our key asked this incarnation to leave. Refused if anyone else did."""
        replica = self.objects.signer.replica
        try:
            data = self.objects.read(leave_key(replica, incarnation), MAX_HEARTBEAT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if data is None:
            return False
        signer, said = self.objects.open(data, "leave", LeaveDocument, self.membership.run.keys)
        if signer != replica or said.incarnation != incarnation:
            raise Refused(f"the request is {signer}'s, or for another start")
        return True


def beat_key(replica: str, document: str) -> str:
    return f"members/{replica}/{document}.json"


def leave_key(replica: str, incarnation: str) -> str:
    return f"members/{replica}/leave-{incarnation}"
