"""Drives the stages it is given, all of them or one, through the schedule."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
from isthmus.replica.links import Part, StageEnd, local_pair
from isthmus.replica.stage import Stage

# What the stages tell each other at the end of an inner step: squared gradient norm, loss, the slowest
# stage's seconds per micro-batch, the slowest link's seconds there and back, and for how long the sender held
# micro-batch 0.
CONTROL = (Part("control", (5,), torch.float64),)
FIRST_LOOK, LOOK_EVERY = 3, 20  # inner steps until depths are chosen from measured times, and then again
FORWARD_SHARE = 1 / 3  # of a micro-batch's compute
SLACK = 1.15  # on measured round trips: a link that jitters finds no room in an exact fit


class PipelinedReplica:
    """The stages of one replica that live in this process: one of them, or all, joined by local links.

    The schedule decides only when a stage does what: every stage runs its backwards in the order of the
    micro-batches, so the weights do not depend on it. Once they are all done, shares of the norm and the loss
    run down the links to stage 0, right behind the last gradients, and the totals back up, ahead of the next
    step's first activations: agreeing on the norm costs the pipeline no round trip of its own.
    """

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        stages: Sequence[Stage],
        links: Sequence[tuple[StageEnd | None, StageEnd | None]],
        batches: Batches | None = None,
        *,
        schedule: str = "auto",
        round_patience_seconds: float = 1800.0,
    ) -> None:
        """links: for each stage its ends to the one before and the one after. batches: where stage 0 is here.

        `schedule` is "auto" (depths from measured times), "1f1b" or "gpipe"; all keep to the recipe's
        inner.in_flight. Between rounds a neighbour may be silent for round_patience_seconds.
        """
        self.recipe, self.member, self.stages, self.links = recipe, member, tuple(stages), tuple(links)
        self.batches, self.limit = batches, recipe.inner.in_flight
        self.round_patience_seconds = round_patience_seconds
        self.num_stages, self.num_micro_batches = member.config.stages, recipe.inner.micro_batches
        if schedule not in ("auto", "1f1b", "gpipe"):
            raise ConfigError(f'schedule is "{schedule}"; it is one of auto, 1f1b, gpipe')
        if self.stages[0].first and batches is None:
            raise ValueError("stage 0 reads the batches; none were given")
        self.automatic = schedule == "auto"
        fixed = {"1f1b": one_f_one_b, "gpipe": gpipe}.get(schedule)
        if fixed:
            self.schedule = limited(fixed(self.num_stages, self.num_micro_batches), self.limit)
        else:
            self.schedule = self._first_guess()
        self.patience: float | None = None  # the links' own, except in a round's first inner step
        self.grad_norm = math.nan
        self.seconds: dict[
            str, float
        ] = {}  # of the slowest stage and the slowest link, at the last inner step
        self.seen: list[tuple[float, float]] = []
        self.chosen_for = math.inf  # the link's round trip over a micro-batch's compute
        self.num_steps = 0
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
        """All the stages here, with local links between them."""
        num_stages = member.config.stages
        stages = [Stage(recipe, member, s, device=device, precision=precision) for s in range(num_stages)]
        pairs = [local_pair() for _ in range(num_stages - 1)]
        before = [None, *(late for _, late in pairs)]
        after = [*(early for early, _ in pairs), None]
        links = list(zip(before, after, strict=True))
        return cls(recipe, member, stages, links, batches, schedule=schedule)

    def _first_guess(self) -> Schedule:
        """The recipe's figures, until there are measured ones."""
        config, model, m = self.member.config, self.recipe.model, self.num_micro_batches
        link_seconds = self._link_seconds()
        tokens = self.recipe.inner.batch // m * model.context
        flops = 6 * model.num_parameters / self.num_stages * tokens
        # Where the machines' rate is not known: a link as slow as compute, the slowest that can be hidden.
        t_seconds = flops / (config.tflops * 1e12) if config.tflops else link_seconds
        latency = config.link.latency_ms / 1e3
        return self._deep(t_seconds, link_seconds + latency)

    def _link_seconds(self) -> float:
        """One micro-batch forward at the rate that the recipe states."""
        frame_bytes = sum(part.num_bytes for part in self.stages[0].frames()[0])
        return frame_bytes * 8 / (self.member.config.link.mbps * 1e6)

    def _deep(self, t_seconds: float, one_way_seconds: float, slack: float = 1.0) -> Schedule:
        s, m = self.num_stages, self.num_micro_batches
        # A round trip does not say what of it is rate and what latency: the recipe states a rate.
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
        self.patience = self.round_patience_seconds

    def inner_step(self, inner_step: int) -> Tensor:
        """One InnerOpt update of the whole replica (eq. 1); its loss, the same at every stage."""
        self._follow_round(inner_step // self.recipe.outer.inner_steps + 1)
        runs = [_Run(stage, *ends) for stage, ends in zip(self.stages, self.links, strict=True)]
        for run in runs:
            run.begin(self.depths, self.num_micro_batches, self.patience)
        if self.stages[0].first:
            tokens = self.batches.at(self.member.index, inner_step).to(self.stages[0].device)
            runs[0].micro_batches = tokens.chunk(self.num_micro_batches)  # each (B, L + 1)
        self._execute(runs)
        totals = self._agree(runs)
        square, loss, compute, trip = totals[:4].tolist()
        for run in runs:
            by_replica = self.recipe.inner.clip_scope == "replica"
            run.stage.opt.follow(inner_step)
            run.stage.step(square if by_replica else run.square)
        self.patience = None
        self.grad_norm = math.sqrt(square) if square >= 0 else math.nan
        self.seconds = {"compute": compute, "there_and_back": trip}
        self._look(compute, trip)
        return torch.tensor(loss, dtype=torch.float64)

    def _follow_round(self, round_number: int) -> None:
        """Where finishing begins, frames grow to the whole stream: depths are measured and chosen anew."""
        if any([stage.follow_round(round_number) for stage in self.stages]):
            self.num_steps, self.seen, self.chosen_for = 0, [], math.inf

    def _execute(self, runs: Sequence["_Run"]) -> None:
        """Every stage's actions in its order; stages of one process take turns as their input comes."""
        left = [list(reversed(self.schedule[run.stage.index])) for run in runs]
        while any(left):
            moved = False
            for run, actions in zip(runs, left, strict=True):
                while actions and run.ready(actions[-1]):
                    run.act(actions.pop())
                    moved = True
            if not moved:
                raise RuntimeError(f"replica {self.member.name}: its schedule stopped")

    def _agree(self, runs: Sequence["_Run"]) -> Tensor:
        """Shares down to stage 0, totals back up: the same bits at every stage."""
        for run in reversed(runs):
            run.tell_share()
        for run in runs:
            run.tell_totals()
        return runs[0].totals

    def _look(self, compute: float, trip: float) -> None:
        """Choose the depths from agreed times, so that all stages choose alike."""
        self.num_steps += 1
        if not self.automatic or self.num_steps == 1:  # the first step also pays for warming up
            return
        self.seen.append((compute, trip))
        if self.num_steps == FIRST_LOOK or len(self.seen) == LOOK_EVERY:
            # A measured round trip is never too short: the smallest is the nearest.
            compute = sum(seconds for seconds, _ in self.seen) / len(self.seen)
            trip = max(1e-6, min(seconds for _, seconds in self.seen))
            # Deeper queues make round trips look longer, so only a real change is followed.
            if not 0.5 < (trip / compute) / self.chosen_for < 2:
                self.chosen_for = trip / compute
                self.schedule = self._deep(compute, trip / 2, SLACK)
            self.seen = []

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

    def close(self) -> None:
        for end in (end for ends in self.links for end in ends if end):
            end.close()


class _Run:
    """One stage through one inner step: its actions, its clock, its share of what all have to know."""

    def __init__(self, stage: Stage, before: StageEnd | None, after: StageEnd | None) -> None:
        self.stage, self.before, self.after = stage, before, after
        self.micro_batches: Sequence[Tensor] = ()
        self.loss = torch.zeros((), dtype=torch.float64, device=stage.device)
        self.compute_seconds = 0.0
        self.first_in = self.first_out = self.first_back = 0.0  # micro-batch 0: came, went forward, came back
        self.held_seconds = 0.0  # between its coming from the stage before and its going back there

    def begin(self, depths: Sequence[int], num_micro_batches: int, patience: float | None) -> None:
        """Post what will come. A neighbour's frames that we have not taken are at most its depth or ours."""
        self.num_micro_batches, self.patience = num_micro_batches, patience
        self.stage.begin_step()
        forth, back = self.stage.frames()
        s = self.stage.index
        if self.before:
            self.before.expect([forth] * num_micro_batches + [CONTROL], depths[s - 1])
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
            self.stage.backward_weight(action.micro_batch)
            self.compute_seconds += time.perf_counter() - started

    def _forward(self, i: int) -> None:
        z_in, tokens = (None, self.micro_batches[i]) if not self.before else self.before.take(self.patience)
        started = time.perf_counter()
        out = self.stage.forward(i, tokens.long(), z_in)
        if self.after:
            ids = tokens.to(self.stage.frames()[0][1].dtype)
            sent = time.perf_counter()
            self.after.send({"activations": out, "tokens": ids})
        else:
            self.loss += out
            sent = time.perf_counter()
        if i == 0:
            self.first_in, self.first_out = started, sent
        self.compute_seconds += time.perf_counter() - started

    def _backward(self, i: int, whole: bool) -> None:
        (grad,) = self.after.take(self.patience) if self.after else (None,)
        started = time.perf_counter()
        if i == 0:
            self.first_back = started
        back = self.stage.backward(i, grad) if whole else self.stage.backward_input(i, grad)
        if self.before:
            self.before.send({"gradients": back})
        if i == 0:
            self.held_seconds = time.perf_counter() - self.first_in
        self.compute_seconds += time.perf_counter() - started

    def tell_share(self) -> None:
        """This stage's share, joined to those of the stages after it, for the one before it."""
        self.square = self.stage.squared_norm()
        compute = self.compute_seconds / self.num_micro_batches
        share = torch.tensor(
            [self.square, self.loss.item(), compute, 0.0, self.held_seconds], dtype=torch.float64
        )
        if self.after:
            later = self.after.take(self.patience)[0].cpu()
            trip = self.first_back - self.first_out - later[4].item()
            share[:2] += later[:2]
            share[2] = max(compute, later[2].item())
            share[3] = max(trip, later[3].item())
        self.totals = share
        if self.before:
            self.before.send({"control": share})

    def tell_totals(self) -> None:
        if self.before:
            self.totals = self.before.take(self.patience)[0].cpu()
        if self.after:
            self.after.send({"control": self.totals})
