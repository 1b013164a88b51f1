"""Has somebody asked this replica to leave?"""

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

STAY, LEAVE, PART = 0, 1, 2  # what a process is asked: PART is to come back


class LeaveRequest:
    """Has somebody asked this replica to leave: by a file beside its state, or by an object in the bucket?

    The object names an incarnation, so it does not ask a later one, and is signed with the replica's key. A
    worker that was restarted after the request still finds it under the incarnation before.
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
            pass  # whoever needs the bucket finds out; the next round asks again
        except Refused as reason:
            if self.ignored != incarnation:
                self.ignored = incarnation
                self.log(f"somebody asks this replica to leave, but {reason}; going on")

    def asked(self) -> int:
        """STAY, LEAVE or PART."""
        if self.parting.asked():
            return PART
        if self.leader and not self.file.exists():
            self._look(self.incarnation)
        return LEAVE if self.file.exists() else STAY

    def pending(self) -> bool:
        return self.asked() != STAY

    def here(self) -> bool:
        """As far as this machine knows."""
        return self.file.exists() or self.parting.asked()
