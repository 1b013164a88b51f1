"""A pipelined replica: its stages in this process, all of them or one, driven through the schedule."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.layout.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    deep,
    depths,
    filled_if_it_pays,
    gpipe,
    in_flight,
    limited,
    one_f_one_b,
)
from isthmus.replica.base import Wish
from isthmus.replica.clock import Clock
from isthmus.replica.links import Departure, StageEnd, TensorSpec, local_pair
from isthmus.replica.stage import Stage

# Values that stages exchange at the end of an inner step: squared gradient norm, loss, the slowest stage's
# seconds per micro-batch, the slowest link's round trip, the time between micro-batch 0's arrival at the
# sender and its gradient's departure, and the largest `Wish`.
CONTROL = (TensorSpec("control", (6,), torch.float64),)
FIRST_LOOK, LOOK_EVERY = 3, 20  # inner steps until depths are first chosen from measured times; interval
FORWARD_SHARE = 1 / 3  # of a micro-batch's compute
SLACK = 1.15  # on measured round trips: an exact fit leaves no room for jitter


class PipelinedReplica:
    """The stages of one replica in this process: one of them, or all, joined by local links.

    The schedule decides only the order of a stage's actions. Every stage runs its backwards in the order of
    the micro-batches, so the weights do not depend on the schedule. After the last backward, shares of the
    norm and the loss travel down the links to stage 0, right behind the last gradients. The totals travel
    back up, ahead of the next step's first activations. So agreeing on the norm costs no extra round trip.
    """

    wish_delay = 1

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        stages: Sequence[Stage],
        links: Sequence[tuple[StageEnd | None, StageEnd | None]],
        batches: Batches | None = None,
        *,
        schedule: str = "auto",
        round_timeout_seconds: float = 1800.0,
    ) -> None:
        """`links` are each stage's ends to the stage before and the stage after. Stage 0 needs `batches`.

        `schedule` is "auto" (depths from measured times), "1f1b" or "gpipe"; all respect the recipe's
        inner.in_flight. Between rounds a neighbour may be silent for round_timeout_seconds.
        """
        self.recipe, self.member, self.stages, self.links = recipe, member, tuple(stages), tuple(links)
        self.batches, self.limit = batches, recipe.inner.in_flight
        self.round_timeout_seconds = round_timeout_seconds
        self.clock = Clock(self.stages[0].device)
        self.num_stages = member.config.stages
        self.num_micro_batches = recipe.micro_batches_of(member.config)
        if schedule not in ("auto", "1f1b", "gpipe"):
            raise ConfigError(f'schedule is "{schedule}"; it is one of auto, 1f1b, gpipe')
        if self.stages[0].first and batches is None:
            raise ValueError("stage 0 reads the batches, and none were given")
        self.automatic = schedule == "auto"
        fixed = {"1f1b": one_f_one_b, "gpipe": gpipe}.get(schedule)
        if fixed:
            self.schedule = limited(fixed(self.num_stages, self.num_micro_batches), self.limit)
        else:
            self.schedule = self._first_guess()
        self.timeout_seconds: float | None = None  # the links' own, except in a round's first inner step
        self.grad_norm = math.nan
        self.round_trip_seconds = 0.0
        self.measured: list[tuple[float, float]] = []  # a micro-batch's compute, the slowest round trip
        self.chosen_for = math.inf  # round trip / compute for which the depths were chosen
        self.num_steps = 0
        self.wish = self.agreed = Wish.GO_ON  # of the stages here; of all stages
        self.counted: dict[str, int] = {}

    @classmethod
    def in_one_process(
        cls,
        recipe: Recipe,
        member: Member,
        batches: Batches,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        schedule: str = "1f1b",
    ) -> "PipelinedReplica":
        """Build all stages in this process, with local links between them."""
        num_stages = member.config.stages
        stages = [Stage(recipe, member, s, device=device, precision=precision) for s in range(num_stages)]
        pairs = [local_pair() for _ in range(num_stages - 1)]
        before = [None, *(late for _, late in pairs)]
        after = [*(early for early, _ in pairs), None]
        links = list(zip(before, after, strict=True))
        return cls(recipe, member, stages, links, batches, schedule=schedule)

    def _first_guess(self) -> Schedule:
        """A schedule from the recipe's figures, used until times are measured."""
        config, model, m = self.member.config, self.recipe.model, self.num_micro_batches
        link_seconds = self._link_seconds()
        tokens = self.recipe.batch_of(config) // m * model.context
        flops = 6 * model.num_parameters / self.num_stages * tokens
        # Without the machines' rate, assume a link as slow as compute: the slowest that can be hidden.
        t_seconds = flops / (config.tflops * 1e12) if config.tflops else link_seconds
        latency = config.link.latency_ms / 1e3
        return self._deep(t_seconds, link_seconds + latency)

    def _link_seconds(self) -> float:
        """The transfer time of one micro-batch's activations at the recipe's rate."""
        frame_bytes = sum(part.num_bytes for part in self.stages[0].frames()[0])
        return frame_bytes * 8 / (self.member.config.link.mbps * 1e6)

    def _deep(self, t_seconds: float, one_way_seconds: float, slack: float = 1.0) -> Schedule:
        s, m = self.num_stages, self.num_micro_batches
        # A round trip does not separate rate from latency, but the recipe states the rate.
        link_seconds = min(self._link_seconds(), one_way_seconds)
        latency = one_way_seconds * slack - link_seconds
        schedule = deep(s, m, depths(s, m, t_seconds, link_seconds, latency, self.limit))
        if self.recipe.inner.backward == "split":
            forward, latency = FORWARD_SHARE * t_seconds, one_way_seconds - link_seconds
            schedule = filled_if_it_pays(
                schedule, forward, t_seconds - forward, link_seconds, latency, self.limit
            )
        return schedule

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(in_flight(order) for order in self.schedule)

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        for stage in self.stages:
            stage.begin_round(anchor)
        self._begin()

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        for stage in self.stages:
            stage.go_on(anchor, params)
        self._begin()

    def _begin(self) -> None:
        self.timeout_seconds = self.round_timeout_seconds
        self.agreed = Wish.GO_ON

    def agree(self, wish: Wish) -> Wish:
        """Record a wish. It travels with the next inner step's norms; then all stages act on it."""
        self.wish = wish
        return self.agreed

    def inner_step(self, inner_step: int) -> Tensor:
        """One InnerOpt update of the whole replica (eq. 1); its loss, the same at every stage."""
        self._open_boundaries(inner_step // self.recipe.outer.inner_steps + 1)
        runs = [
            _StageStep(stage, *ends, self.clock, self.timeout_seconds, self.wish)
            for stage, ends in zip(self.stages, self.links, strict=True)
        ]
        for run in runs:
            run.begin(self.depths, self.num_micro_batches)
        if self.batches is not None and self.stages[0].first:
            tokens = self.batches.at(self.member.index, inner_step).to(self.stages[0].device)
            runs[0].micro_batches = tokens.chunk(self.num_micro_batches)  # each (B, L + 1)
        self._execute(runs)
        totals = self._agree(runs)
        square, loss, compute, self.round_trip_seconds, _, agreed = totals.tolist()
        self.agreed = _wish_in(agreed)
        by_replica = self.recipe.inner.clip_scope == "replica"
        with self.clock:
            for run in runs:
                run.stage.step(square if by_replica else run.square, inner_step)
        self.timeout_seconds = None
        self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
        self._choose_depths(compute, self.round_trip_seconds)
        return torch.tensor(loss, dtype=torch.float64)

    def _open_boundaries(self, round_number: int) -> None:
        """When finishing begins, frames grow to the whole stream, so measure and choose depths again."""
        if any([stage.open_boundaries(round_number) for stage in self.stages]):
            self.num_steps, self.measured, self.chosen_for = 0, [], math.inf

    def _execute(self, runs: Sequence["_StageStep"]) -> None:
        """Run each stage's actions in order; stages in one process take turns as their input arrives."""
        left = [list(reversed(self.schedule[run.stage.index])) for run in runs]
        while any(left):
            moved = False
            for run, actions in zip(runs, left, strict=True):
                while actions and run.ready(actions[-1]):
                    run.act(actions.pop())
                    moved = True
            if not moved:
                raise RuntimeError(f"replica {self.member.name}: no stage can run its next action")

    def _agree(self, runs: Sequence["_StageStep"]) -> Tensor:
        """Send shares down to stage 0 and totals back up: the same bits at every stage."""
        for run in reversed(runs):
            run.send_share()
        for run in runs:
            run.send_totals()
        return runs[0].totals

    def _choose_depths(self, compute: float, round_trip: float) -> None:
        """Choose the depths from agreed times, so that all stages choose the same."""
        self.num_steps += 1
        if not self.automatic or self.num_steps == 1:  # the first step includes the warm-up
            return
        self.measured.append((compute, round_trip))
        if self.num_steps == FIRST_LOOK or len(self.measured) == LOOK_EVERY:
            # A measured round trip is never too short, so the smallest one is the best.
            compute = sum(seconds for seconds, _ in self.measured) / len(self.measured)
            round_trip = max(1e-6, min(seconds for _, seconds in self.measured))
            # Deeper queues make round trips look longer, so a small change is ignored.
            if not 0.5 < (round_trip / compute) / self.chosen_for < 2:
                self.chosen_for = round_trip / compute
                self.schedule = self._deep(compute, round_trip / 2, SLACK)
            self.measured = []

    def named_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for stage in self.stages for name, p in stage.params.items()}

    def state(self) -> dict[str, Tensor]:
        return {name: t for stage in self.stages for name, t in stage.opt.state().items()}

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        with torch.no_grad():
            for stage in self.stages:
                stage.opt.restore(state, step_count)

    def pop_counts(self) -> dict[str, int]:
        """Bytes sent from the stages here since the last call, by purpose."""
        total: dict[str, int] = {}
        for end in (end for ends in self.links for end in ends if end):
            for purpose, count in end.counts.items():
                total[purpose] = total.get(purpose, 0) + count
        since = {purpose: count - self.counted.get(purpose, 0) for purpose, count in total.items()}
        self.counted = total
        return since

    def pop_outside(self) -> int | None:
        found = [count for stage in self.stages if (count := stage.pop_outside()) is not None]
        return sum(found) if found else None

    def close(self) -> None:
        for end in (end for ends in self.links for end in ends if end):
            end.close()


