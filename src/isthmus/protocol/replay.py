"""Rebuild theta^(t) from the bucket alone, bit for bit: for joiners, auditors and the run log."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from isthmus.errors import RunError, RunStopped
from isthmus.memory import check_fits_memory
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.model.llama import init_params
from isthmus.outer import outer_method
from isthmus.outer.codec import Payloads
from isthmus.outer.weights import round_weights
from isthmus.protocol.clipping import clip_factors
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.manifests import other_start
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.store import StoreError
from isthmus.store.together import together


class MissingPayloads(RunError):
    """A settled round cannot be replayed from its payloads; a later anchor may lead past it."""


class Replay:
    """The whole anchor after `round`; `step` takes it one round further, as every replica did.

    It has the same bits on every device: see `outer.codec`. It starts from theta^(0), or from an anchor that
    the next manifest confirms.
    """

    def __init__(
        self,
        ledger: Ledger,
        start: int = 0,
        without: Collection[str] = (),
        device: torch.device | str = "cpu",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Start from the newest usable anchor at or before `start`, as if `without` had not contributed.
        `log` receives the reason if a newer anchor is unusable."""
        self.ledger, self.recipe, self.without = ledger, ledger.run.recipe, frozenset(without)
        self.round, self.log, self.passed_over = 0, log, ""
        self.dtype = torch.float64 if self.recipe.inner.precision == "fp64" else torch.float32
        # A run.json of a few kB may state any model. A copy is read or drawn; on a CPU the anchor is another.
        stored, copies = self.recipe.model.num_stored, 2 if torch.device(device).type == "cpu" else 1
        words = f"run.json states a model of {self.recipe.model.num_parameters:,} parameters; to rebuild it"
        check_fits_memory(copies * self.dtype.itemsize * stored, words)
        shapes = ledger.shapes
        self.anchor = {n: torch.empty(shape, dtype=self.dtype, device=device) for n, shape in shapes.items()}
        self.outer = outer_method(self.recipe.outer, self.anchor)
        self._digest: str | None = None  # of the current anchor, once known
        self._start(start)

    def _start(self, start: int) -> None:
        anchors = self.ledger.anchors_down(start) if start and not self.without else ()
        if not any(t and self._can_jump(t) for t in anchors):
            self._begin()

    def _begin(self) -> None:
        """Start at theta^(0): the anchor that run.json names, or the draw of the recipe's seed."""
        self.round, self._digest = 0, None
        self.outer = outer_method(self.recipe.outer, self.anchor)  # an anchor may have left its state in it
        if self.ledger.run.start:
            return self.jump(0)
        first = init_params(self.recipe.model, self.recipe.seed)
        for name, tensor in self.anchor.items():
            tensor.copy_(first[name])

    def _can_jump(self, round_number: int) -> bool:
        try:
            self.jump(round_number)
        except (StoreError, RunStopped):
            raise  # it may be whole but unreachable; or nothing in this run is to be trusted
        except RunError as error:
            self.passed_over = self.passed_over or str(error)
            self.log(f"{error}; taking the one before")
            return False
        return True

    def jump(self, round_number: int) -> None:
        """Load the bucket's anchor of theta^(round_number), if it is confirmed."""
        digest, tensors = self.ledger.read_anchor(round_number, range(len(self.ledger.shards)))
        if anchor_digest(shard_digests(tensors, self.ledger.shards)) != digest:
            raise RunError(f"the anchor of round {round_number} does not have the digest it states")
        with torch.no_grad():
            if round_number:  # theta^(0) has no state: the outer method has taken no step
                self.outer.restore(tensors)
            for name, tensor in self.anchor.items():
                tensor.copy_(tensors[name])
        self.round, self._digest = round_number, digest

    def jump_past(self) -> bool:
        """Load the next later usable anchor; False if there is none."""
        here = self.round
        return any(self._can_jump(t) for t in self.ledger.anchor_rounds() if t > here)

    def digest(self) -> str:
        """The anchor's digest; hashed once per round."""
        if self._digest is None:
            self._digest = anchor_digest(shard_digests(self.anchor, self.ledger.shards))
        return self._digest

    def step(self) -> Manifest | None:
        """Apply the next round; None while it is open. Its manifest must name our anchor."""
        manifest = self.ledger.manifest(self.round + 1)
        if manifest is None:
            return None
        if not self.without and manifest.anchor != self.digest():
            raise other_start(manifest, self.digest())
        self.apply(manifest, self.updates(manifest))
        return manifest

    def updates(self, manifest: Manifest) -> dict[str, Payloads]:
        """The updates that the next round counts, by replica; MissingPayloads if some are gone."""
        updates = {}
        entries = [entry for entry in manifest.entries if entry.replica not in self.without]
        packed = self._packed(manifest, entries)
        for entry in entries:
            try:
                shards = {shard.index: _or_raise(packed.pop(0)) for shard in entry.shards}
                updates[entry.replica] = unpack_shards(self.ledger, shards, self.outer.codec.unpack_many)
            except Refused as reason:
                because = f"; {self.passed_over}" if self.passed_over else ""
                raise MissingPayloads(
                    f"round {manifest.round} counts {entry.replica}, but {reason}; payloads before the "
                    f"second-newest anchor may have been swept{because}"
                ) from None
        return updates

    def apply(self, manifest: Manifest, updates: Mapping[str, Payloads]) -> None:
        """Take the anchor one round further."""
        self._digest = None
        if updates:
            weights = round_weights(self.ledger.at(manifest.round).recipe, updates)
            factors = clip_factors(self.ledger, manifest.round, updates)
            self.outer.apply(list(updates.values()), weights, factors)
        self.round = manifest.round

    def _packed(self, manifest: Manifest, entries: Sequence[Entry]) -> list[bytes | Refused]:
        """Every shard of these entries in order, or the reason it is unavailable; several requests at a
        time."""

        def read(replica: str, shard: Shard) -> bytes | Refused:
            try:
                return self.ledger.get_shard(replica, manifest.round, shard)
            except Refused as reason:
                return reason

        listed = [partial(read, entry.replica, shard) for entry in entries for shard in entry.shards]
        return together(listed)


def _or_raise(data: bytes | Refused) -> bytes:
    if isinstance(data, Refused):
        raise data
    return data


def digest_from_bucket(ledger: Ledger, round_number: int) -> str:
    """The digest of theta^(round_number) by replay; "" if the bucket cannot give it."""
    try:
        replay = Replay(ledger, round_number)
        while replay.round < round_number and replay.step():
            pass
        return replay.digest() if replay.round == round_number else ""
    except StoreError:
        raise  # it may succeed later
    except RunError:
        return ""
