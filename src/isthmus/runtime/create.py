"""A new run in a bucket, and what a machine checks before it takes part in one."""

import contextlib
import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.data.corpus import open_corpus
from isthmus.errors import ConfigError
from isthmus.layout.traffic import shards
from isthmus.model.digest import anchor_digest, shard_digest
from isthmus.model.initial import checked_first
from isthmus.planner.auto import resolve
from isthmus.protocol.ledger import Ledger, RunInfo, create_run
from isthmus.protocol.trust import Signer, new_secret, save_secret
from isthmus.simulator.run import checked_corpus
from isthmus.store.objects import open_store

GONE = ("left", "finished")


def create(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    closers: Sequence[str] | None = None,
    first: Mapping[str, Tensor] | None = None,
) -> RunInfo:
    """run.json in the bucket and one private key per replica on this disk.

    Where the recipe starts from a folder (`first`: its weights, read already), theta^(0) goes into the bucket
    and its digest into run.json: who joins needs no folder, and cannot start from other weights.
    """
    recipe, _ = resolve(recipe)  # everybody who joins must find the same k/d
    check_trainable(recipe)
    names = [member.name for member in recipe.fleet()]
    for name in closers or ():
        if name not in names:
            raise ConfigError(f'closer "{name}" is no replica of this recipe; there is {", ".join(names)}')
    if keys_dir.exists() and any(keys_dir.iterdir()):
        raise ConfigError(f"{keys_dir} already holds keys; give --keys another folder")
    try:
        text = open_corpus(recipe.data.corpus)
    except ConfigError:  # the text need not be where `init` runs
        text = None
    first = first or checked_first(recipe, text)
    store = open_store(url)
    store.probe()
    secrets = {name: new_secret() for name in names}
    public = {name: Signer(name, secret).public_key for name, secret in secrets.items()}
    # Full replicas step in first: they read every payload anyway, so checking it costs them nothing.
    by_need = sorted(recipe.fleet(), key=lambda member: member.config.stages > 1)
    closers = closers or [member.name for member in by_need]
    start = _digests(recipe, first) if first else []
    run = create_run(
        store, recipe, public, closers, text.sha256 if text else "", anchor_digest(start) if start else ""
    )
    for name, secret in secrets.items():
        save_secret(keys_dir / f"{name}.key", secret)
    if first:
        ledger = Ledger(store, run, Signer(closers[0], secrets[closers[0]]))
        held = _wide(recipe, first)
        files = [
            ledger.put_anchor_shard(0, i, {name: held[name] for name in names})
            for i, names in enumerate(ledger.shards)
        ]
        ledger.complete_anchor(0, run.start, files)
    return run


def _wide(recipe: Recipe, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As replicas hold their anchor."""
    wide = torch.float64 if recipe.inner.precision == "fp64" else torch.float32
    return {name: tensor.to(wide) for name, tensor in params.items()}


def _digests(recipe: Recipe, params: Mapping[str, Tensor]) -> list[str]:
    held = _wide(recipe, params)
    return [shard_digest(held, names) for names in shards(recipe)]


def check_start(ledger: Ledger) -> None:
    """A run that starts from a folder has theta^(0) in its bucket, unless its `init` was cut short."""
    if ledger.run.start and 0 not in ledger.anchor_rounds():
        raise ConfigError(
            "theta^(0) of this run is not in its bucket: its `isthmus init` was cut short; init again at "
            "another URL"
        )


def check_trainable(recipe: Recipe) -> None:
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages every step; a fleet needs sparseloco or diloco')
    if recipe.subspace.grassmann_every:
        raise ConfigError("subspace.grassmann_every is for the simulator only; set 0")
    if recipe.model.start and not recipe.subspace.adaptation:
        raise ConfigError("model.start with subspace.adaptation = false is for the simulator only")


def check_corpus(run: RunInfo) -> None:
    """This machine's text is the run's: fit for the model, and the same as everybody's."""
    corpus = checked_corpus(run.recipe)
    if run.corpus and corpus.sha256 != run.corpus:
        raise ConfigError(
            f"the corpus {run.recipe.data.corpus} here is not the one this run began with; copy that one, or "
            "prepare it again from the same files with the same options"
        )


def check_not_taken(ledger: Ledger, replica: str, work: Path | None = None) -> None:
    """A name belongs to one machine at a time; by the store's clock, not by ours.

    After a crash the same command may be typed at once: the last heartbeat is then that of the incarnation
    that `work` remembers, and the lock there tells whether it still runs.
    """
    beat = ledger.heartbeat(replica)
    if beat is None or beat[0].get("state") in GONE:
        return
    with contextlib.suppress(OSError):
        if work and not held(work) and (work / "incarnation").read_text() == beat[0].get("incarnation"):
            return
    # Not under the replica's own clock, whose age tells its closer how long it was away.
    age = ledger.store.now(f"members/{replica}/probe/clock") - beat[1]
    if age < 5 * ledger.run.recipe.bucket.heartbeat_seconds:
        raise ConfigError(
            f"replica {replica} is live in this run (heartbeat {max(age, 0):.0f} s ago); stop it first, or "
            "join as another replica"
        )


def held(work: Path) -> bool:
    """Does a launcher run in this folder?"""
    for path in work.glob("launcher*.lock"):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    return False
