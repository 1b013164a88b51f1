"""Eq. 2 in one process of a real fleet: its part of the anchor and of the error feedback, shard by shard."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.errors import RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model.digest import shard_digests
from isthmus.model.llama import init_tensor
from isthmus.outer import outer_method
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.outer.exchange import Contribution
from isthmus.outer.weights import round_weights
from isthmus.protocol.judge import check_counted
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.runtime.private_state import Files
from isthmus.subspace.boundaries import BasisSet, as_sent


class OuterPart:
    """What this process holds of the outer step. It sends the shards `writes`, which it trains, and keeps the
    anchor of the shards `reads`. In which order a round does all this is the trainer's business."""

    def __init__(
        self, recipe: Recipe, member: Member, ledger: Ledger, own: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """`own` are the parameters that the replica trains here, with the values of theta^(0)."""
        self.recipe, self.member, self.ledger, self.device = recipe, member, ledger, device
        # Every stage of a compressed replica keeps the embedding, and applies its update as stage 0 does.
        names = [*own, *({EMBEDDING} - own.keys() if member.config.compressed else ())]
        self.writes = [i for i, shard in enumerate(ledger.shards) if own.keys() >= set(shard)]
        self.reads = [i for i, shard in enumerate(ledger.shards) if set(names) >= set(shard)]
        self.dtype, shapes = next(iter(own.values())).dtype, recipe.model.shapes()
        where = gpu.outer_device(device)
        self.anchor = {
            name: own[name].to(where, copy=True)
            if name in own
            else init_tensor(name, shapes[name], recipe.model, recipe.seed).to(where, self.dtype)
            for name in names
        }
        self.bases = BasisSet(recipe, where, self.dtype)
        self.method = outer_method(recipe.outer, self.anchor)
        with_feedback = recipe.outer.method == "sparseloco"
        self.feedback = {name: torch.zeros_like(p, device=where) for name, p in own.items() if with_feedback}
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.hash_stream = self._stream()

    @property
    def codec(self) -> PlainCodec:
        return self.method.codec

    @property
    def has_model(self) -> bool:
        """Is the anchor of the whole model here?"""
        return len(self.reads) == len(self.ledger.shards)

    # From params to a payload

    def encode(self, params: Mapping[str, Tensor]) -> dict[int, bytes]:
        """Anchor - params to error feedback and payload: the packed shards that we send."""
        try:
            sent = self.method.contribute(self._as_sent(params), self.feedback)
        except ValueError as error:
            raise RunError(f"replica {self.member.name}: {error}") from error
        return {i: self.codec.pack_many(sent.part(self.ledger.shards[i])) for i in self.writes}

    def account(self, params: Mapping[str, Tensor], shards: Mapping[int, bytes]) -> None:
        """`encode` where these shards were sent already."""
        self.method.account(self._as_sent(params), self.feedback, self.unpack(shards))

    def carry(self, params: Mapping[str, Tensor]) -> None:
        """`encode` where nothing is sent: all of it goes to the feedback."""
        self.method.carry(self._as_sent(params), self.feedback)

    def take_back(self, shards: Mapping[int, bytes]) -> None:
        """What was sent and did not count returns to the feedback."""
        self.method.take_back(self.unpack(shards), self.feedback)

    def drop_feedback(self) -> None:
        for tensor in self.feedback.values():
            tensor.zero_()

    def _as_sent(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `as_sent`, where the anchor is."""
        here = {name: p.detach().to(self.anchor[name].device) for name, p in params.items()}
        return as_sent(self.recipe, self.member, self.bases, here, self.anchor)

    # From payloads to the next anchor

    def unpack(self, shards: Mapping[int, bytes]) -> Payloads:
        """Refused unless it is an update of this run."""
        return unpack_shards(self.ledger, shards, self.codec.unpack_many)

    def unpack_counted(
        self, manifest: Manifest, contributions: Sequence[Contribution]
    ) -> dict[str, Payloads]:
        """The updates that a round counts, by replica; RunError where they are not what its manifest says."""
        updates = {}
        for contribution in contributions:
            try:
                updates[contribution.replica] = self.unpack(contribution.shards)
            except Refused as reason:
                raise RunError(f"round {manifest.round} counts {contribution.replica}: {reason}") from None
        check_counted(manifest, updates, whole=self.has_model)
        return updates

    def apply(self, round_number: int, updates: Mapping[str, Payloads]) -> None:
        """theta^(t-1) -> theta^(t), in the manifest's order."""
        weights = round_weights(self.ledger.at(round_number).recipe, updates)
        self.method.apply(list(updates.values()), weights)

    def digests_later(self) -> Future[Mapping[int, str]]:
        """Of the anchor as it is now, by shard. They are computed while the next round trains, which does not
        change it."""
        if self.hash_stream:  # it waits for the anchor, and not for the steps that are launched after it
            self.hash_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self.hasher.submit(self._digests)

    def _digests(self) -> Mapping[int, str]:
        shards = [self.ledger.shards[i] for i in self.reads]
        with torch.cuda.stream(self.hash_stream) if self.hash_stream else nullcontext():
            return dict(zip(self.reads, shard_digests(self.anchor, shards), strict=True))

    # What is kept

    @torch.no_grad()
    def restore(self, files: Files) -> None:
        """From this disk."""
        self.restore_anchor(files["anchor"], files.get("outer", {}))
        for name, tensor in self.feedback.items():
            tensor.copy_(files["feedback"][name])

    @torch.no_grad()
    def restore_anchor(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """`state` is that of the method; theta^(0) comes without."""
        for name, tensor in self.anchor.items():
            tensor.copy_(tensors[name])
        if state is not None:
            self.method.restore(state)

    def anchor_shards(self) -> dict[int, dict[str, Tensor]]:
        """For the bucket: theta^(t) with the state of the method, of the shards that this process trains."""
        shards = {}
        for i in self.writes:
            tensors = {name: self.anchor[name] for name in self.ledger.shards[i]}
            outer = {key: t for key, t in self.method.state().items() if key.split("/", 1)[1] in tensors}
            shards[i] = tensors | outer
        return shards

    def warm(self) -> None:
        """What the first round's codec would wait for; a thread of its own calls it."""
        stream = self._stream()
        with torch.cuda.stream(stream) if stream else nullcontext():
            self.codec.warm()

    def _stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
