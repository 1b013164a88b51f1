"""Eq. 2 in one process of a real fleet: its part of the anchor and of the error feedback, shard by shard."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.model.digest import shard_digests
from isthmus.outer import outer_method
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.outer.exchange import Contribution
from isthmus.outer.feedback import settle
from isthmus.outer.weights import round_weights
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused

Files = Mapping[str, Mapping[str, Tensor]]  # file -> name -> tensor


class OuterStep:
    """One process's part of the outer step. It sends the shards `writes`, whose tensors it trains, and keeps
    the anchor of the shards `reads`. The session decides the order of these steps in a round."""

    def __init__(self, ledger: Ledger, anchor: Mapping[str, Tensor], own: Collection[str]) -> None:
        """`anchor` holds this process's tensors of theta^(0); `own` names those that it trains."""
        self.ledger, self.anchor, self.replica = ledger, anchor, ledger.signer.replica
        self.writes = [i for i, shard in enumerate(ledger.shards) if set(own) >= set(shard)]
        self.reads = [i for i, shard in enumerate(ledger.shards) if anchor.keys() >= set(shard)]
        self.device = next(iter(anchor.values())).device
        config = ledger.run.recipe.outer
        self.method = outer_method(config, anchor)
        with_feedback = config.method == "sparseloco"
        self.feedback = {name: torch.zeros_like(anchor[name]) for name in own if with_feedback}
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.hash_stream = self._stream()

    @property
    def codec(self) -> PlainCodec:
        return self.method.codec

    @property
    def has_model(self) -> bool:
        """Whether this process holds the anchor of the whole model."""
        return len(self.reads) == len(self.ledger.shards)

    # From params to a payload

    def encode(self, params: Mapping[str, Tensor], again: bool = False) -> dict[int, bytes]:
        """Turn anchor - params into error feedback and payload; return the packed shards to send. The
        feedback stays c = beta e + Delta until `settle`. `again`: it already is that c."""
        if not again and not self.is_finite(params):  # check before changing e
            raise RunError(f"replica {self.replica}: its weights have an entry that is not finite")
        propose = self.method.propose_again if again else self.method.propose
        try:
            bundle = propose(params, self.feedback)
        except ValueError as error:
            raise RunError(f"replica {self.replica}: {error}") from error
        return {i: self.codec.pack_many(bundle.part(self.ledger.shards[i])) for i in self.writes}

    def is_finite(self, params: Mapping[str, Tensor]) -> bool:
        return bool(torch.stack([p.isfinite().all() for p in params.values()]).all())

    def fold(self, params: Mapping[str, Tensor]) -> None:
        """Move anchor - params to the feedback without sending anything."""
        self.method.fold(params, self.feedback)

    def settle(self, listed: Payloads | None, known: bool) -> None:
        """c -> e once the round is settled; see `outer.feedback.settle`."""
        settle(self.feedback, listed, known)

    def drop_feedback(self) -> None:
        for tensor in self.feedback.values():
            tensor.zero_()

    # From payloads to the next anchor

    def unpack(self, shards: Mapping[int, bytes]) -> Payloads:
        """Unpack an update; Refused unless it belongs to this run."""
        return unpack_shards(self.ledger, shards, self.codec.unpack_many)

    def unpack_counted(self, round_number: int, contributions: Sequence[Contribution]) -> dict[str, Payloads]:
        """The updates that a round counts, by replica."""
        updates = {}
        for contribution in contributions:
            try:
                updates[contribution.replica] = self.unpack(contribution.shards)
            except Refused as reason:
                raise RunError(f"round {round_number} counts {contribution.replica}: {reason}") from None
        return updates

    def apply(
        self, round_number: int, updates: Mapping[str, Payloads], factors: Sequence[float] | None
    ) -> None:
        """theta^(t-1) -> theta^(t), in the manifest's order; `factors` from `clip_factors`."""
        if not updates:  # all answers were empty: theta^(t) is theta^(t-1)
            return
        weights = round_weights(self.ledger.at(round_number).recipe, updates)
        self.method.apply(list(updates.values()), weights, factors)

    def digests_later(self) -> Future[Mapping[int, str]]:
        """The anchor's digests by shard, computed while the next round trains, which does not change the
        anchor."""
        if self.hash_stream:  # it waits for the anchor, not for steps launched later
            self.hash_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self.hasher.submit(self._digests)

    def _digests(self) -> Mapping[int, str]:
        shards = [self.ledger.shards[i] for i in self.reads]
        with torch.cuda.stream(self.hash_stream) if self.hash_stream else nullcontext():
            return dict(zip(self.reads, shard_digests(self.anchor, shards), strict=True))

    # State

    @torch.no_grad()
    def restore(self, files: Files) -> None:
        """Restore anchor and feedback from this disk."""
        self.restore_anchor(files["anchor"], files.get("outer", {}))
        for name, tensor in self.feedback.items():
            tensor.copy_(files["feedback"][name])

    @torch.no_grad()
    def restore_anchor(self, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Restore the anchor. `state` is the method's; theta^(0) has none."""
        for name, tensor in self.anchor.items():
            tensor.copy_(tensors[name])
        if state is not None:
            self.method.restore(state)

    def anchor_shards(self) -> dict[int, dict[str, Tensor]]:
        """The shards that this process trains for the bucket: theta^(t) and the method's state."""
        shards = {}
        for i in self.writes:
            tensors = {name: self.anchor[name] for name in self.ledger.shards[i]}
            outer = {key: t for key, t in self.method.state().items() if key.split("/", 1)[1] in tensors}
            shards[i] = tensors | outer
        return shards

    def warm(self) -> None:
        """Load what the first round's codec would wait for; called in a separate thread."""
        stream = self._stream()
        with torch.cuda.stream(stream) if stream else nullcontext():
            self.codec.warm()

    def _stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
