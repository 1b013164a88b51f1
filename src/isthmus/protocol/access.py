"""Open a run's bucket from what a person typed, and check who belongs to the run. Loads no torch."""

from pathlib import Path

from isthmus.config import Member
from isthmus.errors import ConfigError
from isthmus.protocol.ledger import Ledger, RunInfo, read_run
from isthmus.protocol.objects import check_pinned
from isthmus.protocol.place import find_place, is_run_dir
from isthmus.protocol.trust import OWNER, Signer, load_signer
from isthmus.runlog import REAL
from isthmus.store import Store, open_store

OWNER_KEY = "run.owner.key"  # in the key folder; the dot cannot clash with a replica's name


def open_ledger(url: str) -> Ledger:
    """The ledger in a bucket, given by its URL or by the run directory of `train`."""
    place = find_place(url)
    if place.run and not place.bucket and place.run.about.get("mode") == REAL:
        raise ConfigError(f"{url} has no bucket yet: its run has not begun, or its bucket/ was removed")
    if not place.bucket:
        raise ConfigError(
            f"{url} has no bucket, as a simulated run; `isthmus report {url}` tells what came of it"
        )
    store = open_store(place.bucket, create=False)
    ledger = Ledger(store, read_run(store))
    ledger.look()
    return ledger


def find_member(run: RunInfo, replica: str) -> Member:
    for member in run.recipe.fleet():
        if member.name == replica:
            return member
    names = ", ".join(member.name for member in run.recipe.fleet())
    raise ConfigError(f'there is no replica "{replica}" in this run; there is {names}')


def open_as(store: Store, replica: str, key: str = "") -> tuple[Ledger, Path]:
    """The run as one of its replicas sees it, and the path of that replica's key.

    The key names the run: if it does not fit, nothing in run.json is used.
    """
    named = Path(key) if key else None
    ledger = Ledger(
        store, read_run(store, load_signer(named, replica) if named and named.is_file() else None)
    )
    run = ledger.look().run
    path = named or Path("keys") / run.recipe.name / f"{replica}.key"
    if not path.is_file():
        find_member(run, replica)  # a misspelt name is named as such, before its key is missed
    signer = load_signer(path, replica)
    check_not_revoked(ledger, signer)
    find_member(run, replica)
    check_key(run, replica, path)
    ledger.sign_as(signer)
    return ledger, path


def check_not_revoked(ledger: Ledger, signer: Signer) -> None:
    """Raise ConfigError if the owner has revoked this key. The replica may have another key since."""
    epoch, key = ledger.epoch, signer.public_key
    if key in epoch.used and signer.replica in epoch.ended and epoch.run.keys.get(signer.replica) != key:
        raise ConfigError(ledger.revoked(signer.replica, ledger.last_round() + 2))


def open_as_owner(url: str, key: str = "") -> tuple[Ledger, Signer]:
    """The run as its owner sees it, with the owner's key."""
    ledger = open_ledger(url)
    folder = Path(url, "keys") if is_run_dir(url) else Path("keys") / ledger.run.recipe.name
    return ledger, check_owner(ledger.run, Path(key) if key else folder / OWNER_KEY)


def check_key(run: RunInfo, replica: str, key: Path) -> None:
    """Check that the key belongs to this replica and was made for this run."""
    signer = load_signer(key, replica)
    check_pinned(run.digest, signer)
    if signer.public_key != run.keys.get(replica):
        raise ConfigError(f"{key} is not the key of replica {replica} in this run; copy the one `init` wrote")


def check_owner(run: RunInfo, key: Path) -> Signer:
    """Load the owner's key; ConfigError unless it is this run's."""
    if not key.is_file():
        raise ConfigError(f"no owner's key at {key}; it lies where `isthmus init` ran, or give --key")
    signer = load_signer(key, OWNER)
    check_pinned(run.digest, signer)
    if signer.public_key != run.owner:
        raise ConfigError(f"{key} is not the key of this run's owner; take the {OWNER_KEY} that `init` wrote")
    return signer
