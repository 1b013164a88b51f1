"""theta^(t) from the bucket alone, round by round, bit for bit: for joiners, auditors and the run log."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from isthmus.errors import RunError, RunStopped
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.model.llama import init_params
from isthmus.outer import outer_method
from isthmus.outer.weights import round_weights
from isthmus.protocol.judge import check_counted, other_start
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.store import StoreError


class MissingPayloads(RunError):
    """A settled round cannot be replayed from its payloads; a later anchor may lead past it."""


class Replay:
    """The whole anchor after `round`; `step` takes it one round further, as every replica did.

    It has the same bits on every device: see `outer.codec`. Nothing in it is a closer's word: it starts from
    theta^(0), or from an anchor whose digest contributors have signed, and applies only what passes `judge`.
    """

    def __init__(
        self,
        ledger: Ledger,
        start: int = 0,
        without: Collection[str] = (),
        device: torch.device | str = "cpu",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """From the newest anchor at or before `start` that can be believed, as if `without` had not
        contributed. `log` is told why a newer one cannot."""
        self.ledger, self.recipe, self.without = ledger, ledger.run.recipe, frozenset(without)
        self.round, self.log, self.passed_over = 0, log, ""
        dtype = torch.float64 if self.recipe.inner.precision == "fp64" else torch.float32
        shapes = self.recipe.model.shapes()
        self.anchor = {n: torch.empty(shape, dtype=dtype, device=device) for n, shape in shapes.items()}
        self.outer = outer_method(self.recipe.outer, self.anchor)
        self._digest: str | None = None  # of the anchor as it is now, once it is known
        self._start(start)

    def _start(self, start: int) -> None:
        anchors = self.ledger.anchors_down(start) if start and not self.without else ()
        if not any(t and self._can_jump(t) for t in anchors):
            self._begin()

    def _begin(self) -> None:
        """At theta^(0): the anchor that run.json names, or what the recipe's seed draws."""
        self.round, self._digest = 0, None
        self.outer = outer_method(self.recipe.outer, self.anchor)  # an anchor may have left its state there
        if self.ledger.run.start:
            return self.jump(0)
        first = init_params(self.recipe.model, self.recipe.seed)
        for name, tensor in self.anchor.items():
            tensor.copy_(first[name])

    def _can_jump(self, round_number: int) -> bool:
        try:
            self.jump(round_number)
        except (StoreError, RunStopped):
            raise  # it may be whole, and out of reach; or nothing of this run is to be believed
        except RunError as error:
            self.passed_over = self.passed_over or str(error)
            self.log(f"{error}; taking the one before")
            return False
        return True

    def jump(self, round_number: int) -> None:
        """Take the anchor that the bucket holds of theta^(round_number), if it can be believed."""
        digest, tensors = self.ledger.read_anchor(round_number, range(len(self.ledger.shards)))
        if anchor_digest(shard_digests(tensors, self.ledger.shards)) != digest:
            raise RunError(f"the anchor of round {round_number} does not have the digest it states")
        with torch.no_grad():
            if round_number:  # theta^(0) comes without a state: the outer method has taken no step
                self.outer.restore(tensors)
            for name, tensor in self.anchor.items():
                tensor.copy_(tensors[name])
        self.round, self._digest = round_number, digest

    def jump_past(self) -> bool:
        """Take the next later anchor that can be believed; False where there is none."""
        here = self.round
        return any(self._can_jump(t) for t in self.ledger.anchor_rounds() if t > here)

    def digest(self) -> str:
        """Of the anchor; hashed once a round, however often it is asked for."""
        if self._digest is None:
            self._digest = anchor_digest(shard_digests(self.anchor, self.ledger.shards))
        return self._digest

    def step(self) -> Manifest | None:
        """Apply the next round; None while it is open. The manifest's anchor must be the one we hold. Of a
        round that is void (`repairs`) nothing is applied."""
        manifest = self.ledger.manifest(self.round + 1)
        if manifest is None:
            return None
        repairs = self.ledger.repairs
        if repairs.is_void(manifest.round):
            self.round = manifest.round
            return manifest
        if not self.without and manifest.anchor != self.digest():
            repairs.refresh()
            decision = repairs.decision(self.round)
            if decision is None or decision.digest == self.digest():
                raise other_start(manifest, self.digest())
            self.log(f"{decision}")
            self._start(decision.first - 1)  # what we applied has been declared void since
            while self.round < manifest.round - 1 and self.step():
                pass
            return self.step()
        updates = {}
        entries = [entry for entry in manifest.entries if entry.replica not in self.without]
        packed = self._packed(manifest, entries)
        for entry in entries:
            try:
                shards = {shard.index: _or_raise(packed.pop(0)) for shard in entry.shards}
                updates[entry.replica] = unpack_shards(self.ledger, shards, self.outer.codec.unpack_many)
            except Refused as reason:
                repairs.refresh()
                if repairs.is_void(manifest.round):
                    return self.step()
                because = f"; {self.passed_over}" if self.passed_over else ""
                raise MissingPayloads(
                    f"round {manifest.round} counts {entry.replica}, but {reason}; payloads before the "
                    f"second-newest anchor may have been swept{because}. Where nobody has a copy, `isthmus "
                    "ledger repair` decides how the run goes on"
                ) from None
        check_counted(manifest, updates)
        self._digest = None
        if updates:
            weights = round_weights(self.ledger.at(manifest.round).recipe, updates)
            self.outer.apply(list(updates.values()), weights)
        self.round = manifest.round
        return manifest

    def _packed(self, manifest: Manifest, entries: Sequence[Entry]) -> list[bytes | Refused]:
        """Every shard that these entries list, one after another, or why it cannot be had; several requests
        at a time."""

        def read(replica: str, shard: Shard) -> bytes | Refused:
            try:
                return self.ledger.counted_shard(manifest, replica, shard)
            except Refused as reason:
                return reason

        listed = [partial(read, entry.replica, shard) for entry in entries for shard in entry.shards]
        return self.ledger.store.together(listed)


def _or_raise(data: bytes | Refused) -> bytes:
    if isinstance(data, Refused):
        raise data
    return data


def digest_from_bucket(ledger: Ledger, round_number: int) -> str:
    """Of theta^(round_number) by replay; "" where that cannot be had."""
    try:
        replay = Replay(ledger, round_number)
        while replay.round < round_number and replay.step():
            pass
        return replay.digest() if replay.round == round_number else ""
    except StoreError:
        raise  # it can be had later
    except RunError:
        return ""
