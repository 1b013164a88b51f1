"""A new run in a bucket, and the keys of its replicas."""

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
from isthmus.runtime.checks import check_trainable
from isthmus.store.objects import open_store


def create(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    closers: Sequence[str] | None = None,
    first: Mapping[str, Tensor] | None = None,
) -> RunInfo:
    """Write run.json into the bucket and one private key per replica to this disk.

    Where the recipe starts from a folder, theta^(0) goes into the bucket and its digest into run.json: a
    machine that joins needs no folder, and cannot start from other weights. `first` has these weights where
    the caller has read them already.
    """
    recipe, _ = resolve(recipe)  # every machine that joins must find the same k/d
    check_trainable(recipe)
    names = [member.name for member in recipe.fleet()]
    for name in closers or ():
        if name not in names:
            raise ConfigError(f'closer "{name}" is not a replica of this recipe; there is {", ".join(names)}')
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
    # Full replicas come first: they read every payload anyway, so checking it costs them nothing.
    full_first = sorted(recipe.fleet(), key=lambda member: member.config.parts > 1)
    closers = closers or [member.name for member in full_first]
    anchor, digest = {}, ""
    if first:
        master_dtype = torch.float64 if recipe.inner.precision == "fp64" else torch.float32
        anchor = {name: tensor.to(master_dtype) for name, tensor in first.items()}
        digest = anchor_digest([shard_digest(anchor, names) for names in shards(recipe)])
    run = create_run(store, recipe, public, closers, text.sha256 if text else "", digest)
    for name, secret in secrets.items():
        save_secret(keys_dir / f"{name}.key", secret)
    if first:
        ledger = Ledger(store, run, Signer(closers[0], secrets[closers[0]]))
        files = [
            ledger.put_anchor_shard(0, i, {name: anchor[name] for name in names})
            for i, names in enumerate(ledger.shards)
        ]
        ledger.complete_anchor(0, run.start, files)
    return run
