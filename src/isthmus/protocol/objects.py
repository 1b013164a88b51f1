"""The objects of one run: signed documents, and objects that another replica may have written."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from isthmus.errors import ConfigError
from isthmus.protocol.documents import RunInfo, decode
from isthmus.protocol.trust import Refused, Signer, open_raw
from isthmus.store import Store, StoreRefused

T = TypeVar("T", bound=Struct)


class Objects:
    """Seals documents with our key, if we have one, and opens those of others."""

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None) -> None:
        self.store, self.run_id, self.digest = store, run.run_id, run.digest
        self._signer: Signer | None = None
        if signer:
            self.sign_as(signer)

    @property
    def signer(self) -> Signer:
        assert self._signer is not None, "a ledger without a key only reads"
        return self._signer

    def sign_as(self, signer: Signer) -> None:
        check_pinned(self.digest, signer)
        self._signer = signer

    def seal(self, kind: str, body: Struct) -> bytes:
        return self.signer.seal(kind, self.run_id, body)

    def open(self, data: bytes, kind: str, form: type[T], keys: Mapping[str, str]) -> tuple[str, T]:
        """(who signed it, the document); Refused unless one of `keys` did and its fields are valid."""
        signer, body = open_raw(data, kind, self.run_id, keys)
        try:
            return signer, decode(body, form, kind)
        except Refused as reason:
            raise Refused(f"{reason} (it was written by {signer})") from None

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """An object that another may have written, or None. StoreRefused: only this one is unreadable."""
        return self.store.foreign(lambda: self.store.get(key, max_bytes=max_bytes))

    def exists(self, key: str) -> bool:
        """Whether an object has this key."""
        with suppress(StoreRefused):
            return self.store.foreign(lambda: self.store.head(key)) is not None
        return False


def check_pinned(run_digest: str, signer: Signer) -> None:
    """Check that the key file names this run: run.json may have been replaced."""
    if signer.pinned and signer.pinned != run_digest:
        raise ConfigError(
            f"run.json in this bucket is not the one that the key of {signer.replica} was made for: it was "
            "replaced, or this is the bucket of another run"
        )
