"""A replica's new key, on all machines of its stages: who has it gives it to the others.

`isthmus rotate` makes it on one of them. The processes of a replica speak through stage 0's store, which
machines reach over TLS by the replica's key, so it travels where nobody else reads.
"""

from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.protocol.access import next_key, take_up_key
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Signer, save_secret
from isthmus.replica.control_group import ControlGroup

HAS, LACKS = b"\x01", b"\x00"


def take_up_together(ledger: Ledger, path: Path | None, public_key: str, control: ControlGroup) -> bool:
    """Sign with the key that the run has for us now; False where no process of this replica has it. All of
    them call this at the same round's edge."""
    replica = ledger.signer.replica
    has = ledger.signer.public_key == public_key or (path is not None and take_up_key(ledger, path, replica))
    flags = control.share(HAS if has else LACKS)
    if LACKS not in flags or HAS not in flags:
        return has
    giver = flags.index(HAS)
    secret = control.share(ledger.signer.secret if control.rank == giver else b"")[giver]
    if not has and path is not None and len(secret) == 32:
        _keep(path, replica, secret, public_key, ledger.run.digest)
        has = take_up_key(ledger, path, replica)
    return has


def _keep(path: Path, replica: str, secret: bytes, public_key: str, run_digest: str) -> None:
    """Beside the old one, as `rotate` would have left it. What is not the run's key for us is no key."""
    if Signer(replica, secret).public_key != public_key:
        return
    try:
        save_secret(next_key(path), secret, run_digest)
    except FileExistsError:
        raise ConfigError(f"{next_key(path)} is another key; delete it, and join again") from None
