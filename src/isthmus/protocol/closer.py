"""Closing a round: verify every commit, decide when to stop waiting, create the manifest."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from isthmus.config import Recipe
from isthmus.errors import Diverged
from isthmus.layout.traffic import codec_settings, inner_step_bytes
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.trust import OtherAnchor, Refused, canonical, plain_words, sha256
from isthmus.sparse import SparseChunks, unpack_many

FIRST_DEADLINE_SECONDS = 600.0  # nobody knows yet how long a round takes
STEP_IN_SECONDS = 3.0  # the next closer in line waits this much longer
MAX_FACTS_BYTES = 4096
PAUSE_SECONDS = 2.0  # without an answer from the store: it may have been away, for the others too
BACK_OFF_SECONDS = 6.0  # the longest that a client waits before it tries the store again, and a little
LEAVING = ("leaving", "left")

Fetch = Callable[[str, int, Shard], bytes]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one commit."""

    entry: Entry | None
    reason: str = ""
    elsewhere: bool = False  # a good commit, but from another anchor than ours


def opening_seconds(recipe: Recipe) -> float:
    """What whole streams add to a round of the replica they add most to, over links as the recipe states
    them, if compute hides none of it."""
    last, most = recipe.in_round(recipe.outer.rounds), 0.0
    for usual, opened in zip(recipe.fleet(), last.fleet(), strict=True):
        if links := usual.config.stages - 1:
            sent = [inner_step_bytes(recipe, member)["activations"] for member in (usual, opened)]
            # A step's bytes over one link, one way, and two micro-batches a link to fill and drain.
            more = (sent[1] - sent[0]) / links * (1 + 2 * links / recipe.inner.micro_batches)
            most = max(most, recipe.outer.inner_steps * more * 8 / (usual.config.link.mbps * 1e6))
    return most


