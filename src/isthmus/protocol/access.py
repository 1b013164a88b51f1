"""A run's bucket, from what a person typed, and who belongs to the run. Loads no torch."""

import os
import time
from contextlib import suppress
from pathlib import Path

from isthmus.config import Member
from isthmus.errors import ConfigError, Elsewhere
from isthmus.protocol.chain import check_pinned
from isthmus.protocol.invitations import MOST_BYTES
from isthmus.protocol.ledger import Ledger, RunInfo, read_run
from isthmus.protocol.trust import OWNER, Refused, Signer, load_signer
from isthmus.reading import is_regular, read_json
from isthmus.runlog import RunDir
from isthmus.store import Store, open_store
from isthmus.store.url import parse_url

OWNER_KEY = "run.owner.key"  # in the folder of the keys; no replica has a dot in its name


def bucket_of(run: RunDir) -> str:
    """The bucket of a run of `train`: the one that its recipe names, or the folder beside it."""
    return run.recipe.bucket.url or os.path.realpath(run.path / "bucket")


def bucket_to_read(run: RunDir, typed: str) -> str:
    """The same for who only looks: inside the run directory, or Elsewhere. The folder may be a stranger's."""
    address = bucket_of(run)
    _, folder = parse_url(address)
    if folder is None or not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run.path)):
        raise Elsewhere(typed, address)
    return address


def is_run_dir(url: str) -> bool:
    return "://" not in url and Path(url, "recipe.toml").is_file()


def open_ledger(url: str) -> Ledger:
    """The ledger in a bucket, given by its URL or by the run directory of `train`."""
    if is_run_dir(url):
        run = RunDir.open(url)
        if not run.recipe.bucket.url and not (run.path / "bucket").is_dir():
            words = f"`isthmus report {url}` tells what came of it"
            raise ConfigError(f"{url} has no bucket, as a simulated run; {words}")
        url = bucket_to_read(run, url)
    store = open_store(url, create=False)
    ledger = Ledger(store, read_run(store))
    ledger.membership.look()
    return ledger


def find_member(run: RunInfo, replica: str) -> Member:
    for member in run.recipe.fleet():
        if member.name == replica:
            return member
    names = ", ".join(member.name for member in run.recipe.fleet())
    raise ConfigError(f'there is no replica "{replica}" in this run; there is {names}')


def open_as(store: Store, replica: str, key: str = "") -> tuple[Ledger, Path]:
    """The run as one of its replicas, and the file of its key.

    The key names the run: where it does not fit, nothing in run.json is believed or used.
    """
    named = Path(key) if key else None
    ledger = Ledger(
        store, read_run(store, load_signer(named, replica) if named and named.is_file() else None)
    )
    run = ledger.membership.look().run
    path = named or Path("keys") / run.recipe.name / f"{replica}.key"
    if replica not in run.keys:
        _expect(ledger, path, replica)
    find_member(ledger.run, replica)
    if not take_up_key(ledger, path, replica):
        _check_not_replaced(ledger, path, replica)
        check_key(ledger.run, replica, path)
    return ledger, path


def _check_not_replaced(ledger: Ledger, path: Path, replica: str) -> None:
    """Not every machine of a replica may have been there when its key was replaced."""
    epoch = ledger.membership.newest
    replaced = epoch.used - set(epoch.run.keys.values())
    if path.is_file() and load_signer(path, replica).public_key in replaced:
        raise ConfigError(
            f"{path} is not the key of replica {replica} in this run any more; copy the one from the machine "
            "where `isthmus rotate` was typed"
        )


def _expect(ledger: Ledger, path: Path, replica: str) -> None:
    """Who was invited and is not admitted yet gets ready: it sees the run as it will be with it."""
    if is_regular(invited(path)):
        try:
            ledger.membership.expect(read_json(invited(path), 2 * MOST_BYTES), time.time())
        except Refused as reason:
            raise ConfigError(
                f"{replica} is not admitted: {reason}; ask the run's owner for a token"
            ) from None
    elif epoch := ledger.membership.newest.ended.get(replica):
        raise ConfigError(f"replica {replica} was revoked by the run's owner (epoch {epoch})")


def open_as_owner(url: str, key: str = "") -> tuple[Ledger, Signer]:
    """The run as its owner sees it, with the owner's key."""
    ledger = open_ledger(url)
    folder = Path(url, "keys") if is_run_dir(url) else Path("keys") / ledger.run.recipe.name
    return ledger, check_owner(ledger.run, Path(key) if key else folder / OWNER_KEY)


def next_key(path: Path) -> Path:
    """Where `isthmus rotate` puts a new key until the run has taken it up."""
    return path.with_name(path.name + ".next")


def invited(path: Path) -> Path:
    """Where `isthmus join --token` keeps invitation and request until the run has admitted it."""
    return path.with_name(path.name + ".invited")


def take_up_key(ledger: Ledger, path: Path, replica: str) -> bool:
    """Sign with the key that the run has for us now: the file's, or the one beside it, which then takes the
    file's name. False where neither is it."""
    for there in (
        path,
        next_key(path),
        path,
    ):  # another process of this replica may have renamed it meanwhile
        if not there.is_file():
            continue
        signer = load_signer(there, replica)
        if signer.public_key == ledger.run.keys.get(replica):
            ledger.sign_as(signer)
            with suppress(FileNotFoundError):
                if there != path:
                    os.replace(there, path)
            return True
    return False


def check_key(run: RunInfo, replica: str, key: Path) -> None:
    """Is this the replica's key, and is the run the one that it was made for?"""
    signer = load_signer(key, replica)
    check_pinned(run.digest, signer)
    if signer.public_key != run.keys.get(replica):
        raise ConfigError(f"{key} is not the key of replica {replica} in this run; copy the one `init` wrote")


def check_owner(run: RunInfo, key: Path) -> Signer:
    """The owner's key, if it is this run's."""
    if not run.owner:
        raise ConfigError(
            "this run has no owner, as runs up to 0.2: its replicas are those of run.json, and stay so"
        )
    if not key.is_file():
        raise ConfigError(f"no owner's key at {key}; it lies where `isthmus init` ran, or give --key")
    signer = load_signer(key, OWNER)
    check_pinned(run.digest, signer)
    if signer.public_key != run.owner:
        raise ConfigError(f"{key} is not the key of this run's owner; take the {OWNER_KEY} that `init` wrote")
    return signer


def pin_warning(signer: Signer, key: Path) -> str:
    """What is to be said of a key of an older version, or nothing."""
    if signer.pinned:
        return ""
    return f"{key} does not name its run, as keys up to 0.2: a run.json that was replaced goes unnoticed"
