"""`isthmus join --token`: make a key here, ask to be admitted, and wait until the run says yes."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.protocol.access import next_key
from isthmus.protocol.invitations import MOST_BYTES, Token, check_invitation, invitation_key, request_key
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import Refused, Signer, load_signer, new_secret, open_sealed, save_secret
from isthmus.reading import parse_json
from isthmus.store import StoreError, StoreRefused, open_store

POLL_SECONDS = 2.0


def ask_to_join(
    url: str,
    token: Token,
    key: str = "",
    log: Callable[[str], None] = lambda text: None,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """The file of the newcomer's key, once the run has it. Typed again after a crash, it goes on."""
    store = open_store(url, create=False)
    ledger = Ledger(store, read_run(store, token.signer))  # of the run that the token names, or of none
    run = ledger.run
    path = Path(key) if key else Path("keys") / run.recipe.name / f"{token.name}.key"
    ledger.membership.look()
    if not path.exists():
        _check_open(ledger, token)
        save_secret(path, new_secret(), run.digest)
    own = load_signer(path, token.name)
    if _admitted(ledger, token, own, path):
        return path
    _check_open(ledger, token)
    _ask(ledger, token, own)
    log(f"asked to be admitted as {token.name}; a closer does so when it settles a round")
    while not _admitted(ledger, token, own, path):
        wait(POLL_SECONDS)
        with suppress(StoreError):  # a bucket that is away comes back
            before = ledger.membership.newest
            if ledger.membership.look() is not before and not _admitted(ledger, token, own, path):
                _check_open(ledger, token)  # the owner may have taken it back
    return path


def _check_open(ledger: Ledger, token: Token) -> None:
    """ConfigError unless the invitation is there, and still good."""
    if time.time() > token.expires:
        raise ConfigError(f"the token for {token.name} has expired; ask the run's owner for another")
    once, epoch = token.signer.public_key, ledger.membership.newest
    if once in epoch.used:
        raise ConfigError(f"the token for {token.name} was used before; ask the run's owner for another")
    try:
        data = ledger.get_document(invitation_key(once), MOST_BYTES)
        if data is None:
            raise Refused("it is not in the bucket")
        invitation = check_invitation(parse_json(data, "the invitation"), ledger.run)
        if invitation["name"] != token.name:
            raise Refused(f"it is for {invitation['name']}")
        if epoch.ended.get(token.name, -1) > invitation["after"]:
            raise Refused("the owner has taken it back")
    except (Refused, StoreRefused, ConfigError) as reason:
        raise ConfigError(f"the invitation of {token.name} does not count: {reason}") from None


def _admitted(ledger: Ledger, token: Token, own: Signer, path: Path) -> bool:
    there = ledger.membership.newest.run.keys.get(token.name)
    if there is None:
        return False
    if there == own.public_key or next_key(path).exists():  # or has another key by now
        return True
    raise ConfigError(
        f"there is a replica {token.name} in this run, and its key is not {path}; was the token used "
        "elsewhere?"
    )


def _ask(ledger: Ledger, token: Token, own: Signer) -> None:
    """Put the request. The first for a token stands: another machine's is not replaced."""
    once, run = token.signer, ledger.run
    body = {"name": token.name, "key": own.public_key}
    key = request_key(once.public_key)
    if ledger.store.create(key, once.seal("request", run.run_id, body)):
        return
    try:
        data = ledger.get_document(key, MOST_BYTES) or b""
        _, there = open_sealed(data, "request", run.run_id, {once.replica: once.public_key})
    except (Refused, StoreRefused) as reason:
        raise ConfigError(f"{key} is in the way ({reason}); the run's owner can delete it") from None
    if there.get("key") != own.public_key:
        raise ConfigError(f"the token for {token.name} was used on another machine; ask for another")
