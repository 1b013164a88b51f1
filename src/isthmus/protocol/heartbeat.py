"""What a replica says of itself every few seconds, and how long a silence may last."""

import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.config import Recipe
from isthmus.config.fleet import MOST_STAGES
from isthmus.layout.requests import MOST_BEAT_SECONDS
from isthmus.runlog.facts import Facts, count, number, word

GONE = ("left", "finished")  # the replica has ended, and said so
BEHIND = ("starting", "catching up")  # it cannot begin the next round with the others
LEAVING = ("leaving", "left")  # the next round does not wait for it
WAITING = "waiting"  # of a launcher without a worker; in waiting.json, never in live.json
LOST = "a copy of lost "  # so begins what a replica awaits that misses payloads of a settled round
MISSED_HEARTBEATS = 5
HOST = r"[A-Za-z0-9._-]{1,64}"
MOST_MISSING = 64  # stages of a replica that one heartbeat calls missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a heartbeat says of the machine behind it: its last fault, and the room on its disk."""

    restarts: int = 0  # of workers, since a launcher last ended as it should
    last_error: str = ""
    last_error_seconds: float | None = None  # ago, when this was written
    disk_free_bytes: float | None = None  # of the folder with its private state
    disk_needed_bytes: float | None = None  # by the next save of it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def disk_is_short(self) -> bool:
        free, needed = self.disk_free_bytes, self.disk_needed_bytes
        return free is not None and needed is not None and free < needed

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Vitals":
        """From a stranger: see Heartbeat."""
        return cls(
            restarts=max(0, count(body, "restarts")),
            last_error=word(body, "last_error"),
            last_error_seconds=_positive(body, "last_error_seconds"),
            disk_free_bytes=_positive(body, "disk_free_bytes"),
            disk_needed_bytes=_positive(body, "disk_needed_bytes"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """members/<replica>/live.json, and waiting.json beside it, where a launcher says why no worker runs.

    An empty text or a zero stands for what is not known.
    """

    incarnation: str = ""
    beat: int = 0  # grows with every heartbeat of an incarnation: an old one that is put back is known by it
    kind: str = ""
    stages: int = 0
    state: str = ""  # starting, catching up, training, delivering, leaving, left, finished
    round: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    awaiting: str = ""
    waited_seconds: float | None = None  # of one that cannot train, when this was written
    farewell: Facts = field(default_factory=Facts)  # what it counted after its last commit
    pid: int = 0
    host: str = ""  # the machine's name, to tell two machines with one key from each other
    also_on: str = ""  # machine and process of another start with the same key, while it beats
    every_seconds: float | None = None  # until the next one comes; None: as often as the recipe says
    missing: tuple[int, ...] = ()  # stages that are not there; those beside them only wait
    vitals: Vitals = field(default_factory=Vitals)

    @property
    def gone(self) -> bool:
        return self.state in GONE

    @property
    def waits(self) -> bool:
        """Does it wait for something that keeps it from training, such as a bucket that is full?"""
        return bool(self.awaiting) and self.waited_seconds is not None and not self.gone

    @property
    def stuck(self) -> bool:
        """Does it wait for payloads that are lost? Nobody waits for it meanwhile."""
        return self.awaiting.startswith(LOST)

    @property
    def leaving(self) -> bool:
        return self.state in LEAVING

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"farewell": self.farewell.to_dict()}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Heartbeat":
        """From a stranger: a value that is not of the right type and size is left out."""
        farewell, vitals = body.get("farewell"), body.get("vitals")
        return cls(
            incarnation=said if re.fullmatch(r"[\w-]{1,64}", said := word(body, "incarnation")) else "",
            beat=count(body, "beat"),
            kind=word(body, "kind"),
            stages=count(body, "stages"),
            state=word(body, "state"),
            round=count(body, "round"),
            inner_step=count(body, "inner_step"),
            loss=number(body, "loss"),
            tokens_per_second=number(body, "tokens_per_second"),
            awaiting=word(body, "awaiting"),
            waited_seconds=number(body, "waited_seconds"),
            farewell=Facts.from_dict(farewell) if isinstance(farewell, dict) else Facts(),
            pid=count(body, "pid"),
            host=said if re.fullmatch(HOST, said := word(body, "host")) else "",
            also_on=word(body, "also_on"),
            every_seconds=number(body, "every_seconds"),
            missing=_stages(body.get("missing")),
            vitals=Vitals.from_dict(vitals) if isinstance(vitals, dict) else Vitals(),
        )


def _stages(listed: Any) -> tuple[int, ...]:
    """Numbers of stages, in order; nothing where one of them is none."""
    if not isinstance(listed, list) or len(listed) > MOST_MISSING:
        return ()
    good = all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < MOST_STAGES for s in listed)
    return tuple(sorted(set(listed))) if good else ()


def _positive(body: Mapping[str, Any], key: str) -> float | None:
    found = number(body, key)
    return found if found is not None and found >= 0 else None


def own_host() -> str:
    """This machine's name as a heartbeat may say it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]


def waiting_text(heartbeat: Heartbeat, age_seconds: float) -> str:
    """What a launcher waits for, and for how long now: its own clock until it wrote, then the reader's."""
    seconds = max(0.0, (heartbeat.waited_seconds or 0.0) + age_seconds)
    return f"{heartbeat.awaiting} (for {seconds:.0f} s)"


def silent_after(recipe: Recipe, heartbeat: Heartbeat | None = None) -> float:
    """Seconds without a heartbeat after which a replica is silent and its name is free again.

    A heartbeat says when the next one comes. What is added is for a bad network, not for its author: so it
    does not grow with the interval, and a stated one is believed up to a limit.
    """
    every = recipe.bucket.heartbeat_seconds
    said = heartbeat.every_seconds or 0.0 if heartbeat else 0.0
    return max(every, min(said, MOST_BEAT_SECONDS)) + (MISSED_HEARTBEATS - 1) * every
