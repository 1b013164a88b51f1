"""Create a new run in a bucket, and the keys of its replicas."""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.config.checks import object_name
from isthmus.data.corpus import open_corpus
from isthmus.data.fingerprint import check_text
from isthmus.errors import ConfigError
from isthmus.files import sync_folder
from isthmus.layout.traffic import shards
from isthmus.model.digest import anchor_digest, shard_digest
from isthmus.model.initial import checked_first
from isthmus.planner.auto import resolve
from isthmus.protocol.access import OWNER_KEY, check_key, check_owner
from isthmus.protocol.cut import cut_by_size
from isthmus.protocol.documents import Tensor as NamedTensor
from isthmus.protocol.ledger import Ledger, RunInfo, create_run, parse_run, read_run, run_document
from isthmus.protocol.trust import OWNER, Signer, new_secret, save_secret
from isthmus.replica.picks import with_pin
from isthmus.runtime.preflight import check_trainable
from isthmus.store import Store, StoreError
from isthmus.store.objects import open_store
from isthmus.store.url import is_url, parse_url

HandOut = Callable[[RunInfo, Path, Mapping[str, bytes]], None]  # (run, key folder, replica -> its key)
DEFAULT_CLOSERS = 2  # one may be away; each further closer is one more to trust


def create(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    closers: Sequence[str] | None = None,
    first: Mapping[str, Tensor] | None = None,
    room: Sequence[int] = (),
    hand_out: HandOut | None = None,
) -> RunInfo:
    """Write run.json to the bucket, and one private key per replica and the owner's to this disk.

    If the recipe starts from a folder, theta^(0) goes into the bucket and its digest into run.json: a machine
    that joins needs no folder, and cannot start from other weights. `first` holds these weights if the caller
    has read them already. `room`: numbers of stages that later replicas may have. `hand_out` writes more
    files next to the keys.

    run.json comes last and makes the run. A kill before it leaves no run. After it everything is there except
    the name of the keys' folder, which the next `init` sets.
    """
    recipe, _ = resolve(recipe, room=room)  # every machine that joins must find the same k/d
    check_trainable(recipe)
    for stages in room:
        if not 2 <= stages <= recipe.model.layers:
            raise ConfigError(f"--room is for {stages} stages; this model has {recipe.model.layers} layers")
    _check_names(recipe, keys_dir, closers)
    try:
        text = open_corpus(recipe.data.corpus)
    except ConfigError:  # `init` need not run where the folder is
        if is_url(recipe.data.corpus):
            raise
        text = None
    if text and not is_url(recipe.data.corpus):  # a machine that fetches a text compares it
        check_text(text, recipe.data.corpus)
    recipe = with_pin(recipe, text) if text else recipe
    anchor = {}
    if first := first or checked_first(recipe, text):
        master_dtype = torch.float64 if recipe.inner.precision == "fp64" else torch.float32
        anchor = {name: tensor.to(master_dtype) for name, tensor in first.items()}
    corpus = text.sha256 if text else ""
    return _put(
        recipe, url, keys_dir, closers, anchor, shards(recipe, room), hand_out, corpus=corpus, room=room
    )


def create_named(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    tensors: Sequence[NamedTensor],
    shard_bytes: int,
    anchor: Mapping[str, Tensor],
    frozen: str,
    hand_out: HandOut,
) -> RunInfo:
    """Like `create`, for a run of named tensors, whose first values are `anchor`. `frozen` is the digest of
    the model's other parameters."""
    _check_names(recipe, keys_dir)
    cut = cut_by_size(tensors, shard_bytes)
    stated: Any = {"tensors": tensors, "shard_bytes": shard_bytes, "frozen": frozen}
    return _put(recipe, url, keys_dir, None, anchor, cut, hand_out, **stated)


def _check_names(recipe: Recipe, keys_dir: Path, closers: Sequence[str] | None = None) -> None:
    names = [member.name for member in recipe.fleet()]
    for name in names:
        object_name("replica", name)
    for name in closers or ():
        if name not in names:
            raise ConfigError(f'closer "{name}" is not a replica of this recipe; there is {", ".join(names)}')
    if keys_dir.exists() and any(keys_dir.iterdir()):
        raise ConfigError(f"{keys_dir} already holds keys; give --keys another folder")


