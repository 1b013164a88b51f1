"""Detect requests that this replica leave."""

from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.files import overwrite_own
from isthmus.protocol.trust import Refused
from isthmus.reading import read_note
from isthmus.runtime.parting import Parting
from isthmus.runtime.process import Log
from isthmus.store.retry import StoreError

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

STAY, LEAVE, PART = 0, 1, 2  # answers for a process: PART leaves and comes back. The smaller wish counts


class LeaveRequest:
    """Detects a request to leave: a file next to the replica's state, or an object in the bucket.

    The object names an incarnation, so later ones ignore it, and is signed with the replica's key. A worker
    that was restarted after the request still finds it under the previous incarnation.
    """

    def __init__(self, work: Path, ledger: "Ledger", incarnation: str, log: Log, leader: bool) -> None:
        self.file, self.ledger, self.leader, self.log = work / "leave", ledger, leader, log
        self.incarnation, self.ignored = incarnation, ""
        self.parting = Parting(work)
        if leader:
            note = work / "incarnation"
            self._look(read_note(note) or "")
            overwrite_own(note, incarnation)

    def _look(self, incarnation: str) -> None:
        if not incarnation.isalnum() or len(incarnation) > 64:
            return
        try:
            if self.ledger.asked_to_leave(incarnation):
                overwrite_own(self.file)
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
        if self.leader and not self.file.exists():
            self._look(self.incarnation)
        return LEAVE if self.file.exists() else STAY

    def here(self) -> bool:
        """Whether this machine knows of a request."""
        return self.file.exists() or self.parting.asked()
