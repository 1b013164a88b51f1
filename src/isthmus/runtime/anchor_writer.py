"""Anchors into the bucket: a round's closer writes theta^(t), each of its processes what it trains."""

from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.protocol.anchor_upload import AnchorUpload
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.ledger import Ledger
from isthmus.replica.control_group import ControlGroup, agree, all_true, collect
from isthmus.store import StoreError


class AnchorWriter:
    """One process's part. All processes of a replica make the same calls, in the same rounds."""

    def __init__(
        self,
        ledger: Ledger,
        control: ControlGroup,
        exchange: LedgerExchange,
        log: Callable[[str], None],
        background: bool = True,
    ) -> None:
        """Without `background` an upload happens in the calling thread."""
        self.ledger, self.control, self.exchange, self.log = ledger, control, exchange, log
        self.background = background
        self.upload: AnchorUpload | None = None  # the one that is under way

    def due(self, round_number: int) -> bool:
        """Every so many rounds, and where somebody asks who cannot get past payloads that are lost."""
        wanted = agree(self.control, self.exchange.rescue.wants_anchor(round_number))
        return wanted or round_number % self.ledger.run.recipe.bucket.anchor_every == 0

    def write(self, round_number: int, shards: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Begin to put theta^(t): tensors by shard."""
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
        """The anchor of `round_number` may change. Complete an upload that all processes have done."""
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
        """After the last round."""
        if self.upload:
            self.upload.join()
            self.go_on(round_number)

    def _left_out(self, upload: AnchorUpload, error: StoreError) -> None:
        self.log(f"{error}; the anchor of round {upload.round} is left out")
