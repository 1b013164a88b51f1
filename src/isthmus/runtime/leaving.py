"""What a worker and its supervisor tell each other while it runs, and how it leaves.

One pipe connects them. The supervisor asks a worker to leave at the end of its round, or to part: a scheduler
takes the machine back (SIGTERM, some seconds, SIGKILL). A parting replica saves at once, since the kill may
come early. Then it trains to the end of the round if time allows, and otherwise stops between two inner
steps. A worker without a supervisor (`isthmus-worker`) gets the same wishes by signals.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, BinaryIO

from isthmus.protocol.trust import Refused
from isthmus.runtime.failure import Failure
from isthmus.runtime.process import Log, sign_lock
from isthmus.store.retry import StoreError

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

STAY, LEAVE, PART = 0, 1, 2  # answers for a process: PART leaves and comes back. The smaller wish counts
AGAIN_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again
BEAT_SECONDS = 1.0


class Parted(Exception):
    """This process has saved its state and stops inside a round. Not a fault, so not a RunError."""


class Parting:
    """The countdown of a machine that is taken back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.by: float | None = None
        self.saved = False  # whether this process saved since the request

    def begin(self, grace_seconds: float) -> None:
        """Start the countdown. Only the first call counts: Slurm sends SIGTERM several times."""
        if self.by is None:
            self.by = self.clock() + grace_seconds

    def asked(self) -> bool:
        return self.by is not None

    def fits(self, seconds: float) -> bool:
        """Whether this many seconds of inner steps fit. Half the time is kept to deliver and save."""
        return self.by is not None and seconds <= (self.by - self.clock()) / 2

    def is_over(self) -> bool:
        return self.by is not None and self.clock() >= self.by


class Orders(threading.Thread):
    """A worker's end of the pipe: what it is asked to do, and what it reports.

    The thread beats while the process runs; the supervisor kills a silent one. Without a supervisor's end the
    process ends too.
    """

    def __init__(self, pipe: Connection | None = None, lock: BinaryIO | None = None) -> None:
        """Without a `pipe` nobody supervises this process; `lock` is then its work folder's, if it leads."""
        super().__init__(daemon=True, name="orders")
        self.pipe, self.lock = pipe, lock
        self.leave, self.parting = False, Parting()
        self.sending = threading.Lock()
        if pipe is not None:
            self.start()

    def run(self) -> None:
        assert self.pipe is not None, "it starts with a pipe only"
        try:
            while True:
                if self.pipe.poll(BEAT_SECONDS):
                    self._heed(json.loads(self.pipe.recv_bytes()))
                self.tell()
        except (EOFError, OSError):  # the supervisor has ended
            os._exit(1)

    def _heed(self, order: dict[str, Any]) -> None:
        self.leave |= "leave" in order
        if "part" in order:
            self.parting.begin(order["part"])

    def tell(self, **message: Any) -> None:
        if self.pipe is not None:
            with self.sending:
                self.pipe.send_bytes(json.dumps(message).encode())

    def began(self, incarnation: str) -> None:
        """Report this start's incarnation."""
        self.tell(incarnation=incarnation)
        if self.lock is not None:
            sign_lock(self.lock, incarnation)

    def waits(self, text: str) -> None:
        """Report what this process waits for; "" once the wait is over."""
        self.tell(waits=text, missing=[])

    def failed(self, failure: Failure) -> None:
        self.tell(failure=asdict(failure))


class LinkNote:
    """Reports the neighbour that a stage without links waits for."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.said = orders, ""

    def wait(self, neighbour: int, why: str) -> None:
        if (text := f"stage {neighbour}: {why}") != self.said:
            self.said = text
            self.orders.tell(waits=text, missing=[neighbour])

    def over(self) -> None:
        if self.said:
            self.said = ""
            self.orders.waits("")


class Settled:
    """Reports that this process has trained a round to its end; replayed rounds do not count."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.trained = orders, False

    def step(self) -> None:
        self.trained = True

    def round(self) -> None:
        if self.trained:
            self.orders.tell(settled=True)
        self.trained = False


class LeaveRequest:
    """Detects a request to leave: from this machine, or by an object in the bucket.

    The object names an incarnation, so later ones ignore it, and is signed with the replica's key. A worker
    that was restarted after the request still finds it under the previous incarnation.
    """

    def __init__(
        self,
        orders: Orders,
        ledger: "Ledger",
        incarnation: str,
        log: Log,
        leader: bool,
        previous: str = "",
    ) -> None:
        self.orders, self.ledger, self.leader, self.log = orders, ledger, leader, log
        self.incarnation, self.ignored = incarnation, ""
        self.parting = orders.parting
        if leader:
            if previous:
                self._look(previous)
            orders.began(incarnation)

    def _look(self, incarnation: str) -> None:
        try:
            self.orders.leave |= self.ledger.asked_to_leave(incarnation)
        except StoreError:
            pass  # whatever needs the bucket will report it; the next round asks again
        except Refused as reason:
            if self.ignored != incarnation:
                self.ignored = incarnation
                self.log(f"somebody asks this replica to leave, but {reason}; going on")

    def asked(self) -> int:
        """Return STAY, LEAVE or PART."""
        if self.parting.asked():
            return PART
        if self.leader and not self.orders.leave:
            self._look(self.incarnation)
        return LEAVE if self.orders.leave else STAY

    def here(self) -> bool:
        """Whether this machine knows of a request."""
        return self.orders.leave or self.parting.asked()
