"""What of a run is lost for good, and what may be decided about it: `isthmus ledger repair`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import ConfigError
from isthmus.protocol.documents import MOST_REASON, Shard
from isthmus.protocol.heartbeat import silent_after
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.repairs import Decision
from isthmus.protocol.replay import MissingPayloads, Replay


@dataclass(frozen=True, slots=True)
class Damage:
    """The first round that cannot be replayed, and the decision that would let the run go on."""

    decision: Decision
    lost: list[tuple[str, Shard, str]]  # of that round: whose shard, and why it cannot be read
    updates: int  # of all rounds that would be void

    def to_lines(self) -> list[str]:
        first, last = self.decision.first, self.decision.last
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        return [
            *(f"round {first} counts {name}, but {why}; no copy is anywhere" for name, _, why in self.lost),
            f"no anchor leads past it: theta^({last}) cannot be had, and the {self.updates} updates of "
            f"{rounds} cannot be applied",
            f"the decision would be: {rounds} void, and round {last + 1} starts from theta^({first - 1}), "
            f"anchor {self.decision.digest[:16]}",
        ]


def find_damage(
    ledger: Ledger,
    reason: str = "",
    clock: Callable[[], float] = time.time,
    log: Callable[[str], None] = print,
) -> Damage:
    """ConfigError, with what to do instead, where there is nothing to decide."""
    last = ledger.last_round()
    replay = Replay(ledger, last, log=log)
    while replay.round < last:
        try:
            replay.step()
        except MissingPayloads:
            if not replay.jump_past():
                break
    if replay.round == last:
        raise ConfigError(
            f"there is nothing to decide: theta^({last}) follows from the bucket, by its anchors and the "
            "payloads after them; whoever joins or comes back finds it"
        )
    first = replay.round + 1
    _refuse_if_held(ledger, first, clock())
    begun, ended = ledger.manifest(first), ledger.manifest(last)
    assert begun is not None, "rounds are settled one after another"
    assert ended is not None, "rounds are settled one after another"
    lost = ledger.lost_shards(begun)
    if not lost:
        raise ConfigError(f"there is nothing to decide: the payloads of round {first} are there again")
    name, _, why = lost[0]
    decision = Decision(
        first=first,
        last=last,
        digest=replay.digest(),
        manifest=ended.digest,
        reason=(reason or f"of {name} in round {first}, {why}")[:MOST_REASON],
        closer=ledger.signer.replica,
    )
    voided = (ledger.manifest(t) for t in range(first, last + 1))
    return Damage(decision, lost, sum(len(manifest.entries) for manifest in voided if manifest))


def _refuse_if_held(ledger: Ledger, first: int, now: float) -> None:
    """Whoever is alive must wait for what is lost: any other may hold a copy of it, or a later model."""
    for name in sorted(ledger.names):
        found = ledger.heartbeat(name)
        if found is None or found[0].gone or now - found[1] > silent_after(ledger.run.recipe, found[0]):
            continue
        heartbeat = found[0]
        if not heartbeat.stuck:
            raise ConfigError(
                f"{name} is alive ({heartbeat.state}, round {heartbeat.round}) and may hold what is lost of "
                f"round {first}, or a later model. Those who wait have asked it; let it run, or stop it first"
            )
