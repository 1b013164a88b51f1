"""One process of a real fleet, with a full replica or a part of one: train, deliver, apply, save."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.disk import DiskFull
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_tensor
from isthmus.outer.exchange import Contribution
from isthmus.protocol.heartbeat import READY
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.patience import Patience
from isthmus.replica.base import Replica, Wish
from isthmus.replica.control_group import ControlGroup, all_true
from isthmus.runlog.facts import Facts
from isthmus.runtime.admission import NO_SHARE, Admission
from isthmus.runtime.checkpoint import PARAMS, Checkpoint, Place
from isthmus.runtime.leaving import Parted, Parting
from isthmus.runtime.outer_step import Files
from isthmus.runtime.session import Session
from isthmus.runtime.status import INNER_STEPS, Measured, WorkerStatus
from isthmus.subspace.boundaries import BasisSet, as_sent

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
    ) -> None:
        """`save_seconds` as in Checkpoint. Without `background` all work happens in the calling thread, for
        tests that kill at an exact point."""
        self.recipe, self.member, self.replica, self.ledger = recipe, member, replica, ledger
        self.control, self.device, self.log = control, device, log
        self.checkpoint = Checkpoint(
            work_dir / "state",
            device,
            recipe.outer.inner_steps,
            log,
            processes=control.size,
            save_seconds=save_seconds,
            at_once=not background,
        )
        self.status, self.measured = WorkerStatus(), Measured(replica, device)
        self.admission, self.parting = admission or Admission(ledger, log), parting or Parting()
        self.patience = patience or Patience(log)
        own, where = replica.named_parameters(), gpu.outer_device(device)
        self.bases = BasisSet(recipe, where, next(iter(own.values())).dtype)
        anchor = first_anchor(recipe, member, own, where)
        self.session = Session(ledger, anchor, own, control, incarnation, log, self.patience, background)
        self.outer, self.exchange = self.session.outer, self.session.exchange
        self.anchor, self.feedback = self.session.anchor, self.session.feedback
        # In the open round, the losses of the inner steps done.
        self.losses, self.step_count = list[Tensor](), 0
        self.params: Mapping[str, Tensor] | None = None  # a checkpoint's, until `_take_up`
        files = [*self.state_files().values(), own]
        self.checkpoint.reserve(sum(gpu.aligned(t.nbytes) for named in files for t in named.values()))

    @property
    def open(self) -> int:
        """The open round."""
        return self.session.open

    # What the loop calls: train, apply

    def train_round(self, round_index: int, progress: Callable[[int], None]) -> list[Contribution]:
        """H inner steps, then error feedback and payload.

        A replica that has just started may be late. If the others settle the round without it, it stops
        training it, so that they need not wait for it in the next one. A replica without a share of the data
        trains nothing.
        """
        round_number = round_index + 1
        if not self.patience(partial(self.admission.enter, round_number)):
            self.status.state = READY
            if self.admission.member:  # we are a member, and perhaps the only one there
                self.session.skip(NO_SHARE)
            return []
        word = Wish.GO_ON
        if not self.session.carried:
            word = self._inner_steps(round_number, progress)
            if not self._is_finite():
                self._skip(round_number)
                return []
            if len(self.losses) < self.recipe.outer.inner_steps:
                self._fold(round_number, self.replica.named_parameters())
                return []
        with self.measured.timed("encode_seconds"):
            shards = self.session.propose(self._as_sent(self.replica.named_parameters()))
        with self.measured.timed("save_seconds"):
            self._save_proposed(word)
        self.status.state = "delivering"
        return [self.session.deliver(shards, self.pop_facts())]

    def _as_sent(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply `as_sent` on the anchor's device."""
        here = {name: p.detach().to(self.anchor[name].device) for name, p in params.items()}
        return as_sent(self.recipe, self.member, self.bases, here, self.anchor)

    def _inner_steps(self, round_number: int, progress: Callable[[int], None]) -> Wish:
        """Train the round as far as it goes; return the common decision after the last step."""
        steps, status, word = self.recipe.outer.inner_steps, self.status, Wish.GO_ON
        status.state, status.round = "training", round_number
        self._take_up()
        first, before, pace = len(self.losses), (round_number - 1) * steps, gpu.Pace(self.device)
        self.measured.edge_ends()
        started = time.monotonic()
        with self.session.watch() as overtaken:
            for h in range(first + 1, steps + 1):
                self.losses.append(self.replica.inner_step(before + h - 1))
                self.step_count += 1
                self.measured.fresh_steps += 1
                self.measured.meter.step()
                pace.launched()
                status.inner_step = before + h
                if self.device.type == "cpu":
                    status.loss = float(self.losses[-1])
                progress(h)
                if h < steps and overtaken():
                    break
                left = (time.monotonic() - started) / (h - first) * (steps - h)
                word = self.replica.agree(self._wish(h, left))
                if h < steps:
                    self._heed(word)
        self.measured.edge_begins()
        status.loss = float(doubles(self.losses).mean())
        if (trained := len(self.losses) - first) > 0:
            status.seconds = time.monotonic() - started
            sequences = trained * self.recipe.batch_of(self.member.config)
            status.tokens_per_second = sequences * self.recipe.model.context / status.seconds
            status.grad_norm = float(self.replica.grad_norm)
        return word

    def _is_finite(self) -> bool:
        """Whether loss and gradient, and so the weights, are finite. All stages get the same result."""
        return math.isfinite(self.status.loss or 0.0) and math.isfinite(self.status.grad_norm or 0.0)

    def _wish(self, h: int, seconds_left: float) -> Wish:
        """This process's wish after inner step h. A machine that is taken back stops unless the rest of the
        round fits into its time. Between the processes of one replica a wish takes a moment to arrive."""
        steps, ahead = self.recipe.outer.inner_steps, h + self.replica.wish_delay
        if h < steps and self.parting.asked() and not self.parting.fits(seconds_left):
            return Wish.STOP
        return Wish.SAVE if self.checkpoint.is_due(edge=ahead % steps == 0) else Wish.GO_ON

    def _heed(self, word: Wish) -> None:
        """Carry out the common decision of all processes between two inner steps."""
        if word is Wish.STOP:
            self.save_now()
            steps = self.recipe.outer.inner_steps
            raise Parted(f"stopped in round {self.open}, after {len(self.losses)} of its {steps} inner steps")
        if self.parting.asked() and not self.parting.saved and self.control.size == 1:
            self.parting.saved = self.save_now()
        elif word is Wish.SAVE:
            self.checkpoint.save(self.place(), self.files())
            self.checkpoint.protect()

    def _take_up(self) -> None:
        """Start a round, or continue the one inside which we were restored."""
        params, self.params = self.params, None
        if params is not None:
            self.replica.go_on(self.anchor, params)
            return
        self.replica.begin_round(self.anchor)
        self.losses = []
        if self.session.unsaved:
            self.checkpoint.save(self.place(), self.files())
            self.checkpoint.protect()

    def _save_proposed(self, word: Wish) -> None:
        """Save the state with a round's update, copied before the PUT and written after it. After a round
        that was trained but not committed, one must be on disk before the first commit."""
        if word is not Wish.GO_ON or self.parting.asked():
            self.checkpoint.save(self.place(), self.files())
        if self.session.unsaved:
            self.checkpoint.finish()
            first = Place(self.open).number(self.recipe.outer.inner_steps)
            saved = any(number >= first for number in self.checkpoint.numbers())
            if not all_true(self.control, saved):
                raise DiskFull(self.checkpoint.short or "another process of this replica could not save")
            self.checkpoint.drop(lambda number: number < first)
            self.session.unsaved = False
        self.checkpoint.add_start(self.session.incarnation)

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        """theta^(t-1) -> theta^(t), and c -> e by our own counted update."""
        if self.params is not None and self.open == round_number:  # it was settled while we were away
            self.fold_open()
        with self.measured.timed("apply_seconds"):
            self.checkpoint.protect()
            settled = self.session.apply(round_number, contributions)
        if settled.returned:
            self.measured.take_back(settled.returned)
        self.status.round, self.losses = round_number, []

    def hold(self, round_number: int) -> None:
        """Set the anchor's round."""
        self.session.hold(round_number)
        self.status.round = round_number

    def finish(self) -> None:
        """Finish the background work after the last round."""
        self.session.finish()
        self.checkpoint.finish()

    # A round that is not finished

    def _fold(self, round_number: int, params: Mapping[str, Tensor]) -> None:
        """Move our inner steps to the feedback: the round was settled before we finished them."""
        self.session.fold(self._as_sent(params))
        num_steps, self.losses = len(self.losses), []
        self.log(
            f"round {round_number} was settled without us; our first {num_steps} inner steps of it go to the "
            "error feedback, and the next round begins with the others"
        )

    def fold_open(self) -> None:
        """Fold the open round's steps from the current weights or from a restored checkpoint's."""
        params, self.params = self.params, None
        self.status.loss = float(doubles(self.losses).mean())
        if self._is_finite():
            self._fold(self.open, self.replica.named_parameters() if params is None else params)
        else:
            self._roll_back()

    def _skip(self, round_number: int) -> None:
        """Skip the round because the loss is not finite, and announce it."""
        self.log(
            f"round {round_number}: the loss is {self.status.loss}; rolled back to the round's start, no "
            "update of ours. If it happens again, lower inner.lr"
        )
        self._roll_back()
        self.session.skip("not_finite")

    def _roll_back(self) -> None:
        """Reset the optimiser to the last checkpoint at a round's edge, and the weights to the anchor."""
        edge = self.checkpoint.last_edge()
        if edge:
            place, moments = edge
            self.step_count = place.step_count
            if place.round < self.open - place.carried:
                self.log(f"the optimiser's moments are those of round {place.round}")
            self.replica.restore(moments, self.step_count)
        else:
            self.step_count = 0
            zeros = {key: torch.zeros_like(tensor) for key, tensor in self.replica.state().items()}
            self.replica.restore(zeros, 0)
        self.measured.fresh_steps = max(0, self.measured.fresh_steps - len(self.losses))
        self.losses = []

    # Saving

    def place(self) -> Place:
        """The current position."""
        pending = self.session.pending
        sent = pending.facts.measured.get(INNER_STEPS, [0])[0] if pending else 0
        return Place(
            self.open,
            doubles(self.losses),
            self.step_count,
            self.measured.fresh_steps + int(sent),
            self.session.carried and bool(self.feedback),
            self.control.size,
            self.status.to_save(),
        )

    def files(self) -> Files:
        """The current state, with the weights if inside a round."""
        inside = self.losses and not (self.session.carried and self.feedback)
        return {**self.state_files(), **({PARAMS: self.replica.named_parameters()} if inside else {})}

    def state_files(self) -> dict[str, Mapping[str, Tensor]]:
        return {**self.session.save(), "optimiser": self.replica.state()}

    def save_now(self) -> bool:
        """Save to disk, so that the next start continues from here; False if there is no room."""
        if self.params is not None:  # it was restored and not changed: it is on disk
            return True
        return self.checkpoint.save_now(self.place(), self.files())

    def restore(self, place: Place, files: Files) -> None:
        """Restore the state at a checkpoint's position."""
        self.session.restore(files, place.carried)
        self.losses, self.session.open = list(place.losses), place.round
        self.step_count, self.measured.fresh_steps = place.step_count, place.fresh_steps
        self.replica.restore(files["optimiser"], place.step_count)
        self.status.restore(place.told)
        self.params = None
        if PARAMS in files:
            self.params = {name: p.to(self.device) for name, p in files[PARAMS].items()}

    def pop_facts(self) -> Facts:
        """This process's measurements since the last call."""
        return self.measured.pop(self.status)


def first_anchor(
    recipe: Recipe, member: Member, own: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The part of theta^(0) that this process keeps: what it trains, with its current values. Every stage of
    a compressed replica also keeps the embedding, and applies its update as stage 0 does."""
    anchor = {name: p.to(device, copy=True) for name, p in own.items()}
    if member.config.compressed and EMBEDDING not in own:
        shape, dtype = recipe.model.shapes()[EMBEDDING], next(iter(own.values())).dtype
        anchor[EMBEDDING] = init_tensor(EMBEDDING, shape, recipe.model, recipe.seed).to(device, dtype)
    return anchor


def doubles(losses: Sequence[Tensor]) -> Tensor:
    """(h,) on the CPU: some may come from a file, and some devices lack float64."""
    return torch.stack([loss.cpu().double() for loss in losses]) if losses else torch.zeros(0).double()
