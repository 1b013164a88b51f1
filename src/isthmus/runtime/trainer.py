"""One process of a real fleet, with a full replica or a part of one: train, deliver, apply, save."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.corpus import TokenView
from isthmus.errors import ConfigError
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.patience import Patience
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.retention import Retention
from isthmus.protocol.scores import has_passed, is_spent
from isthmus.protocol.shards import ShardReader
from isthmus.replica.base import Replica
from isthmus.replica.control_group import ControlGroup
from isthmus.runlog.facts import Facts
from isthmus.runtime.admission import Admission
from isthmus.runtime.anchor_writer import AnchorWriter
from isthmus.runtime.edge import watched_edge
from isthmus.runtime.middle import Middle
from isthmus.runtime.outer_part import OuterPart
from isthmus.runtime.own_record import REFUSALS, OwnRecord
from isthmus.runtime.parting import Parting
from isthmus.runtime.private_state import Files, PrivateState, Update
from isthmus.runtime.rehearsal import forget, rehearse
from isthmus.runtime.status import Measured, WorkerStatus
from isthmus.runtime.stopping import doubles, part_if_asked, save_middle
from isthmus.runtime.update_scores import UpdateScores

Log = Callable[[str], None]


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
        admission: Admission | None = None,
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
        self.status, self.measured = WorkerStatus(), Measured(replica, device)
        own = replica.named_parameters()
        self.outer = OuterPart(recipe, member, ledger, own, device)
        self.anchor, self.feedback = self.outer.anchor, self.outer.feedback
        self.admission, self.parting = admission or Admission(ledger, log), parting or Parting()
        self.patience = patience or Patience(log)
        self.record = OwnRecord(ledger, member.name, log)
        reader = ShardReader(ledger, self.outer.reads)
        closer = self._closer(reader, held_out, stream_dtype or self.outer.dtype)
        self.exchange = LedgerExchange(
            ledger, control, self.outer.writes, reader, closer, incarnation, log, self.patience
        )
        self.exchange.rescue.saved = self._saved_shards
        self.retention = Retention(ledger, log, background)
        self.anchors = AnchorWriter(ledger, control, self.exchange, log, background)
        self.pending: Contribution | None = None
        self.update: tuple[int, Update] | None = None  # the last one, with its round
        self.step_count = 0  # inner steps that the optimiser has taken
        # Of a round that a start before this one has begun, with its weights.
        self.middle: tuple[Middle, Mapping[str, Tensor]] | None = None
        self.saves_middle = member.config.kind == "full" and max(1, member.config.processes) == 1
        self.rehearsed = False  # an inner step, before our first round
        self.behind = True  # until this start has trained a round: the others may have begun it long ago

        threading.Thread(target=self.outer.warm, daemon=True, name="warm").start()
        files = [*self.state_files().values(), *([own] if self.saves_middle else ())]
        self.state.reserve(sum(gpu.aligned(t.nbytes) for named in files for t in named.values()))

    def _closer(self, reader: ShardReader, held_out: TokenView | None, dtype: torch.dtype) -> Closer | None:
        ledger = self.ledger
        # Where the membership may change, so may who closes.
        closes = bool(ledger.run.owner) or self.member.name in ledger.run.closers
        if self.control.rank > 0 or not closes:
            return None
        # A pipelined replica may have no room for the whole model.
        replayed = partial(digest_from_bucket, ledger) if self.member.config.parts == 1 else lambda t: ""
        score = None
        if held_out is not None and self.outer.has_model and self.recipe.score.batches:
            score = UpdateScores(self.recipe, ledger, self.anchor, self.outer.codec, held_out, dtype)
        return Closer(ledger, reader, self.log, replayed=replayed, score=score)

    # What the loop calls: train, apply

    def train_round(
        self, round_index: int, progress: Callable[[int], None], again: Update | None = None
    ) -> list[Contribution]:
        """H inner steps, then this replica's update on disk before any of it is sent.

        `again` is the update of this round from a start that was killed: it stays as it was sent. A replica
        that has just started may have come late. If the others settle the round without it, it stops there,
        so that they need not wait for it in the next one. One that is not a member yet trains nothing.
        """
        round_number = round_index + 1
        if not self.patience(partial(self.admission.enter, round_number)):
            self._get_ready(round_index)
            return []
        num_steps, loss = self._inner_steps(round_number, progress, again)
        if not math.isfinite(loss):  # the same at every stage
            self._roll_back(round_number)
            return []
        self.step_count += num_steps
        self.measured.fresh_steps += num_steps
        if num_steps < self.recipe.outer.inner_steps:
            self._carry(round_number, num_steps, self.replica.named_parameters())
            return []
        with self.measured.timed("encode_seconds"):
            update = self._encode(again)
        if again is None:
            with self.measured.timed("save_seconds"):
                self.state.save_update(round_number, update)
        self._begin_save(round_number, update)
        self.pending = Contribution(self.member.name, update.shards, self.pop_facts())
        self.update = round_number, update
        self.status.state = "delivering"
        return [self.pending]

    def _inner_steps(
        self, round_number: int, progress: Callable[[int], None], again: Update | None
    ) -> tuple[int, float]:
        """Train the round as far as it goes: how many of its inner steps are done, and their mean loss."""
        steps, status = self.recipe.outer.inner_steps, self.status
        status.state, status.round = "training", round_number
        losses = self._take_up(round_number)
        first, before, pace = len(losses), (round_number - 1) * steps, gpu.Pace(self.device)
        self.measured.edge_ends()
        started = time.monotonic()
        with self._edge(round_number, again) as passed:
            for h in range(first, steps):
                losses.append(self.replica.inner_step(before + h))
                self.measured.meter.step()
                pace.launched()
                status.inner_step = before + h + 1
                if self.device.type == "cpu":
                    status.loss = float(losses[-1])
                progress(h + 1)
                if h + 1 < steps:
                    if passed():
                        break
                    step_seconds = (time.monotonic() - started) / (h + 1 - first)
                    part_if_asked(self, round_number, losses, step_seconds * (steps - h - 1))
                    self._save_middle(round_number, losses)
        status.loss = loss = float(doubles(losses).mean())
        self.measured.edge_begins()
        status.seconds = time.monotonic() - started
        sequences = (len(losses) - first) * self.recipe.batch_of(self.member.config)
        status.tokens_per_second = sequences * self.recipe.model.context / status.seconds
        status.grad_norm = float(self.replica.grad_norm)
        return len(losses), loss

    def _get_ready(self, round_index: int) -> None:
        """We have caught up and are no member yet: ask to be one, when nothing is left that takes long."""
        self.pending = None
        if round_index and not self.rehearsed and not self.step_count:
            self.rehearsed = True
            rehearse(self.replica, self.anchor, round_index * self.recipe.outer.inner_steps - 1)
            self.measured.forget()
        if self.control.rank == 0:
            self.patience(self.admission.ask)

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
        if about.num_steps:
            self.replica.go_on(self.anchor, params)
        else:  # it stopped at the edge
            self.replica.begin_round(self.anchor)
        return list(about.losses)

    def _save_middle(self, round_number: int, losses: Sequence[Tensor]) -> None:
        """Stages would have to save at the same inner step, and a whole model in parts too: they do not."""
        if self.saves_middle and self.state.middle_due():
            save_middle(self, round_number, losses)

    def _encode(self, again: Update | None) -> Update:
        """Anchor - params to error feedback and payload (eq. 2)."""
        params = self.replica.named_parameters()
        if again is not None:
            self.outer.account(params, again.shards)
            self.status.restore(again.told)
            return again
        self.record.tell()
        return Update(self.outer.encode(params), self.step_count, self.status.to_save())

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        """theta^(t-1) -> theta^(t); an update of ours that does not count returns to the feedback."""
        if self.middle and self.middle[0].round == round_number:  # it was settled while we were away
            self.carry_middle()
        with self.measured.timed("apply_seconds"):
            manifest = self._manifest(round_number)
            updates = self.outer.unpack_counted(manifest, contributions)
            self.state.protect()
            self.anchors.go_on(round_number - 1)
            if updates:  # none, where the round is void
                self.outer.apply(round_number, updates)
            self.settle_pending(round_number)
            self.hold(round_number)
            if updates and manifest.closer == self.member.name and self.anchors.due(round_number):
                self.anchors.write(round_number, self.outer.anchor_shards())
            if self.control.rank == 0:
                self.retention.after(round_number)

    def _manifest(self, round_number: int) -> Manifest:
        manifest = self.ledger.manifest(round_number)
        assert manifest is not None, "only a settled round is applied"
        return manifest

    def settle_pending(self, round_number: int) -> None:
        """Only the manifest says whether our update counted, by the hashes of its shards."""
        pending, self.pending = self.pending, None
        manifest = self._manifest(round_number)
        if pending is None:
            self.record.applied(manifest)
        if pending is None or self.exchange.counts_in(manifest, pending):
            return
        reason = dict(manifest.refused).get(self.member.name, "")
        if has_passed(reason):
            self.log(f"round {round_number}: our update was measured, and does not count yet: {reason}")
            return
        if is_spent(reason):
            self.log(f"round {round_number}: our update was refused, and is not sent again: {reason}")
            return
        self.outer.take_back(pending.shards)
        self.measured.take_back(pending.facts)
        self.log(f"round {round_number} was settled without our update; it returned to the error feedback")
        if self.record.refused_too_often(round_number):
            self.outer.drop_feedback()
            self.log(
                f"round {round_number}: {REFUSALS} updates in a row were refused for their norm; the error "
                "feedback is dropped, with what they held"
            )

    def hold(self, round_number: int) -> None:
        """From here on the anchor is that of this round; its digest is stated with our next commit."""
        self.exchange.hold_later(round_number, self.outer.digests_later())
        self.status.round = round_number
        if not self.background:
            self.exchange.settle_anchor()

    def finish(self) -> None:
        """After the last round: what still goes on in the background."""
        self.exchange.settle_anchor()
        self.anchors.finish(self.status.round)
        self.state.finish()

    # A round that is not trained to its end

    def _carry(self, round_number: int, num_steps: int, params: Mapping[str, Tensor]) -> None:
        """The round was settled in the middle of our inner steps: what they gave goes to the feedback."""
        self.outer.carry(params)
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
        self.measured.fresh_steps += about.num_steps
        self._carry(about.round, about.num_steps, params)

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

    # Saving

    def _begin_save(self, round_number: int, update: Update) -> None:
        """All of the state with a round's update in it, copied before the PUT and written after it."""
        with self.measured.timed("save_seconds"):
            if self.parting.asked():  # this state is the last one here
                self.state.finish()
                self.state.hurry()
            self.state.save(round_number, self.state_files(), update)

    def state_files(self) -> Files:
        return {
            "anchor": self.anchor,
            "optimiser": self.replica.state(),
            "feedback": self.feedback,
            "outer": self.outer.method.state(),
        }

    def saved_update(self, round_number: int) -> Update | None:
        """What this process sent to a round, if it is on this disk; ConfigError where it is damaged."""
        return self.state.load_update(round_number, tuple(sorted(self.outer.writes)))

    def _saved_shards(self, round_number: int) -> Mapping[int, bytes]:
        """What this replica sent to a round, if this disk or this process still has it."""
        with suppress(ConfigError):
            if update := self.saved_update(round_number):
                return update.shards
        return self.pending.shards if self.pending else {}

    def pop_facts(self) -> Facts:
        """What this process has measured since the last call."""
        return self.measured.pop(self.status)
