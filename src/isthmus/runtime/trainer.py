"""One process of a real fleet, with a full replica or a part of one: train, deliver, apply, save."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.disk import DiskFull
from isthmus.layout.deal import Deal
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_tensor
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.patience import Patience
from isthmus.replica.base import Replica, Wish
from isthmus.replica.control_group import ControlGroup, agree, all_true
from isthmus.runlog.facts import Facts
from isthmus.runtime.checkpoint import PARAMS, Checkpoint, Place
from isthmus.runtime.leaving import Parted, Parting
from isthmus.runtime.outer_step import Files
from isthmus.runtime.session import Session, State
from isthmus.runtime.status import INNER_STEPS, Measured
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
        deal: Callable[[Deal], None] = lambda share: None,
        parting: Parting | None = None,
    ) -> None:
        """`save_seconds` as in Checkpoint. `deal` receives each round's share of the data. Without
        `background` all work happens in the calling thread, for tests that kill at an exact point."""
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
        self.measured = Measured(replica, device)
        self.deal, self.parting = deal, parting or Parting()
        self.patience = patience or Patience(log)
        own, where = replica.named_parameters(), gpu.outer_device(device)
        self.bases = BasisSet(recipe, where, next(iter(own.values())).dtype)
        anchor = first_anchor(recipe, member, own, where)
        self.session = Session(
            ledger, anchor, own, control, incarnation, log, self.patience, background=background
        )
        self.status, self.outer = self.session.status, self.session.outer
        self.anchor, self.feedback = self.session.anchor, self.session.feedback
        # In the open round, the losses of the inner steps done.
        self.losses, self.step_count = list[Tensor](), 0
        self.params: Mapping[str, Tensor] | None = None  # a checkpoint's, until `_take_up`
        self.facts: Facts | None = None  # what we committed to the last round, of all our processes
        files = [*self.state_files().values(), own]
        self.checkpoint.reserve(sum(gpu.aligned(t.nbytes) for named in files for t in named.values()))

    # What the loop calls: begin, train_round, settle

    def begin(self, round_number: int) -> bool:
        """Whether to train a round. A replica without a share of the data trains nothing."""
        trains = self.session.begin()
        if trains and self.session.share:
            self.deal(self.session.share)
        return trains

    def train_round(self, round_number: int, progress: Callable[[int], None]) -> None:
        """H inner steps, then error feedback and payload.

        A replica that has just started may be late. If the others settle the round without it, it stops
        training it, so that they need not wait for it in the next one.
        """
        word = Wish.GO_ON
        if not self.session.carried:
            word = self._inner_steps(round_number, progress)
            if not self._is_finite():
                self._skip(round_number)
                return
            if len(self.losses) < self.recipe.outer.inner_steps:
                return
        with self.measured.timed("encode_seconds"):
            self.session.encode(self._as_sent(self.replica.named_parameters()))
        with self.measured.timed("save_seconds"):
            self._save_proposed(word)
        self.status.state = "delivering"
        self.session.deliver(None, self.measured.pop(self.status))

    def settle(self, round_number: int) -> int:
        """Wait until the round is settled, and apply it. If it is settled while we have trained a part of it,
        that part goes to the feedback, so the next round begins with the others."""
        part = self._part()
        if part is None and self.losses and not self.session.carried:
            self._roll_back()
        self.checkpoint.protect()
        settled = self.session.settle(part)
        self.measured.seconds["apply_seconds"] += settled.apply_seconds
        if settled.returned:
            self.measured.take_back(settled.returned)
        if settled.round != round_number:  # a jump may have forgotten starts
            self.checkpoint.keep_starts(self.session.starts)
        self.losses, self.params, self.facts = [], None, settled.facts
        return settled.round

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
        watching = self.session.watching
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
            if h < steps and watching and agree(self.control, self.session.overtaken()):
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
            raise Parted(
                f"stopped in round {self.session.round}, after {len(self.losses)} of its {steps} inner steps"
            )
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
            first = Place(self.session.round).number(self.recipe.outer.inner_steps)
            saved = any(number >= first for number in self.checkpoint.numbers())
            if not all_true(self.control, saved):
                raise DiskFull(self.checkpoint.short or "another process of this replica could not save")
            self.checkpoint.drop(lambda number: number < first)
            self.session.unsaved = False
        self.checkpoint.keep_starts([*self.session.starts, self.session.incarnation])

    def finish(self) -> None:
        """Finish the background work after the last round."""
        self.session.finish(self.measured.pop(self.status))
        self.checkpoint.finish()

    # A round that is not finished

    def _part(self) -> dict[str, Tensor] | None:
        """The weights of a round that we have trained in part and not delivered; None if there is none, or if
        it must be rolled back because they are not finite."""
        if not self.losses or self.session.carried:
            return None
        self.status.loss = float(doubles(self.losses).mean())
        if not self._is_finite():
            return None
        return self._as_sent(self.replica.named_parameters() if self.params is None else self.params)

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
            if place.round < self.session.round - place.carried:
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
        sent = pending.measured.get(INNER_STEPS, [0])[0] if pending else 0
        return Place(
            self.session.round,
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
        return {**self.session.save().files, "optimiser": self.replica.state()}

    def save_now(self) -> bool:
        """Save to disk, so that the next start continues from here; False if there is no room."""
        if self.params is not None:  # it was restored and not changed: it is on disk
            return True
        return self.checkpoint.save_now(self.place(), self.files())

    def resume(self) -> int:
        """Restore the state on this disk, or join from the bucket; return how many rounds are done."""
        saved = self.checkpoint.newest(self.control, self.state_files(), self.replica.named_parameters())
        if saved is None:
            self.checkpoint.keep_starts([])
            self.session.restore(None)
            return self.session.round - 1
        self.restore(saved.place, saved.files)
        at = f"after {saved.place.num_steps} of its inner steps" if saved.place.num_steps else "at its start"
        self.log(f"back in round {saved.place.round}, {at}")
        state = State(saved.place.round, saved.files, saved.place.carried, saved.starts)
        part = None if state.carried else self._part()
        self.session.restore(state, part)
        if self.session.round != state.round:
            if part is None and self.losses and not state.carried:
                self._roll_back()
            self.losses, self.params = [], None
        self.checkpoint.keep_starts(self.session.starts)
        return self.session.round - 1

    def restore(self, place: Place, files: Files) -> None:
        """Restore everything; the session then finds its place in the run."""
        self.outer.restore(files)
        self.losses, self.step_count = list(place.losses), place.step_count
        self.measured.fresh_steps = place.fresh_steps
        self.replica.restore(files["optimiser"], place.step_count)
        self.status.restore(place.told)
        self.params = None
        if PARAMS in files:
            self.params = {name: p.to(self.device) for name, p in files[PARAMS].items()}


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
