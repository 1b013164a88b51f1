"""One process of a real fleet, with a full replica or a part of one: train, deliver, apply, save."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.corpus import TokenView
from isthmus.errors import ConfigError, RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model.digest import shard_digests
from isthmus.model.llama import init_tensor
from isthmus.outer import outer_method
from isthmus.outer.exchange import Contribution
from isthmus.outer.weights import round_weights
from isthmus.protocol.closer import Closer
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.judge import check_counted
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.patience import Patience
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.retention import Retention
from isthmus.protocol.scores import is_spent
from isthmus.protocol.shards import ShardReader, unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.replica.base import Replica
from isthmus.replica.control_group import ControlGroup
from isthmus.replica.meter import Meter
from isthmus.runlog import finite
from isthmus.runlog.facts import Facts, HeldOut
from isthmus.runtime.anchor_writer import AnchorWriter
from isthmus.runtime.edge import watched_edge
from isthmus.runtime.middle import Middle
from isthmus.runtime.own_record import REFUSALS, OwnRecord
from isthmus.runtime.parting import Parting
from isthmus.runtime.place import Place
from isthmus.runtime.private_state import PrivateState, Update
from isthmus.runtime.rehearsal import forget, rehearse
from isthmus.runtime.stopping import doubles, part_if_asked, save_middle
from isthmus.runtime.update_scores import UpdateScores
from isthmus.subspace.boundaries import BasisSet, as_sent

Log = Callable[[str], None]
SAVED = ("loss", "grad_norm", "seconds")  # of a status: saved with the round's update
INNER_STEPS = "inner_steps"  # those behind an update, with what the feedback carried of rounds that it missed
# Of the edge of a round, in which nothing trains: what it was spent on, and all of it.
EDGE_SECONDS = ("encode_seconds", "save_seconds", "apply_seconds", "edge_seconds")


@dataclass
class WorkerStatus:
    """What this process knows of itself: heartbeats and commits are made of it."""

    state: str = "starting"
    round: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    grad_norm: float | None = None
    farewell: Facts = field(default_factory=Facts)


class Trainer:
    """This process's replica in the outer-round loop, which drives it as it drives a simulated fleet."""

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        replica: Replica,
        ledger: Ledger,
        control: ControlGroup,
        device: torch.device,
        work_dir: Path,
        incarnation: str,
        log: Log,
        *,
        save_seconds: float = 60.0,
        background: bool = True,
        patience: Patience | None = None,
        place: Place | None = None,
        parting: Parting | None = None,
        held_out: TokenView | None = None,
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        """`save_seconds` as in PrivateState. Without `background` everything happens in the calling thread,
        for tests that put a kill exactly where it hurts. With `held_out` a closer that has the whole model
        scores updates, in `stream_dtype`."""
        self.recipe, self.member, self.replica, self.ledger = recipe, member, replica, ledger
        self.control, self.device, self.log = control, device, log
        self.background = background
        self.state = PrivateState(work_dir / "state", device, log, save_seconds, at_once=not background)
        self.status = WorkerStatus()
        own = replica.named_parameters()
        master_dtype = next(iter(own.values())).dtype
        # Every stage of a compressed replica keeps the embedding, and applies its update as stage 0 does.
        names = [*own, *({EMBEDDING} - own.keys() if member.config.compressed else ())]
        self.writes = [i for i, shard in enumerate(ledger.shards) if own.keys() >= set(shard)]
        self.reads = [i for i, shard in enumerate(ledger.shards) if set(names) >= set(shard)]
        shapes = recipe.model.shapes()
        where = gpu.outer_device(device)
        self.anchor = {  # a replica is made with theta^(0); the embedding of later stages is not in it
            name: own[name].to(where, copy=True)
            if name in own
            else init_tensor(name, shapes[name], recipe.model, recipe.seed).to(where, master_dtype)
            for name in names
        }
        self.bases = BasisSet(recipe, where, master_dtype)
        self.outer = outer_method(recipe.outer, self.anchor)
        with_feedback = recipe.outer.method == "sparseloco"
        self.feedback = {name: torch.zeros_like(p, device=where) for name, p in own.items() if with_feedback}
        reader = ShardReader(ledger, self.reads)
        self.place, self.parting = place or Place(ledger, log), parting or Parting()
        # Where the membership may change, so may who closes.
        closes = control.rank == 0 and (bool(ledger.run.owner) or member.name in ledger.run.closers)
        # A pipelined replica may have no room for the whole model.
        replayed = partial(digest_from_bucket, ledger) if member.config.parts == 1 else lambda t: ""
        score = None
        if held_out is not None and self.has_model and recipe.score.batches:
            dtype = stream_dtype or master_dtype
            score = UpdateScores(recipe, ledger, self.anchor, self.outer.codec, held_out, dtype)
        closer = Closer(ledger, reader, log, replayed=replayed, score=score) if closes else None
        self.patience = patience or Patience(log)
        self.record = OwnRecord(ledger, member.name, log)
        self.exchange = LedgerExchange(
            ledger, control, self.writes, reader, closer, incarnation, log, self.patience
        )
        self.exchange.rescue.saved = self._saved_shards
        self.retention = Retention(ledger, log, background)
        self.meter = Meter(replica, device)
        self.pending: Contribution | None = None
        self.update: tuple[int, Update] | None = None  # the last one, with its round
        self.step_count = 0  # inner steps that the optimiser has taken
        self.fresh_steps = 0  # inner steps that no update of ours has carried yet
        self.last_held_out: HeldOut | None = None  # what this process measured; it goes out with each update
        # Of a round that a start before this one has begun, with its weights.
        self.middle: tuple[Middle, Mapping[str, Tensor]] | None = None
        self.saves_middle = member.config.kind == "full" and max(1, member.config.processes) == 1
        self.rehearsed = False  # an inner step, before our first round
        self.behind = True  # until this start has trained a round: the others may have begun it long ago
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.hash_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.anchors = AnchorWriter(ledger, control, self.exchange, log, background)
        self.seconds: dict[str, float] = defaultdict(float)  # at the edge of a round, by what it was spent on
        self.edge_began: float | None = None

        threading.Thread(target=self._warm_codec, daemon=True, name="warm").start()
        files = [*self.state_files().values(), *([own] if self.saves_middle else ())]
        self.state.reserve(sum(gpu.aligned(t.nbytes) for named in files for t in named.values()))

    @property
    def has_model(self) -> bool:
        """Does this process keep the anchor of the whole model?"""
        return len(self.reads) == len(self.ledger.shards)

    def _warm_codec(self) -> None:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            self.outer.codec.warm()

    # What the loop calls

    def train_round(
        self, round_index: int, progress: Callable[[int], None], again: Update | None = None
    ) -> list[Contribution]:
        """H inner steps, then this replica's update on disk before any of it is sent.

        `again` is the update of this round from a start that was killed: it stays as it was sent. A replica
        that has just started may have come late. If the others settle the round without it, it stops there,
        so that they need not wait for it in the next one. One that is not a member yet trains nothing.
        """
        steps, status = self.recipe.outer.inner_steps, self.status
        if not self.patience(partial(self.place.enter, round_index + 1)):
            self._get_ready(round_index)
            return []
        status.state, status.round = "training", round_index + 1
        losses = self._take_up(round_index + 1)
        first, started, pace = len(losses), time.monotonic(), gpu.Pace(self.device)
        if self.edge_began is not None:
            self.seconds["edge_seconds"] += started - self.edge_began
        with self._edge(round_index + 1, again) as passed:
            for h in range(first, steps):
                losses.append(self.replica.inner_step(round_index * steps + h))
                self.meter.step()
                pace.launched()
                status.inner_step = round_index * steps + h + 1
                if self.device.type == "cpu":
                    status.loss = float(losses[-1])
                progress(h + 1)
                if h + 1 < steps:
                    if passed():
                        break
                    step_seconds = (time.monotonic() - started) / (h + 1 - first)
                    part_if_asked(self, round_index + 1, losses, step_seconds * (steps - h - 1))
                    self._save_middle(round_index + 1, losses)
        status.loss = float(doubles(losses).mean())
        self.edge_began = time.monotonic()
        status.seconds = self.edge_began - started
        sequences = (len(losses) - first) * self.recipe.batch_of(self.member.config)
        tokens = sequences * self.recipe.model.context
        status.tokens_per_second = tokens / status.seconds
        status.grad_norm = float(self.replica.grad_norm)
        if not math.isfinite(status.loss):  # the same at every stage
            self._roll_back(round_index + 1)
            return []
        self.step_count += len(losses)
        self.fresh_steps += len(losses)
        if len(losses) < steps:
            self._carry(round_index + 1, len(losses), self.replica.named_parameters())
            return []
        with self._timed("encode_seconds"):
            update = self._encode(again)
        if again is None:
            with self._timed("save_seconds"):
                self.state.save_update(round_index + 1, update)
        self._begin_save(round_index + 1, update)
        self.pending = Contribution(self.member.name, update.shards, self.pop_facts())
        self.update = round_index + 1, update
        status.state = "delivering"
        return [self.pending]

    def _get_ready(self, round_index: int) -> None:
        """We have caught up and are no member yet: ask to be one, when nothing is left that takes long."""
        self.pending = None
        if round_index and not self.rehearsed and not self.step_count:
            self.rehearsed = True
            rehearse(self.replica, self.anchor, round_index * self.recipe.outer.inner_steps - 1)
            self.meter.pop(self.replica.pop_counts())
        if self.control.rank == 0:
            self.patience(self.place.ask)

    def _edge(self, round_number: int, again: Update | None) -> AbstractContextManager[Callable[[], bool]]:
        """Says between inner steps whether we stop. Only a start's first round is asked about, and not round
        1, which all begin when they come."""
        late, self.behind = self.behind and round_number > 1, self.behind and again is not None
        if late and again is None:
            return watched_edge(self.ledger, round_number, self.control, self.background)
        return nullcontext(lambda: False)

    def _take_up(self, round_number: int) -> list[Tensor]:
        """Begin a round, or go on with one whose middle was saved: the losses so far."""
        middle, self.middle = self.middle, None
        if middle is None or middle[0].round != round_number:
            self.replica.begin_round(self.anchor)
            return []
        about, params = middle
        self.replica.begin_round(params if about.num_steps else self.anchor)
        return list(about.losses)

    def _save_middle(self, round_number: int, losses: Sequence[Tensor]) -> None:
        """Stages would have to save at the same inner step, and a whole model in parts too: they do not."""
        if self.saves_middle and self.state.middle_due():
            save_middle(self, round_number, losses)

    def _carry(self, round_number: int, num_steps: int, params: Mapping[str, Tensor]) -> None:
        """The round was settled in the middle of our inner steps: what they gave goes to the feedback."""
        self.outer.carry(self._as_sent(params), self.feedback)
        self.state.hurry()
        self.pending = None
        self.log(
            f"round {round_number} was settled without us; our first {num_steps} inner steps of it go to the "
            "error feedback, and the next round begins with the others"
        )

    def carry_middle(self) -> None:
        """The same of a round whose middle a start before this one has saved."""
        assert self.middle, "a middle was restored"
        (about, params), self.middle = self.middle, None
        if not about.num_steps:  # it stopped at the edge of a round
            return
        self.step_count += about.num_steps
        self.fresh_steps += about.num_steps
        self._carry(about.round, about.num_steps, params)

    def _as_sent(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `as_sent`, where the anchor is."""
        here = {name: p.detach().to(self.anchor[name].device) for name, p in params.items()}
        return as_sent(self.recipe, self.member, self.bases, here, self.anchor)

    def _encode(self, again: Update | None) -> Update:
        """Anchor - params to error feedback and payload (eq. 2)."""
        params = self._as_sent(self.replica.named_parameters())
        if again is None:
            self.record.tell()
        if again is not None:
            sent = unpack_shards(self.ledger, again.shards, self.outer.codec.unpack_many)
            self.outer.account(params, self.feedback, sent)
            self.tell(again)
            return again
        try:
            sent = self.outer.contribute(params, self.feedback)
        except ValueError as error:
            raise RunError(f"replica {self.member.name}: {error}") from error
        packed = {i: self.outer.codec.pack_many(sent.part(self.ledger.shards[i])) for i in self.writes}
        return Update(packed, self.step_count, {name: self._told(name) for name in SAVED})

    def _told(self, name: str) -> float:
        return float(getattr(self.status, name) or 0.0)

    def tell(self, update: Update) -> None:
        for name in SAVED:
            setattr(self.status, name, update.told.get(name, 0.0))

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        """theta^(t-1) -> theta^(t); an update of ours that does not count returns to the feedback."""
        if self.middle and self.middle[0].round == round_number:  # it was settled while we were away
            self.carry_middle()
        with self._timed("apply_seconds"):
            updates = {}
            for contribution in contributions:
                try:
                    updates[contribution.replica] = unpack_shards(
                        self.ledger, contribution.shards, self.outer.codec.unpack_many
                    )
                except Refused as reason:
                    raise RunError(f"round {round_number} counts {contribution.replica}: {reason}") from None
            manifest = self.ledger.manifest(round_number)
            assert manifest is not None, "only a settled round is applied"
            check_counted(manifest, updates, whole=self.has_model)
            self.state.protect()
            self.anchors.go_on(round_number - 1)
            if updates:  # none, where the round is void
                weights = round_weights(self.ledger.at(round_number).recipe, updates)
                self.outer.apply(list(updates.values()), weights)
            self.settle_pending(round_number)
            self.hold(round_number)
            if updates and manifest.closer == self.member.name and self.anchors.due(round_number):
                self.anchors.write(round_number, self._anchor_shards())
            if self.control.rank == 0:
                self.retention.after(round_number)

    def _anchor_shards(self) -> dict[int, dict[str, Tensor]]:
        """theta^(t) with the state of the outer method: of the shards that this process trains."""
        shards = {}
        for i in self.writes:
            tensors = {name: self.anchor[name] for name in self.ledger.shards[i]}
            outer = {key: t for key, t in self.outer.state().items() if key.split("/", 1)[1] in tensors}
            shards[i] = tensors | outer
        return shards

    def _saved_shards(self, round_number: int) -> Mapping[int, bytes]:
        """What this replica sent to a round, if this disk or this process still has it."""
        with suppress(ConfigError):
            update = self.state.load_update(round_number, tuple(sorted(self.writes)))
            if update is not None:
                return update.shards
        return self.pending.shards if self.pending else {}

    def settle_pending(self, round_number: int) -> None:
        """Only the manifest says whether our update counted, by the hashes of its shards."""
        pending, self.pending = self.pending, None
        manifest = self.ledger.manifest(round_number)
        assert manifest is not None, "only a settled round is applied"
        if pending is None:
            self.record.applied(manifest)
        if pending is None or self.exchange.counts_in(manifest, pending):
            return
        reason = dict(manifest.refused).get(self.member.name, "")
        if is_spent(reason):
            self.log(f"round {round_number} does not count our update, and it is not sent again: {reason}")
            return
        sent = unpack_shards(self.ledger, pending.shards, self.outer.codec.unpack_many)
        self.outer.take_back(sent, self.feedback)
        self.fresh_steps += int(pending.facts.measured.get(INNER_STEPS, [0])[0])
        self.log(f"round {round_number} was settled without our update; it returned to the error feedback")
        if self.record.refused_too_often(round_number):
            for tensor in self.feedback.values():
                tensor.zero_()
            self.log(
                f"round {round_number}: {REFUSALS} updates in a row were refused for their norm; the error "
                "feedback is dropped, with what they held"
            )

    def hold(self, round_number: int) -> None:
        """The digest of the anchor is computed while the next round trains, which does not change it."""
        if self.hash_stream:  # it waits for the anchor, and not for the steps that are launched after it
            self.hash_stream.wait_stream(torch.cuda.current_stream(self.device))
        digests = self.hasher.submit(self._digests)
        self.exchange.hold_later(round_number, digests)
        self.status.round = round_number
        if not self.background:
            self.exchange.settle_anchor()

    def _digests(self) -> Mapping[int, str]:
        shards = [self.ledger.shards[i] for i in self.reads]
        with torch.cuda.stream(self.hash_stream) if self.hash_stream else nullcontext():
            return dict(zip(self.reads, shard_digests(self.anchor, shards), strict=True))

    def finish(self) -> None:
        """After the last round: what still goes on in the background."""
        self.exchange.settle_anchor()
        self.anchors.finish(self.status.round)
        self.state.finish()

    # Saving

    def _begin_save(self, round_number: int, update: Update) -> None:
        """All of the state with a round's update in it, copied before the PUT and written after it."""
        with self._timed("save_seconds"):
            if self.parting.asked():  # this state is the last one here
                self.state.finish()
                self.state.hurry()
            self.state.save(round_number, self.state_files(), update)

    def state_files(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {
            "anchor": self.anchor,
            "optimiser": self.replica.state(),
            "feedback": self.feedback,
            "outer": self.outer.state(),
        }

    def _roll_back(self, round_number: int) -> None:
        """A loss that is not finite: we skip this round, and the optimiser returns to what was saved last."""
        self.log(
            f"round {round_number}: the loss is {self.status.loss}; rolled back to the round's start, no "
            "update of ours. If it happens again, lower inner.lr"
        )
        saved = self.state.last_optimiser()
        if saved:
            number, self.step_count, moments = saved
            if number < round_number - 1:
                self.log(f"the optimiser's moments are those after round {number}")
            self.replica.restore(moments, self.step_count)
        else:
            self.step_count = 0
            forget(self.replica)
        self.pending = None

    def pop_facts(self) -> Facts:
        """What this process has measured since the last call."""
        counts = self.replica.pop_counts()
        trip, figures = self.meter.pop(counts)
        figures |= {name: round(self.seconds.pop(name, 0.0), 4) for name in EDGE_SECONDS}
        figures[INNER_STEPS], self.fresh_steps = self.fresh_steps, 0
        return Facts(
            loss=finite(self.status.loss),
            grad_norm=finite(self.status.grad_norm),
            seconds=round(self.status.seconds or 0.0, 4),
            trip_seconds=trip,
            bytes=counts,
            measured={name: [figure] for name, figure in figures.items()},
            held_out=self.last_held_out,
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - began
