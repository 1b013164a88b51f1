"""Write anchors to the bucket: each process of a round's closer uploads the part that it trains."""

from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.protocol.anchor_upload import AnchorUpload
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.ledger import Ledger
from isthmus.replica.control_group import ControlGroup, all_true, collect
from isthmus.store import StoreError


class AnchorWriter:
    """One process's part. All processes of a replica make the same calls in the same rounds."""

    def __init__(
        self,
        ledger: Ledger,
        control: ControlGroup,
        exchange: LedgerExchange,
        log: Callable[[str], None],
        background: bool = True,
    ) -> None:
        """Without `background` the calling thread uploads."""
        self.ledger, self.control, self.exchange, self.log = ledger, control, exchange, log
        self.background = background
        self.upload: AnchorUpload | None = None  # the one in progress

    def due(self, round_number: int) -> bool:
        """Whether this round's anchor is written."""
        return round_number % self.ledger.run.recipe.bucket.anchor_every == 0

    def write(self, round_number: int, shards: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Start to upload theta^(t): tensors by shard."""
        if self.upload:
            self.log(
                f"the anchor of round {round_number} is not written: {self.upload.round}'s still goes up"
            )
            return
        self.upload = AnchorUpload(self.ledger, round_number, shards)
        if self.background:
            self.upload.start()
        else:
            self.upload.run()
            self.go_on(round_number)

    def go_on(self, round_number: int) -> None:
        """Let the anchor of `round_number` change. Complete an upload that all processes have finished."""
        upload = self.upload
        if upload is None:
            return
        upload.read.wait()
        if upload.round == round_number:
            upload.digest = self.exchange.settle_anchor()
        if not all_true(self.control, not upload.is_alive()):
            return
        self.upload = None
        try:
            upload.raise_fault()
        except StoreError as error:
            self._left_out(upload, error)
        if not all_true(self.control, upload.fault is None):
            return
        names = collect(self.control, upload.files, len(self.ledger.shards))
        if self.control.rank == 0:
            try:
                self.ledger.complete_anchor(upload.round, upload.digest, names)
            except StoreError as error:
                self._left_out(upload, error)

    def finish(self, round_number: int) -> None:
        """Complete the last upload after the last round."""
        if self.upload:
            self.upload.join()
            self.go_on(round_number)

    def _left_out(self, upload: AnchorUpload, error: StoreError) -> None:
        self.log(f"{error}; the anchor of round {upload.round} is left out")