def _wish_in(number: float) -> Wish:
    """Parse a neighbour's wish; an invalid one must neither save nor stop."""
    return Wish(int(number)) if number in (Wish.SAVE, Wish.STOP) else Wish.GO_ON


class _StageStep:
    """One inner step of one stage: its actions, their times, its share of norm and loss."""

    def __init__(
        self,
        stage: Stage,
        before: StageEnd | None,
        after: StageEnd | None,
        clock: Clock,
        timeout_seconds: float | None,
        wish: Wish,
    ) -> None:
        self.stage, self.before, self.after = stage, before, after
        self.clock, self.timeout_seconds, self.wish = clock, timeout_seconds, wish
        self.micro_batches: Sequence[Tensor] = ()
        self.loss = torch.zeros((), dtype=gpu.wide(stage.device), device=stage.device)
        self.compute_seconds = 0.0  # including packing and sending, which the clock leaves out
        # For micro-batch 0: when its activations arrived and left, when its gradient arrived and left.
        self.arrived = self.returned = 0.0
        self.left, self.went_back = Departure(), Departure()

    def begin(self, depths: Sequence[int], num_micro_batches: int) -> None:
        """Post the receives. A neighbour is ahead of us by at most its depth or ours."""
        self.num_micro_batches = num_micro_batches
        self.stage.begin_step()
        forward, back = self.stage.frames()
        s = self.stage.index
        if self.before:
            self.before.expect([forward] * num_micro_batches + [CONTROL], depths[s - 1])
        if self.after:
            self.after.expect([back] * num_micro_batches + [CONTROL], depths[s])

    def ready(self, action: Action) -> bool:
        if isinstance(action, BackwardWeight):
            return True
        end = self.before if isinstance(action, Forward) else self.after
        return end is None or end.ready()

    def act(self, action: Action) -> None:
        if isinstance(action, Forward):
            self._forward(action.micro_batch)
        elif isinstance(action, Backward | BackwardInput):
            self._backward(action.micro_batch, whole=isinstance(action, Backward))
        else:
            started = time.perf_counter()
            with self.clock:
                self.stage.backward_weight(action.micro_batch)
            self.compute_seconds += time.perf_counter() - started

    def _forward(self, i: int) -> None:
        if self.before:
            z_in, tokens = self.before.receive(self.timeout_seconds)
        else:
            z_in, tokens = None, self.micro_batches[i]
        started = time.perf_counter()
        with self.clock:
            out = self.stage.forward(i, tokens.long(), z_in)
        left = Departure()
        if self.after:
            ids = tokens.to(self.stage.frames()[0][1].dtype)
            left = self.after.send({"activations": out, "tokens": ids})
        else:
            self.loss += out
        if i == 0:
            self.arrived, self.left = started, left
        self.compute_seconds += time.perf_counter() - started

    def _backward(self, i: int, whole: bool) -> None:
        (grad,) = self.after.receive(self.timeout_seconds) if self.after else (None,)
        started = time.perf_counter()
        with self.clock:
            back = self.stage.backward(i, grad) if whole else self.stage.backward_input(i, grad)
        went_back = Departure()
        if self.before:
            assert back is not None
            went_back = self.before.send({"gradients": back})
        if i == 0:
            self.returned, self.went_back = started, went_back
        self.compute_seconds += time.perf_counter() - started

    def send_share(self) -> None:
        """Add this stage's share to those of the later stages; send the sum to the previous stage."""
        with self.clock:
            square = self.stage.squared_norm()
        sides = list(self.stage.sound)
        sound = [self.stage.sound[side].all().to(self.loss.dtype) for side in sides]
        self.square, loss, *sound = torch.stack(
            [square.to(self.loss.dtype).view(()), self.loss, *sound]
        ).tolist()  # wait for the device once
        for side, fine in zip(sides, sound, strict=True):
            if not fine:
                raise self.stage.refusal(side, "a number that is not finite, or a code outside the wire's")
        # On a GPU the host only launches the work, so the clock has the duration.
        seconds = self.clock.lap() if self.clock.on_cuda else self.compute_seconds
        compute = seconds / self.num_micro_batches
        # How long micro-batch 0 was here, from its arrival to its gradient's return.
        stay = (self.went_back.at or time.perf_counter()) - self.arrived
        share = torch.tensor([self.square, loss, compute, 0.0, stay, float(self.wish)], dtype=torch.float64)
        if self.after:
            later = self.after.receive(self.timeout_seconds)[0].cpu()
            round_trip = self.returned - self.left.at - later[4].item()
            share[:2] += later[:2]
            share[2] = max(compute, later[2].item())
            share[3] = max(round_trip, later[3].item())
            share[5] = max(float(self.wish), later[5].item())
        self.totals = share
        if self.before:
            self.before.send({"control": share})

    def send_totals(self) -> None:
        if self.before:
            self.totals = self.before.receive(self.timeout_seconds)[0].cpu()
        if self.after:
            self.after.send({"control": self.totals})