class Closer:
    """One replica's judgement of a round. Every closer may judge; put-if-absent lets one manifest be."""

    def __init__(self, ledger: Ledger, fetch: Fetch, log: Callable[[str], None]) -> None:
        self.ledger, self.fetch, self.log = ledger, fetch, log
        self.recipe = ledger.run.recipe
        self.names = [member.name for member in self.recipe.fleet()]
        self.verdicts: dict[tuple[str, str], Verdict] = {}  # by name and the commit's hash: judged once
        self.givers: dict[str, str] = {}  # a shard's digest -> the replica under whose name we read it
        self.beats: dict[str, tuple[float, bool]] = {}  # replica -> (when we looked, was it alive)
        self.silences: dict[str, tuple[float | None, float]] = {}  # replica -> (its last beat, since when)
        self.round, self.could_since = 0, None
        self.away = 0.0  # seconds of the open round that its deadline does not count
        self.touched, self.forgive_until = time.monotonic(), 0.0

    def attempt(self, round_number: int, anchor: str) -> bool:
        """Close the round if it can be closed now; True when our manifest is the one."""
        if round_number != self.round:
            self.away = 0.0 if self.round else self._away(round_number)
            self.round, self.could_since = round_number, None
            self.verdicts.clear()
            self.givers.clear()
            self.beats.clear()
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = [m for m in (previous.members if previous else self.names) if m in self.ledger.run.keys]
        self._touch()
        commits, oversized = self._commits(round_number)
        self._touch()
        place = self._place_in_line(round_number)
        if place == 0:  # who is to close reads what comes while it waits for the rest
            self.judge(commits, round_number, anchor, previous)
        if not self._may_close(round_number, members, commits, oversized, previous):
            self.could_since = None
            return False
        now = time.monotonic()
        self.could_since = now if self.could_since is None else self.could_since
        if now < self.could_since + STEP_IN_SECONDS * place:
            return False
        accepted, refused = self.judge(commits, round_number, anchor, previous)
        refused |= oversized
        if not self._may_close(round_number, members, accepted, refused, previous):
            return False
        seconds = self.ledger.store.now(self._clock_key()) - self.ledger.settled_at(round_number - 1)
        following = self._next_members(accepted)
        left_behind = [m for m in members if m in following and m not in accepted and m not in refused]
        body = {
            "anchor": anchor,
            "entries": [accepted[name].body() for name in self.names if name in accepted],
            "refused": [[name, refused[name]] for name in self.names if name in refused],
            "members": following,
            "deadline_seconds": self._deadline(round_number, None if left_behind else seconds),
            "seconds": round(seconds, 3),
        }
        won = self.ledger.create_manifest(round_number, body)
        if won:
            for name, reason in refused.items():
                self.log(f"round {round_number}: refused {name}: {reason}")
        return won

    def _commits(self, round_number: int) -> tuple[dict[str, bytes], dict[str, str]]:
        """The commits that are there, and who put something else in their place."""
        commits, oversized = {}, {}
        for name in self.names:
            try:
                data = self.ledger.get_commit(name, round_number)
            except ValueError as error:
                oversized[name] = f"the commit: {error}"
                continue
            if data is not None:
                commits[name] = data
        return commits, oversized

    def judge(
        self, commits: Mapping[str, bytes], round_number: int, anchor: str, previous: Manifest | None
    ) -> tuple[dict[str, Entry], dict[str, str]]:
        """(accepted, refused with the reason) of all the commits that are there."""
        accepted: dict[str, Entry] = {}
        refused: dict[str, str] = {}
        elsewhere = 0
        own = self.ledger.signer.replica
        for name, data in sorted(commits.items(), key=lambda item: item[0] != own):
            # By name too: another's commit under one's own name is not that other's verdict.
            key = name, sha256(data)
            if key not in self.verdicts:
                self.verdicts[key] = self._verdict(data, name, round_number, anchor)
            verdict = self.verdicts[key]
            if verdict.entry:
                accepted[name] = verdict.entry
            else:
                refused[name] = verdict.reason
                elsewhere += verdict.elsewhere
        if elsewhere > len(accepted):
            raise Diverged(
                f"replica {own} holds another anchor than {elsewhere} of those who gave to round "
                f"{round_number}, and does not close it; it must join anew from the bucket"
            )
        history = [entry.norm for entry in previous.entries] if previous else []
        self._refuse_outliers(accepted, refused, history)
        return accepted, refused

    def _verdict(self, data: bytes, name: str, round_number: int, anchor: str) -> Verdict:
        try:
            entry = self.ledger.check_commit(data, name, round_number, anchor)
            if len(canonical(entry.facts)) > MAX_FACTS_BYTES:
                raise Refused("the commit tells too much")
            square = 0.0
            for shard in entry.shards:
                packed = self._read(name, round_number, shard)
                square += self._checked_square(packed, shard.index)
            return Verdict(replace(entry, norm=math.sqrt(square), facts=plain_words(entry.facts)))
        except Refused as reason:
            words = "".join(letter if letter.isprintable() else "?" for letter in str(reason)[:300])
            return Verdict(None, words, isinstance(reason, OtherAnchor))

    def _read(self, name: str, round_number: int, shard: Shard) -> bytes:
        """What `name` gave, from where later readers will look for it: bytes that we remember as another's
        may not lie there."""
        if self.givers.setdefault(shard.digest, name) != name:
            return self.ledger.get_shard(name, round_number, shard)
        return self.fetch(name, round_number, shard)

    def _checked_square(self, packed: bytes, index: int) -> float:
        """The squared norm of one shard's update, once names, shapes, codec and finiteness are right."""
        payloads = checked_payloads(self.ledger, packed, index)
        square = sum(float(p.values.double().square().sum()) for p in payloads.values())
        if not math.isfinite(square):
            raise Refused(f"shard {index} is not finite")
        return square

    def _refuse_outliers(
        self, accepted: dict[str, Entry], refused: dict[str, str], history: Sequence[float]
    ) -> None:
        norms = [norm for norm in (*(entry.norm for entry in accepted.values()), *history) if norm > 0]
        if len(norms) < 2:
            return
        median = statistics.median_low(norms)
        limit = self.recipe.bucket.norm_limit
        for name, entry in list(accepted.items()):
            if entry.norm > limit * median:
                refused[name] = f"its norm {entry.norm:.3g} is over {limit:g} times the median {median:.3g}"
                del accepted[name]

    def _may_close(
        self,
        round_number: int,
        members: Sequence[str],
        accepted: Collection[str],
        refused: Collection[str],
        previous: Manifest | None,
    ) -> bool:
        if not accepted:
            return False
        awaited = [name for name in members if name not in accepted and name not in refused]
        if not awaited:
            return True
        stated = self.recipe.bucket.quorum
        quorum = min(stated, len(self.names)) or len(members) // 2 + 1
        alive = [name for name in awaited if self.alive(name)]
        if not alive and not stated:
            return True  # whoever is missing is not there: waiting would bring nothing
        if len(accepted) < quorum:
            return False
        return not alive or self.past_deadline(round_number, previous)

    def past_deadline(self, round_number: int, previous: Manifest | None) -> bool:
        opened = self.ledger.settled_at(round_number - 1) + self.away
        limit = previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        return self.ledger.store.now(self._clock_key()) > opened + (
            self.recipe.bucket.deadline_seconds or limit
        )

    def _away(self, round_number: int) -> float:
        """How long a round was open before we came: since when the others are back, we do not know.

        Counted from the last time that we read the store's clock, in the start before this one: who starts
        again and again must not put off a round for ever.
        """
        read, since = self.ledger.store.head(self._clock_key()), self.ledger.settled_at(round_number - 1)
        since = max(since, read.modified_unix_seconds) if read else since
        return self.ledger.store.now(self._clock_key()) - since

    def alive(self, name: str) -> bool:
        """Does the replica's heartbeat still come? Asked at most once in a heartbeat's time.

        Silence is believed only after we have listened to it for a while: when the store was away nobody's
        heart could be heard, and whoever comes back first must not take the others for dead.
        """
        every = self.recipe.bucket.heartbeat_seconds
        looked, answer = self.beats.get(name, (-math.inf, True))
        if time.monotonic() - looked < every:
            return answer
        beat = self.ledger.heartbeat(name)
        age = math.inf if beat is None else self.ledger.store.now(self._clock_key()) - beat[1]
        if beat is None and self.round == 1:  # it may not have started yet
            age = self.ledger.store.now(self._clock_key()) - self.ledger.settled_at(0) - 60
        now, last = self._touch(), beat and beat[1]
        if age < 3 * every + 2:
            self.silences.pop(name, None)
            heard = True
        else:
            before, since = self.silences.get(name, (last, now))
            since = since if before == last else now
            self.silences[name] = (last, since)
            heard = now - since < 2 * every or now < self.forgive_until
        answer = heard and not (beat and beat[0].get("state") in LEAVING)
        self.beats[name] = (now, answer)
        return answer

    def _touch(self) -> float:
        """We hear the store now. After a pause the others may still be backing off: forgive silence."""
        now = time.monotonic()
        if now - self.touched > PAUSE_SECONDS:
            self.forgive_until = now + BACK_OFF_SECONDS
        self.touched = now
        return now

    def _next_members(self, accepted: Mapping[str, Entry]) -> list[str]:
        def stays(name: str) -> bool:
            if name not in accepted:
                return self.alive(name)
            beat = self.ledger.heartbeat(name)
            return not (beat and beat[0].get("state") in LEAVING)

        return [name for name in self.names if stays(name)]

    def _deadline(self, round_number: int, seconds: float | None) -> float:
        """Of the next round: generous against the rounds measured, so that only the stuck are left behind.

        A round that ended at its deadline (`seconds` None) measures the deadline, not the fleet: were it
        counted, one stuck member would make every deadline longer than the one before.
        """
        recent = [t for t in range(round_number - 5, round_number) if not self._left_behind(t)]
        taken = {t: self.ledger.manifests[t].seconds for t in recent if t in self.ledger.manifests}
        taken |= {} if seconds is None else {round_number: seconds}
        # Where finishing begins, rounds get longer: whole streams cross from then on.
        begins = self.recipe.opening(round_number + 1) is not None
        measured = [
            spent + (opening_seconds(self.recipe) if begins and self.recipe.opening(t) is None else 0.0)
            for t, spent in taken.items()
        ]
        if not measured:
            previous = self.ledger.manifests.get(round_number - 1)
            return previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        return round(max(15.0, 4 * statistics.median(measured)) + 10, 3)

    def _left_behind(self, round_number: int) -> bool:
        """Did a settled round end without a member that was still there?"""
        manifest, before = (self.ledger.manifests.get(t) for t in (round_number, round_number - 1))
        if manifest is None:
            return False
        judged = {entry.replica for entry in manifest.entries} | {name for name, _ in manifest.refused}
        awaited = before.members if before else self.names
        return any(name in manifest.members and name not in judged for name in awaited)

    def _place_in_line(self, round_number: int) -> int:
        """Closers take turns, and the next steps in when the one before does not. Full replicas come first:
        they read every payload anyway, so that checking costs them no bytes."""
        own, stages = self.ledger.signer.replica, {m.name: m.config.stages for m in self.recipe.fleet()}
        full = [name for name in self.ledger.run.closers if stages.get(name) == 1]
        rest = [name for name in self.ledger.run.closers if name not in full]
        if own in full:
            return (full.index(own) - round_number) % len(full)
        return len(full) + (rest.index(own) - round_number) % len(rest)

    def _clock_key(self) -> str:
        return f"members/{self.ledger.signer.replica}/clock"


def checked_payloads(
    ledger: Ledger, packed: bytes, index: int, device: torch.device | str = "cpu"
) -> dict[str, SparseChunks]:
    """One shard unpacked; Refused unless names, shapes and codec are this run's."""
    recipe = ledger.run.recipe
    try:
        payloads = unpack_many(packed, device=device)
    except ValueError as error:
        raise Refused(f"shard {index} is malformed: {error}") from None
    keep, values = codec_settings(recipe)
    shapes = recipe.model.shapes()
    if tuple(payloads) != ledger.shards[index]:
        raise Refused(f"shard {index} does not hold the tensors it should")
    for name, payload in payloads.items():
        if tuple(payload.shape) != shapes[name]:
            raise Refused(f"shard {index}: {name} has the shape {tuple(payload.shape)}, not {shapes[name]}")
        if (payload.side, payload.keep, payload.kind) != (recipe.outer.chunk_side, keep, values):
            raise Refused(f"shard {index}: {name} is coded otherwise than this run's recipe says")
    return payloads
