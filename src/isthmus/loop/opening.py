"""Open a run with a replica's file, and make sure that no other process is that replica now."""

from collections.abc import Callable
from pathlib import Path

from isthmus.errors import ConfigError, Unreachable
from isthmus.protocol.access import check_not_revoked
from isthmus.protocol.bundle import read_bundle
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.patience import Patience
from isthmus.protocol.trust import Signer
from isthmus.store import StoreError, open_store
from isthmus.store.url import SUFFIX

WATCHED = 2  # heartbeats of another process with our key that must not come
LOOK_SECONDS = 10.0  # between two looks at a bucket that is not there


def open_member(url: str, key: Path, patience: Patience, log: Callable[[str], None]) -> Ledger:
    """The run as one of its replicas sees it. It waits for a bucket that is not there."""
    if not key.name.endswith(SUFFIX):
        raise ConfigError(f"{key} is not a file of `create` or `init`, NAME{SUFFIX}")
    said = ""
    while True:
        try:
            return _open(url, key)
        except (Unreachable, StoreError) as error:
            if isinstance(error, StoreError) and error.lasting:
                raise
            if str(error) != said:
                said = str(error)
                log(f"{said}; waiting for it")
            patience.sleep(LOOK_SECONDS)


def _open(url: str, key: Path) -> Ledger:
    bundle = read_bundle(key)
    bundle.use_store()
    signer = Signer(bundle.replica, bytes.fromhex(bundle.key), bundle.run_sha256)
    store = open_store(url or bundle.url, create=False)
    ledger = Ledger(store, read_run(store, signer))
    run = ledger.membership.look().run
    check_not_revoked(ledger, signer)
    if signer.public_key != run.keys.get(bundle.replica):
        raise ConfigError(f"{key} does not hold the key of replica {bundle.replica} in this run")
    if not run.tensors:
        raise ConfigError(
            f"the run in {bundle.url} trains its recipe's model; take part with `isthmus join {key.name}`"
        )
    ledger.sign_as(signer)
    return ledger


def check_alone(ledger: Ledger, patience: Patience) -> None:
    """ConfigError if another process sends heartbeats with our key: one that was killed does not."""
    replica = ledger.signer.replica

    def last() -> tuple[Heartbeat, float] | None:
        return patience(lambda: ledger.heartbeat(replica))

    first = last()
    if first is None or first[0].gone:
        return
    wait = WATCHED * max(ledger.run.recipe.bucket.heartbeat_seconds, first[0].every_seconds or 0.0)
    if ledger.store.now() - first[1] > wait:
        return
    patience.sleep(wait)
    now = last()
    if now and not now[0].gone and (now[0].incarnation, now[0].beat) != (first[0].incarnation, first[0].beat):
        raise ConfigError(
            f"replica {replica} runs already, on {now[0].host or 'another machine'} (process {now[0].pid}); "
            "give each loop its own file, or stop that one"
        )
