"""members/<replica>/log-<stage>.json: the last lines of a stage's log, for people elsewhere. Nothing goes by
them, closers never read them, and whoever shows them shows them as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from isthmus.config.fleet import MOST_STAGES
from isthmus.protocol.schema import Many, Text, Whole, check
from isthmus.protocol.trust import Refused, open_sealed
from isthmus.store.retry import StoreRefused

if TYPE_CHECKING:  # a worker imports this before it can say that a package is missing
    from isthmus.protocol.ledger import Ledger

MOST_LINES = 60
MOST_LINE = 300  # characters
MOST_LOG_BYTES = 1 << 17
MOST_ASKED = 16  # stages of a replica
ALIVE_SECONDS = 45.0  # a machine without the replica's leader puts its lines again after so long
HEARD_SECONDS = 2 * ALIVE_SECONDS
KIND = "log"
LOG = {"stage": Whole(0, MOST_STAGES), "lines": Many(Text(MOST_LINE), MOST_LINES)}


@dataclass(frozen=True, slots=True)
class LogLines:
    """Of one stage; a full replica is its stage 0."""

    stage: int
    lines: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "lines": list(self.lines)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "LogLines":
        """Refused unless it is as it should be."""
        check(body, LOG)
        return cls(body["stage"], tuple(body["lines"]))


def log_key(replica: str, stage: int) -> str:
    return f"members/{replica}/log-{stage}.json"


def put_log(ledger: "Ledger", log: LogLines) -> None:
    sealed = ledger.signer.seal(KIND, ledger.run.run_id, log.to_dict())
    ledger.store.put(log_key(ledger.signer.replica, log.stage), sealed, durable=False)


def read_log(ledger: "Ledger", replica: str, stage: int) -> tuple[LogLines, float] | None:
    """(the last lines of a stage, when they were written by the store's clock); None where there are none
    that the replica has signed."""
    key = log_key(replica, stage)
    try:
        found = ledger.store.foreign(partial(ledger.store.get_dated, key, max_bytes=MOST_LOG_BYTES))
        if found is None:
            return None
        signer, body = open_sealed(found[0], KIND, ledger.run.run_id, ledger.run.keys)
        log = LogLines.from_dict(body)
    except (Refused, StoreRefused):
        return None
    mine = signer == replica and log.stage == stage
    return (log, found[1].modified_unix_seconds) if mine else None


def heard_stages(ledger: "Ledger", replica: str, num_stages: int, since: float, now: float) -> list[int]:
    """Stages of a silent replica whose own machines have put their lines since its last heartbeat, and not
    long ago: they wait for the one that has gone. Both times are the store's."""
    heard = []
    for stage in range(min(num_stages, MOST_ASKED)):
        found = read_log(ledger, replica, stage)
        if found and found[1] > since and now - found[1] < HEARD_SECONDS:
            heard.append(stage)
    return heard


def new_lines(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Those of `now` that come after `before`: both are ends of one log."""
    for overlap in range(min(len(before), len(now)), 0, -1):
        if list(before[-overlap:]) == list(now[:overlap]):
            return list(now[overlap:])
    return list(now)
