"""A corpus's documents in a fixed order, each with its split and the position after it."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.data.readers import Source

# Bounds of one encode_batch: the library needs some 100 bytes of memory per token.
BATCH_TEXT_BYTES = 2 << 20
BATCH_DOCUMENTS = 2048


class Position(NamedTuple):
    """A reading position: all sources before `source`, and the first `documents` documents of it."""

    source: int = 0
    documents: int = 0
    input_bytes: int = 0  # text read from the inputs so far, to compare with the limit


START = Position()


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    split: str
    size: int  # bytes of UTF-8
    after: Position
    consumed: int  # stored bytes read so far, for the progress bar


@dataclass(frozen=True, slots=True)
class DocumentOrder:
    """Held-out files first, so that their faults show early; then the inputs up to the limit."""

    inputs: Sequence[Source]
    validation: Sequence[Source]  # empty: hold out a share of the inputs
    share: float
    seed: int
    text_field: str
    limit_bytes: int | None

    @property
    def sources(self) -> list[Source]:
        return [*self.validation, *self.inputs]

    def split_of(self, text: bytes) -> str:
        """Pick an input document's split by a hash of its text: all copies are on the same side."""
        return "validation" if not self.validation and self.draw(text) < self.share * 2**64 else "train"

    def draw(self, text: bytes) -> int:
        """Draw 64 bits. A share holds out documents below it, so a larger share includes a smaller one."""
        salt = self.seed.to_bytes(16, "little", signed=True)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")

    def after(self, start: Position) -> Iterator[Document]:
        """Yield every document after `start`, rereading but not encoding earlier ones of the same file."""
        sources, input_bytes = self.sources, start.input_bytes
        before = sum(source.size for source in sources[: start.source])
        for index in range(start.source, len(sources)):
            source = sources[index]
            is_input = index >= len(self.validation)
            skip = start.documents if index == start.source else 0
            number = 0
            for text in source.documents(self.text_field):
                number += 1
                if number <= skip:
                    continue
                if is_input and self.limit_bytes is not None and input_bytes >= self.limit_bytes:
                    return
                encoded = text.encode()
                input_bytes += len(encoded) if is_input else 0
                split = self.split_of(encoded) if is_input else "validation"
                position = Position(index, number, input_bytes)
                yield Document(text, split, len(encoded), position, before + source.consumed)
            before += source.size


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents for encoding, within both bounds."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= BATCH_TEXT_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_ahead(coming: Iterator[list[Document]], reader: Executor) -> Iterator[list[Document]]:
    """Read the next batch while the current one is encoded."""
    future = reader.submit(next, coming, None)
    while (batch := future.result()) is not None:
        future = reader.submit(next, coming, None)
        yield batch
