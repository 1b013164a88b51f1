"""How far the norms of honest updates lie apart, and how they score: what bucket.norm_limit and score.bound
must leave alone.

    .venv/bin/python bench/norms.py --compression 1/8 1/64

A simulated mixed fleet, one JSON line for each event and compression. The largest norm of a round is given as
a multiple of the round's median, as a closer compares them (`protocol/norms.py`); the largest score is of
all updates of the round, and the one of those whom the event has struck beside it. Events, in mid-run:
`fresh`: a full and a pipelined replica come anew, with an empty optimiser and no feedback.
`missed-N`: a full and a pipelined replica miss N rounds, and what they sent returns to their feedback.
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from isthmus.config import Recipe, load_recipe
from isthmus.data.corpus import open_corpus
from isthmus.outer.exchange import Contribution
from isthmus.outer.rounds import run_rounds
from isthmus.planner.memory import SimulatorPlan
from isthmus.protocol.norms import compare_norms
from isthmus.replica.usefulness import UpdateScorer
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import Progress, SimulatedFleet
from isthmus.simulator.run import pick_device, pick_precision
from isthmus.sparse import Bundle

SMALL = ["model.width=64", "model.heads=2", "model.ffn=192", "model.context=64", "inner.batch=4"]


class Fleet(SimulatedFleet):
    """Every replica on its own, so that one can come anew; who missed a round takes its update back."""

    def __init__(self, recipe: Recipe, device: torch.device, event: str, at: int) -> None:
        plan = SimulatorPlan(1, 1, False, 0)
        corpus = open_corpus(recipe.data.corpus)
        super().__init__(recipe, corpus, device, pick_precision(recipe, device), plan, compiled=False)
        self.event, self.at = event, at
        halves = len(self.members) // 2
        self.struck = [self.members[0].name, self.members[halves].name]
        self.norms_by_round: list[dict[str, float]] = []
        self.scores_by_round: list[dict[str, float]] = []
        assert self.outer is not None
        self.judge = UpdateScorer(recipe, corpus.validation, self.outer.codec, device, self.dtype)

    def missing(self, round_number: int) -> Sequence[str]:
        kind, _, number = self.event.partition("-")
        return self.struck if kind == "missed" and 0 <= round_number - self.at < int(number) else ()

    def train_round(self, round_index: int, progress: Progress) -> list[Contribution]:
        if self.event == "fresh" and round_index + 1 == self.at:
            for stack in self.stacks:
                if stack.members[0].name in self.struck:
                    stack.restore({n: torch.zeros_like(t) for n, t in stack.state().items()}, 0)
        for stack in self.stacks:  # as real replicas do: the run's learning rate, whatever they have seen
            steps = self.recipe.outer.inner_steps
            stack.inner_step = _numbered(stack, round_index * steps)  # pyright: ignore[reportAttributeAccessIssue]
        return super().train_round(round_index, progress)

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        assert self.outer is not None
        codec, norms, scores = self.outer.codec, {}, {}
        self.judge.begin(self.anchor, round_number, hashlib.sha256(f"{round_number}".encode()).digest())
        for one, stack in zip(contributions, self.stacks, strict=True):
            parts = [codec.unpack_many(data) for data in one.shards.values()]
            squares = [p.values.double().square().sum() for part in parts for p in part.values()]
            norms[one.replica] = float(torch.stack(squares).sum().sqrt())
            whole = Bundle.of({name: payload for part in parts for name, payload in part.items()})
            scores[one.replica] = self.judge.score(whole, stack.members[0])
            if one.replica in self.missing(round_number):
                for part in parts:
                    self.outer.take_back(part, stack.row(stack.feedback, 0))
        self.norms_by_round.append(norms)
        self.scores_by_round.append(scores)
        counted = [one for one in contributions if one.replica not in self.missing(round_number)]
        super().apply(round_number, counted)


def _numbered(stack: Any, first: int) -> Any:
    step, plain = iter(range(first, first + 10**6)), type(stack).inner_step
    return lambda tokens: plain(stack, tokens, next(step))


def judged(fleet: Fleet, limit: float) -> dict[str, Any]:
    """The largest norm of each round over its median, whom a closer would refuse, and the largest scores."""
    before: dict[str, float] = {}
    spread, refused = [], []
    largest, struck = [], []
    for t, scores in enumerate(fleet.scores_by_round, 1):
        there = {name: score for name, score in scores.items() if name not in fleet.missing(t)}
        largest.append(round(max(there.values()), 4))
        struck.append(max((round(there[name], 4) for name in fleet.struck if name in there), default=None))
    for t, norms in enumerate(fleet.norms_by_round, 1):
        there = {name: norm for name, norm in norms.items() if name not in fleet.missing(t)}
        spread.append(round(max(there.values()) / statistics.median_high(there.values()), 2))
        refused += [f"{t} {name}" for name in compare_norms(there, before, limit).refused]
        before = there
    found = {"largest_over_median": spread, "refused": refused}
    return found | {"largest_score": largest, "of_the_struck": struck}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compression", nargs="+", default=["1/8", "1/64"])
    events = ["none", "fresh", "missed-1", "missed-2", "missed-4"]
    parser.add_argument("--events", nargs="+", default=events)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--at", type=int, default=6)
    parser.add_argument("--recipe", default="demo-paper")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--norms", action="store_true", help="every norm of every round too")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for compression in args.compression:
        for event in args.events:
            wanted = [f"outer.rounds={args.rounds}", f'replicas.edge.compression="{compression}"']
            recipe = load_recipe(args.recipe, [*SMALL, *wanted, *args.set])
            fleet = Fleet(recipe, pick_device(args.device), event, args.at)
            every = range(1, args.rounds + 1)
            run_rounds(fleet, LocalExchange(recipe), every, lambda h: None, lambda t, seconds: None)
            line = {"compression": compression, "event": event} | judged(fleet, recipe.bucket.norm_limit)
            line |= {"loss": round(fleet.evaluate()["loss_mixed"] or 0, 4)}
            if args.norms:
                line["norms"] = [{n: round(x, 3) for n, x in each.items()} for each in fleet.norms_by_round]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
