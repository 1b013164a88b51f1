"""theta^(t) from the bucket alone, round by round, bit for bit: for joiners, auditors and the run log."""

from collections.abc import Collection

import torch

from isthmus.errors import RunError
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.model.llama import init_params
from isthmus.outer import outer_method
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused


class MissingPayloads(RunError):
    """A settled round cannot be replayed from its payloads; a later anchor may lead past it."""


class Replay:
    """The whole anchor after `round`; `step` takes it one round further, as every replica did.

    It has the same bits on every device: see `outer.codec`.
    """

    def __init__(
        self,
        ledger: Ledger,
        start: int = 0,
        without: Collection[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """From the newest complete anchor at or before `start`, as if `without` had not contributed."""
        self.ledger, self.recipe, self.without = ledger, ledger.run.recipe, frozenset(without)
        anchors = [t for t in ledger.anchor_rounds() if t <= start]
        self.round = anchors[-1] if anchors and not self.without else 0
        stored = bool(self.round or ledger.run.start)  # else the recipe's seed draws theta^(0)
        dtype = torch.float64 if self.recipe.inner.precision == "fp64" else torch.float32
        if stored:
            shapes = self.recipe.model.shapes()
            self.anchor = {
                name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()
            }
        else:
            first = init_params(self.recipe.model, self.recipe.seed)
            self.anchor = {name: tensor.to(device, dtype) for name, tensor in first.items()}
        self.outer = outer_method(self.recipe.outer, self.anchor)
        self._digest: str | None = None  # of the anchor as it is now, once it is known
        if stored:
            self.jump(self.round)

    def jump(self, round_number: int) -> None:
        """Take the anchor that the bucket holds of theta^(round_number)."""
        digest, tensors = self.ledger.read_anchor(round_number, range(len(self.ledger.shards)))
        self.round, self._digest = round_number, None
        with torch.no_grad():
            for name, tensor in self.anchor.items():
                tensor.copy_(tensors[name])
            if round_number:  # theta^(0) comes without a state: the outer method has taken no step
                self.outer.restore(tensors)
        if self.digest() != digest:
            raise RunError(f"the anchor of round {round_number} does not have the digest it states")

    def digest(self) -> str:
        """Of the anchor; hashed once a round, however often it is asked for."""
        if self._digest is None:
            self._digest = anchor_digest(shard_digests(self.anchor, self.ledger.shards))
        return self._digest

    def step(self) -> Manifest | None:
        """Apply the next round; None while it is open. The manifest's anchor must be the one we hold."""
        manifest = self.ledger.manifest(self.round + 1)
        if manifest is None:
            return None
        if not self.without and manifest.anchor != self.digest():
            raise RunError(
                f"round {manifest.round} says it started from anchor {manifest.anchor[:16]}, but replaying "
                f"the rounds before it gives {self.digest()[:16]}"
            )
        payloads = []
        for entry in manifest.entries:
            if entry.replica in self.without:
                continue
            try:
                get, t = self.ledger.get_shard, manifest.round
                packed = {shard.index: get(entry.replica, t, shard) for shard in entry.shards}
                payloads.append(unpack_shards(self.ledger, packed, self.outer.codec.unpack_many))
            except Refused as reason:
                raise MissingPayloads(
                    f"round {manifest.round} counts {entry.replica}, but {reason}; payloads before the "
                    "second-newest anchor may have been swept"
                ) from None
        self._digest = None
        if payloads:
            self.outer.apply(payloads)
        self.round = manifest.round
        return manifest
