"""One full replica of a run, brought up again and again on the same private state, in this process."""

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from small_recipes import recipe_text, replicas

from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import Corpus, open_corpus
from isthmus.data.tokens import Batches
from isthmus.layout.deal import Deal
from isthmus.outer.rounds import run_rounds
from isthmus.protocol.access import open_as
from isthmus.protocol.patience import Patience
from isthmus.replica.control_group import SingleProcess
from isthmus.replica.full import FullReplica
from isthmus.runtime.create import create
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import Store, open_store

LATE = {"quorum": 1, "deadline_seconds": 0.01}


def small(rounds: int = 5, full: int = 2, more: str = "", precision: str = "fp64", **bucket: float) -> Recipe:
    """`full` full replicas and `more` of them; `bucket` is what [bucket] says beside its usual two keys."""
    text = recipe_text(
        replicas("rack", count=full) + more,
        model={"layers": 2},
        inner={"batch": 2, "precision": precision},
        outer={"inner_steps": 3, "rounds": rounds, "keep": 8, "values": "2bit"},
        bucket={"heartbeat_seconds": 1, "anchor_every": 2} | bucket,
    )
    return parse_recipe(text)


@functools.cache
def the_corpus(name: str) -> Corpus:
    return open_corpus(name)


class Seat:
    """One full replica of a run in a folder, brought up again and again on the same private state."""

    def __init__(self, recipe: Recipe, folder: Path, name: str, machine: str = "work") -> None:
        self.recipe, self.folder, self.name, self.machine = recipe, folder, name, machine
        self.background = False  # so that a kill is exactly where it is put
        self.incarnation = "0123456789abcdef"
        self.said: list[str] = []

    def open(self) -> Store:
        return open_store(str(self.folder / "bucket"))

    def patience(self) -> Patience:
        return Patience(self.said.append)

    def come(self, control=None) -> Trainer:
        ledger, _ = open_as(self.open(), self.name, str(self.folder / "keys" / f"{self.name}.key"))
        member = next(m for m in self.recipe.fleet() if m.name == self.name)
        corpus = the_corpus(self.recipe.data.corpus)
        inner, context = self.recipe.inner, self.recipe.model.context
        batches = Batches(corpus.train, self.recipe.seed, self.recipe.num_replicas, inner.batch, context)
        cpu = torch.device("cpu")
        replica = FullReplica(self.recipe, member, batches, device=cpu, precision=inner.precision)
        work = self.folder / self.machine / self.name
        return Trainer(
            self.recipe,
            member,
            replica,
            ledger,
            control or SingleProcess(),
            cpu,
            work,
            self.incarnation,
            self.said.append,
            save_seconds=0.0,
            background=self.background,
            patience=self.patience(),
            deal=partial(self.deal, batches),
        )

    def deal(self, batches: Batches, share: Deal) -> None:
        batches.deal(share)

    def run(self, until: int, before: Callable[[Trainer], None] = lambda fleet: None) -> Trainer:
        fleet = self.come()
        before(fleet)
        rounds = range(fleet.resume() + 1, until + 1)
        run_rounds(fleet, rounds, lambda h: None, lambda t, seconds: None)
        fleet.finish()
        return fleet

    def anchors(self) -> dict[int, set[str]]:
        """Round -> every digest that was ever said of it."""
        said: dict[int, set[str]] = {}
        for line in self.said:
            if found := re.fullmatch(r"round (\d+): anchor (\w+)", line):
                said.setdefault(int(found[1]), set()).add(found[2])
        return said


def seat(recipe: Recipe, folder: Path, name: str = "rack") -> Seat:
    if not (folder / "bucket").exists():
        create(recipe, str(folder / "bucket"), folder / "keys")
    return Seat(recipe, folder, name)
