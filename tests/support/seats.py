"""Rounds through a real bucket in one process: the full replicas of a recipe take turns."""

import os
from pathlib import Path

import torch

from isthmus.config import Recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.protocol import closer
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import load_signer
from isthmus.replica.control_group import SingleProcess
from isthmus.replica.full import FullReplica
from isthmus.runtime.create import create
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store


def rounds_in_a_bucket(recipe: Recipe, folder: Path, settle: int) -> list[float]:
    """Settle rounds 1 to `settle` without the pipelined replicas; the mean training loss of each."""
    create(recipe, str(folder / "bucket"), folder / "keys")
    seats = [take_seat(recipe, folder, member) for member in recipe.fleet() if member.config.kind == "full"]
    for fleet in seats:
        fleet.resume()
        fleet.session.heart.beat()
    before, closer.STEP_IN_SECONDS = closer.STEP_IN_SECONDS, 0.0
    losses = []
    try:
        for t in range(1, settle + 1):
            for fleet in seats:
                assert fleet.begin(t)
                fleet.train_round(t, lambda h: None)
            losses.append(sum(fleet.status.loss for fleet in seats) / len(seats))
            for fleet in seats:
                fleet.settle(t)
    finally:
        closer.STEP_IN_SECONDS = before
    return losses


def take_seat(recipe: Recipe, folder: Path, member) -> Trainer:
    store = open_store(str(folder / "bucket"))
    ledger = Ledger(store, read_run(store), load_signer(folder / "keys" / f"{member.name}.key", member.name))
    corpus, inner = open_corpus(recipe.data.corpus), recipe.inner
    batches = Batches(corpus.train, recipe.seed, recipe.num_replicas, inner.batch, recipe.model.context)
    cpu = torch.device("cpu")
    replica = FullReplica(recipe, member, batches, device=cpu, precision=inner.precision)
    work = folder / "work" / member.name
    control, name = SingleProcess(), os.urandom(8).hex()
    return Trainer(
        recipe,
        member,
        replica,
        ledger,
        control,
        cpu,
        work,
        name,
        lambda text: None,
        background=False,
    )
