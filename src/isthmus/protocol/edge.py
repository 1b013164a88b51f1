"""What the processes of one replica tell each other at the edge of a round: three control calls.

With its update, each process states the digests of its part of the anchor, its shards and its figures. Then
the leader says that the round is settled. Last, all say whether they could read what counts, and the leader
how the next round stands. A process alone makes no call.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
from msgspec import Struct

from isthmus.errors import Diverged, RunError
from isthmus.model.digest import anchor_digest
from isthmus.protocol.anchor_upload import AnchorUpload
from isthmus.protocol.documents import Hash
from isthmus.protocol.ledger import Ledger
from isthmus.replica.control_group import ControlGroup
from isthmus.runlog.facts import Facts
from isthmus.store import StoreError

UNKNOWN = -1
UPLOADING, UPLOADED, NOT_UPLOADED = 1, 2, 3


class Frame(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process's word. A call fills in what it has; numbers are shards."""

    digests: dict[int, Hash] = {}  # of the anchor, by shard
    rows: dict[int, tuple[Hash, int]] = {}  # shards of our update in the bucket: hash and size
    facts: Facts | None = None
    upload: int = 0  # the state of an anchor's upload
    files: dict[int, Hash] = {}  # of the uploaded anchor
    wish: int = 0  # see `Leave.asked`
    read: bool = False  # it has read all that the round counts
    settled: bool = False  # the leader's word, as the rest
    committed: bool = False
    standing: int = UNKNOWN


class Edge:
    """One process's end. All processes of a replica make the same calls."""

    def __init__(self, ledger: Ledger, control: ControlGroup, log: Callable[[str], None]) -> None:
        self.ledger, self.control, self.log = ledger, control, log
        self.replica, self.leads = ledger.signer.replica, control.rank == 0
        self.anchor = ""  # digest of the anchor that all processes hold now
        self.held = 0  # its round
        self.pending: Future[Mapping[int, str]] | None = None  # its digests, not agreed on yet
        self.trying = False  # the anchor may still turn out to be a wrong one
        self.upload: AnchorUpload | None = None  # the one in progress
        self.tells_anchors = True  # log anchor digests, by which replicas are compared; off on a terminal

    def share(self, **mine: Any) -> list[Frame]:
        """The frames of all processes, by rank. Any of them also carries digests and uploads that are due."""
        pending, self.pending = self.pending, None
        if pending:
            mine["digests"] = pending.result()
        if upload := self.upload:
            mine["upload"], mine["files"] = self._state_of(upload), upload.files
        frame, frames = Frame(**mine), list[Frame]()
        if self.control.size == 1:
            frames = [frame]
        else:
            for rank, data in enumerate(self.control.share(msgspec.json.encode(frame))):
                try:
                    frames.append(msgspec.json.decode(data, type=Frame))
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    raise RunError(
                        f"process {rank} of this replica shared what nobody asked for: {data[:60]!r}"
                    ) from None
        if pending:
            self.anchor = self._agreed(frames)
            if self.tells_anchors and not self.trying:
                self.log(f"round {self.held}: anchor {self.anchor[:16]}")
        if upload:
            self._go_on(upload, frames)
        return frames

    def hold(self, round_number: int, digests: Future[Mapping[int, str]]) -> None:
        """The anchor of a round is here; the next frame agrees on its digest."""
        self.held, self.pending, self.trying = round_number, digests, False

    def hold_now(self, round_number: int, digests: Mapping[int, str]) -> str:
        """The digest of a round's anchor, whose parts are these."""
        done = Future[Mapping[int, str]]()
        done.set_result(digests)
        self.held, self.pending, self.trying = round_number, done, True
        return self.settle()

    def settle(self) -> str:
        """The digest of the anchor that all processes hold now."""
        if self.pending:
            self.share()
        return self.anchor

    def _agreed(self, frames: list[Frame]) -> str:
        parts: dict[int, str] = {}
        for frame in frames:
            for index, digest in frame.digests.items():
                if parts.setdefault(index, digest) != digest:
                    raise Diverged(
                        f"replica {self.replica}: its stages hold different copies of shard {index} "
                        f"after round {self.held}"
                    )
        every = range(len(self.ledger.shards))
        if parts.keys() != set(every):
            raise RunError(f"replica {self.replica}: no stage holds some shards after round {self.held}")
        return anchor_digest([parts[i] for i in every])

    def collect(self, rows: list[Mapping[int, Any]]) -> list[Any]:
        """One value for each shard; the lowest rank counts."""
        found: dict[int, Any] = {}
        for row in rows:
            found = {**row, **found}
        every = range(len(self.ledger.shards))
        if missing := [i for i in every if i not in found]:
            raise RunError(f"no process of this replica has shard {missing[0]}")
        return [found[i] for i in every]

    # The anchor on its way to the bucket: each process of a round's closer uploads the part that it trains

    def _state_of(self, upload: AnchorUpload) -> int:
        if upload.is_alive():
            return UPLOADING
        try:
            upload.raise_fault()
        except StoreError as error:
            self._left_out(upload, error)
            return NOT_UPLOADED
        return UPLOADED

    def _go_on(self, upload: AnchorUpload, frames: list[Frame]) -> None:
        """Complete an upload that all processes have finished."""
        if upload.round == self.held:
            upload.digest = self.anchor
        states = [frame.upload for frame in frames]
        if UPLOADING in states:
            return
        self.upload = None
        if self.leads and NOT_UPLOADED not in states:
            names = self.collect([frame.files for frame in frames])
            try:
                self.ledger.complete_anchor(upload.round, upload.digest, names)
            except StoreError as error:
                self._left_out(upload, error)

    def _left_out(self, upload: AnchorUpload, error: StoreError) -> None:
        self.log(f"{error}; the anchor of round {upload.round} is left out")