def _put(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    closers: Sequence[str] | None,
    anchor: Mapping[str, Tensor],
    cut: Sequence[Sequence[str]],
    hand_out: HandOut | None,
    **stated: Any,
) -> RunInfo:
    """Write the keys, theta^(0) if it cannot be drawn, and run.json; `stated` as in `run_document`."""
    store = empty_store(url)
    if found := _unfinished(store, keys_dir):
        return found
    secrets = {member.name: new_secret() for member in recipe.fleet()}
    signers = {name: Signer(name, secret) for name, secret in secrets.items()}
    public = {name: signer.public_key for name, signer in signers.items()}
    closers = list(closers or default_closers(recipe))
    start = anchor_digest([shard_digest(anchor, names) for names in cut]) if anchor else ""
    owner = new_secret()
    owner_key = Signer(OWNER, owner).public_key
    document = run_document(recipe, public, closers, start=start, owner=owner_key, **stated)
    run = parse_run(document)
    there = _fresh_folder(keys_dir)
    try:
        for name, secret in secrets.items():
            save_secret(there / f"{name}.key", secret, run.digest)
        save_secret(there / OWNER_KEY, owner, run.digest)
        if hand_out:
            hand_out(run, there, secrets)
        if anchor:
            _put_first(Ledger(store, run, signers[closers[0]]), anchor)
        create_run(store, document)
    except StoreError:
        raise  # run.json may exist after all: then these are its keys
    except BaseException:
        shutil.rmtree(there)
        raise
    os.rename(there, keys_dir)
    sync_folder(keys_dir.parent)
    return run


def empty_store(url: str) -> Store:
    """A store for a new run; ConfigError for a folder with other files. A run has only run.json at its
    top."""
    _, folder = parse_url(url)
    if folder is not None and folder.is_dir():
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_dir())
        others = [name for name in names if not name.startswith((".", "run.json"))]
        if others and "run.json" not in names:
            shown = ", ".join([*others[:3], *(["..."] if len(others) > 3 else [])])
            raise ConfigError(
                f"{folder} holds other files ({shown}) and no run; give a new or an empty folder"
            )
    store = open_store(url)
    store.probe()
    return store


def check_free(url: str) -> None:
    """Check, before making a run directory for it, that a run can be created there; else ConfigError."""
    if empty_store(url).head("run.json") is not None:
        raise ConfigError(f"{url} already holds a run; give bucket.url another place")


def default_closers(recipe: Recipe) -> list[str]:
    """The first two, full replicas first: they read every payload anyway, so checking costs them nothing."""
    full_first = sorted(recipe.fleet(), key=lambda member: member.config.parts > 1)
    return [member.name for member in full_first[:DEFAULT_CLOSERS]]


def _fresh_folder(keys_dir: Path) -> Path:
    keys_dir.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{keys_dir.name}.", dir=keys_dir.parent))


def _unfinished(store: Store, keys_dir: Path) -> RunInfo | None:
    """The run, with its keys, that a killed `init` with these arguments has created here."""
    if store.head("run.json") is None:
        return None
    run = read_run(store)
    for folder in sorted(keys_dir.parent.glob(f".{glob.escape(keys_dir.name)}.*")):
        with contextlib.suppress(ConfigError):
            for name in run.keys:
                check_key(run, name, folder / f"{name}.key")
            check_owner(run, folder / OWNER_KEY)
            os.rename(folder, keys_dir)
            return run
    raise ConfigError(
        f'the bucket already holds the run "{run.recipe.name}" ({run.run_id}); give another URL'
    )


def _put_first(ledger: Ledger, anchor: Mapping[str, Tensor]) -> None:
    """Upload theta^(0), signed by the first closer."""
    files = [
        ledger.put_anchor_shard(0, i, {name: anchor[name] for name in names})
        for i, names in enumerate(ledger.shards)
    ]
    ledger.complete_anchor(0, ledger.run.start, files)
