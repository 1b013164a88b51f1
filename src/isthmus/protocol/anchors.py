"""Whole models in the bucket: written every few rounds, confirmed by the next round's manifest."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from isthmus.errors import RunError
from isthmus.protocol.cut import Cut
from isthmus.protocol.documents import AnchorDocument, RunInfo
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.objects import Objects
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, sha256
from isthmus.store import StoreRefused
from isthmus.store.together import together

if TYPE_CHECKING:
    from torch import Tensor

FILES_AT_ONCE = 4  # each may be large
NEAR = 4  # anchors requested by name before listing them all


class Anchors:
    """theta^(t) as closers write it, and the checks that decide which anchors count."""

    def __init__(self, objects: Objects, manifests: Manifests, cut: Cut) -> None:
        self.objects, self.store, self.manifests, self.cut = objects, objects.store, manifests, cut

    @property
    def run(self) -> RunInfo:
        return self.manifests.membership.run

    def put_anchor_shard(self, round_number: int, index: int, tensors: "Mapping[str, Tensor]") -> str:
        from safetensors.torch import save  # loads torch, which `status` does without

        data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        self.store.put(f"anchors/{round_number:06d}/{index}.safetensors", data)
        return sha256(data)

    def complete_anchor(self, round_number: int, digest: str, files: Sequence[str]) -> None:
        manifest = self.manifests.digest_of(round_number)
        body = AnchorDocument(round=round_number, digest=digest, files=tuple(files), manifest=manifest)
        self.store.put(_complete_key(round_number), self.objects.seal("anchor", body))

    def has_anchor(self, round_number: int) -> bool:
        """Whether a complete anchor exists. Its content is not checked."""
        return self.objects.exists(_complete_key(round_number))

    def anchor_rounds(self) -> list[int]:
        """Settled rounds with a complete anchor, oldest first; theta^(0) only if run.json names it."""
        names = (
            re.fullmatch(r"anchors/([0-9]{6,7})/complete\.json", key) for key in self.store.list("anchors/")
        )
        rounds, last = sorted({int(name[1]) for name in names if name}), self.manifests.last_round()
        return [t for t in rounds if (t or self.run.start) and t <= last]

    def anchors_down(self, last: int) -> Iterator[int]:
        """Yield the same rounds up to `last`, newest first. Closers write an anchor every few rounds, so it
        requests the last few by name and lists all of them only to go further back."""
        last = last if last <= self.manifests.newest else min(last, self.manifests.last_round())
        every = self.run.recipe.bucket.anchor_every
        near = list(islice(range(last - last % every, 0, -every), NEAR))
        yield from (t for t in near if self.has_anchor(t))
        yield from (t for t in reversed(self.anchor_rounds()) if t <= last and t not in near)

    def anchor_header(self, round_number: int) -> tuple[str, AnchorDocument]:
        """(writer, complete.json) of an anchor; Refused unless a closer signed it for this history."""
        try:
            sealed = self.objects.read(_complete_key(round_number), MAX_DOCUMENT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if sealed is None:
            raise Refused("it is not complete")
        writer, document = self.objects.open(
            sealed, "anchor", AnchorDocument, self.manifests.at(round_number).keys
        )
        try:
            self._check_header(writer, document, round_number)
        except Refused as reason:
            raise Refused(f"{reason} (it was written by {writer})") from None
        return writer, document

    def _check_header(self, writer: str, anchor: AnchorDocument, round_number: int) -> None:
        if writer not in self.manifests.at(round_number).closers:
            raise Refused(f"{writer} may not write it")
        if anchor.round != round_number or len(anchor.files) != len(self.cut.shards):
            raise Refused("it is for another round or another model")
        if round_number and self.manifests.manifest(round_number) is None:
            raise Refused("its round is not settled")
        if anchor.manifest != self.manifests.digest_of(round_number):
            raise Refused("it belongs to another history")
        if round_number == 0 and anchor.digest != self.run.start:
            raise Refused("it is not the theta^(0) that run.json names")

    def read_anchor(
        self, round_number: int, wanted: Sequence[int], confirmed: bool = True
    ) -> "tuple[str, dict[str, Tensor]]":
        """(digest of the whole, tensors of the wanted shards) of theta^(round), every file checked.

        An anchor counts if the next manifest states its digest. Without `confirmed`, the caller must prove
        that by a replay. A caller that reads all shards compares the digest itself.
        """
        try:
            _, anchor = self.anchor_header(round_number)
            if confirmed and round_number:
                self.manifests.check_confirmed(round_number, anchor.digest)
            tensors: dict[str, Tensor] = {}
            files = [partial(self._file, round_number, i, anchor.files[i]) for i in wanted]
            for file in together(files, FILES_AT_ONCE):
                tensors |= file
            return anchor.digest, tensors
        except Refused as reason:
            raise RunError(f"the anchor of round {round_number} cannot be used: {reason}") from None

    def is_whole(self, anchor: int) -> bool:
        """Whether all files of an anchor exist. Their hashes are checked when they are read."""
        keys = [f"anchors/{anchor:06d}/{i}.safetensors" for i in range(len(self.cut.shards))]
        return all(together([partial(self.objects.exists, key) for key in keys]))

    def believed_anchors(self, most: int) -> list[int]:
        """The newest rounds, at most `most`, whose anchors the next manifest confirms; newest first. Reads no
        anchor files."""
        return list(islice(filter(self.is_believed, self.anchors_down(self.manifests.last_round())), most))

    def is_believed(self, round_number: int) -> bool:
        """Whether the next manifest confirms an anchor that a closer wrote. Reads no anchor files."""
        with suppress(Refused):
            if round_number:
                self.manifests.check_confirmed(round_number, self.anchor_header(round_number)[1].digest)
                return True
        return False

    def _file(self, round_number: int, index: int, digest: str) -> "dict[str, Tensor]":
        from safetensors.torch import load

        shapes = self.cut.shapes
        limit = 8 * sum(prod(shapes[name]) for name in self.cut.shards[index]) * 2 + 2**20
        try:
            data = self.objects.read(f"anchors/{round_number:06d}/{index}.safetensors", limit)
            if data is None or sha256(data) != digest:
                raise Refused(f"file {index} is missing or not what complete.json says")
            loaded = load(data)
        except (StoreRefused, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
        for name, tensor in loaded.items():  # next to each parameter, the outer method's state for it
            own = name if name in shapes else name.partition("/")[2]
            if own not in self.cut.shards[index] or tuple(tensor.shape) != shapes[own]:
                raise Refused(
                    f"file {index} holds {name[:80]!r}, which this run's model has not in that shape"
                )
        wanted = set(self.cut.shards[index])
        if round_number and self.run.recipe.outer.method == "diloco":
            wanted |= {f"velocity/{name}" for name in self.cut.shards[index]}
        if missing := wanted - loaded.keys():
            raise Refused(f"file {index} does not hold {min(missing)}")
        return loaded


def _complete_key(round_number: int) -> str:
    return f"anchors/{round_number:06d}/complete.json"
