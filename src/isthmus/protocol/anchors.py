"""Whole models in the bucket: written every few rounds, believed for those who have signed their digest."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from isthmus.errors import RunError
from isthmus.protocol.documents import ANCHOR
from isthmus.protocol.payloads import Payloads
from isthmus.protocol.schema import check
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, open_sealed, sha256
from isthmus.store import StoreRefused

if TYPE_CHECKING:
    from torch import Tensor

FILES_AT_ONCE = 4  # each may be large
NEAR = 4  # anchors that are asked for by name before all are listed


class Anchors(Payloads):
    """theta^(t) as closers write it, and which of it is believed."""

    def put_anchor_shard(self, round_number: int, index: int, tensors: "Mapping[str, Tensor]") -> str:
        from safetensors.torch import save  # loads torch, which `status` does without

        data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        self.store.put(f"anchors/{round_number:06d}/{index}.safetensors", data)
        return sha256(data)

    def complete_anchor(self, round_number: int, digest: str, files: Sequence[str]) -> None:
        manifest = self.digest_of(round_number)
        body = {"round": round_number, "digest": digest, "files": list(files), "manifest": manifest}
        sealed = self.signer.seal("anchor", self.run.run_id, body)
        self.store.put(_complete_key(round_number), sealed)

    def has_anchor(self, round_number: int) -> bool:
        """Is there a complete one? Nothing is said about what is in it."""
        with suppress(StoreRefused):
            return self.store.foreign(lambda: self.store.head(_complete_key(round_number))) is not None
        return False

    def anchor_rounds(self) -> list[int]:
        """Settled rounds with a complete anchor, oldest first; theta^(0) only where run.json names it."""
        names = (
            re.fullmatch(r"anchors/([0-9]{6,7})/complete\.json", key) for key in self.store.list("anchors/")
        )
        rounds, last = sorted({int(name[1]) for name in names if name}), self.last_round()
        return [t for t in rounds if (t or self.run.start) and t <= last]

    def anchors_down(self, last: int) -> Iterator[int]:
        """The same rounds up to `last`, newest first. Closers write an anchor every so many rounds, so the
        last few are asked for by name; all are listed only for who goes further back."""
        last = last if last <= self.newest else min(last, self.last_round())
        every = self.run.recipe.bucket.anchor_every
        near = list(islice(range(last - last % every, 0, -every), NEAR))
        yield from (t for t in near if self.has_anchor(t))
        yield from (t for t in reversed(self.anchor_rounds()) if t <= last and t not in near)

    def anchor_header(self, round_number: int) -> tuple[str, dict[str, Any]]:
        """(writer, body) of an anchor's complete.json; Refused unless a closer signed it for this history."""
        try:
            sealed = self._theirs(_complete_key(round_number), MAX_DOCUMENT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if sealed is None:
            raise Refused("it is not complete")
        # The closer of the round writes it, and may have another key before it is done.
        runs = [self.at(round_number), self.at(round_number + 1)] if round_number else [self.at(0)]
        try:
            writer, body = open_sealed(sealed, "anchor", self.run.run_id, runs[0].keys)
        except Refused:
            writer, body = open_sealed(sealed, "anchor", self.run.run_id, runs[-1].keys)
        try:
            self._check_header(writer, body, round_number)
        except Refused as reason:
            raise Refused(f"{reason} (it was written by {writer})") from None
        return writer, body

    def _check_header(self, writer: str, body: dict[str, Any], round_number: int) -> None:
        if writer not in self.at(round_number).closers:
            raise Refused(f"{writer} may not write it")
        check(body, ANCHOR)
        if body["round"] != round_number or len(body["files"]) != len(self.shards):
            raise Refused("it is for another round or another model")
        if round_number and self.manifest(round_number) is None:
            raise Refused("its round is not settled")
        if body["manifest"] != self.digest_of(round_number):
            raise Refused("it belongs to another history")
        if round_number == 0 and body["digest"] != self.run.start:
            raise Refused("it is not the theta^(0) that run.json names")
        if decision := self.repairs.decision(round_number):
            raise Refused(f"{decision}")

    def read_anchor(
        self, round_number: int, wanted: Sequence[int], witnessed: bool = True
    ) -> "tuple[str, dict[str, Tensor]]":
        """(digest of the whole, tensors of the wanted shards) of theta^(round), every file checked.

        It is believed only if those who started from it have signed its digest; see `check_witnessed`.
        Without `witnessed` it is the word of its writer. Whoever has all shards compares the digest.
        """
        try:
            writer, body = self.anchor_header(round_number)
            if witnessed and round_number:
                self.check_witnessed(round_number, body["digest"], writer)
            tensors: dict[str, Tensor] = {}
            for file in self.store.together(
                [partial(self._anchor_file, round_number, i, body["files"][i]) for i in wanted], FILES_AT_ONCE
            ):
                tensors |= file
            return body["digest"], tensors
        except Refused as reason:
            raise RunError(f"the anchor of round {round_number} cannot be used: {reason}") from None

    def believed_anchors(self, most: int) -> list[int]:
        """The newest rounds, at most so many, whose anchors contributors speak for; newest first. Their files
        are not read."""
        return list(islice(self._believed(), most))

    def _believed(self) -> Iterator[int]:
        for t in self.anchors_down(self.last_round()):
            with suppress(Refused):
                if t:
                    writer, body = self.anchor_header(t)
                    self.check_witnessed(t, body["digest"], writer)
                    yield t

    def _anchor_file(self, round_number: int, index: int, digest: str) -> "dict[str, Tensor]":
        from safetensors.torch import load

        shapes = self.run.recipe.model.shapes()
        limit = 8 * sum(prod(shapes[name]) for name in self.shards[index]) * 2 + 2**20
        try:
            data = self._theirs(f"anchors/{round_number:06d}/{index}.safetensors", limit)
            if data is None or sha256(data) != digest:
                raise Refused(f"file {index} is missing or not what complete.json says")
            loaded = load(data)
        except (StoreRefused, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
        for name, tensor in loaded.items():  # beside each parameter, what the outer method carries of it
            own = name if name in shapes else name.partition("/")[2]
            if own not in self.shards[index] or tuple(tensor.shape) != shapes[own]:
                raise Refused(
                    f"file {index} holds {name[:80]!r}, which this run's model has not in that shape"
                )
        wanted = set(self.shards[index])
        if round_number and self.run.recipe.outer.method == "diloco":
            wanted |= {f"velocity/{name}" for name in self.shards[index]}
        if missing := wanted - loaded.keys():
            raise Refused(f"file {index} does not hold {min(missing)}")
        return loaded


def _complete_key(round_number: int) -> str:
    return f"anchors/{round_number:06d}/complete.json"
