"""`isthmus join --token`: make a key here, get ready, and ask to be admitted once we are.

What takes long (processes, text, anchor, replay, meeting the other stages) is done before the run has one
more member, so that the newcomer trains in the first round that is its own.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.protocol.access import invited, next_key
from isthmus.protocol.invitations import MOST_BYTES, Token, check_invitation, invitation_key, request_key
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import (
    INVITED,
    Refused,
    Signer,
    canonical,
    load_signer,
    new_secret,
    open_sealed,
    save_secret,
)
from isthmus.reading import parse_json
from isthmus.store import StoreRefused, open_store


def prepare(url: str, token: Token, key: str = "", stage: int | None = None) -> Path:
    """The file of the newcomer's key. Until the run has it, invitation and request lie beside it: by them a
    worker sees the run as it will be. Typed again after a crash, it goes on."""
    store = open_store(url, create=False)
    ledger = Ledger(store, read_run(store, token.signer))  # of the run that the token names, or of none
    run = ledger.run
    path = Path(key) if key else Path("keys") / run.recipe.name / f"{token.name}.key"
    ledger.membership.look()
    if not path.exists():
        _open_invitation(ledger, token)
        if stage:
            raise ConfigError(
                f"no key for {token.name} at {path}; copy it from the machine of stage 0, which makes it"
            )
        save_secret(path, new_secret(), run.digest)
    own = load_signer(path, token.name)
    if _admitted(ledger, token, own, path):
        invited(path).unlink(missing_ok=True)
        return path
    body = {"name": token.name, "key": own.public_key}
    request = token.signer.seal("request", run.run_id, body)
    pair = {"invitation": _open_invitation(ledger, token), "request": parse_json(request, "the request")}
    if (there := _asked(ledger, pair)) is not None:
        _check_same(there, pair)
    replace_file(invited(path), canonical(pair))
    return path


def ask(ledger: Ledger) -> None:
    """Put the request of who is ready. The first for a token stands: another machine's is not replaced."""
    expected = ledger.membership.expected
    assert expected, "only a newcomer asks"
    if not ledger.store.create(_request_key(expected.pair), canonical(expected.pair["request"])):
        _check_same(_asked(ledger, expected.pair), expected.pair)


def _open_invitation(ledger: Ledger, token: Token) -> Any:
    """The invitation, signed; ConfigError unless it is there, and still good."""
    if time.time() > token.expires:
        raise ConfigError(f"the token for {token.name} has expired; ask the run's owner for another")
    once, epoch = token.signer.public_key, ledger.membership.newest
    if once in epoch.used:
        raise ConfigError(f"the token for {token.name} was used before; ask the run's owner for another")
    try:
        data = ledger.get_document(invitation_key(once), MOST_BYTES)
        if data is None:
            raise Refused("it is not in the bucket")
        document = parse_json(data, "the invitation")
        invitation = check_invitation(document, ledger.run)
        if invitation["name"] != token.name:
            raise Refused(f"it is for {invitation['name']}")
        if epoch.ended.get(token.name, -1) > invitation["after"]:
            raise Refused("the owner has taken it back")
    except (Refused, StoreRefused, ConfigError) as reason:
        raise ConfigError(f"the invitation of {token.name} does not count: {reason}") from None
    return document


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


def _request_key(pair: Mapping[str, Any]) -> str:
    return request_key(pair["invitation"]["body"]["key"])


def _asked(ledger: Ledger, pair: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The body of the request that lies there, if there is one."""
    key, once = _request_key(pair), pair["invitation"]["body"]["key"]
    try:
        data = ledger.get_document(key, MOST_BYTES)
        return open_sealed(data, "request", ledger.run.run_id, {INVITED: once})[1] if data else None
    except (Refused, StoreRefused) as reason:
        raise ConfigError(f"{key} is in the way ({reason}); the run's owner can delete it") from None


def _check_same(there: Mapping[str, Any] | None, pair: Mapping[str, Any]) -> None:
    own = pair["request"]["body"]
    if there and there.get("key") != own["key"]:
        raise ConfigError(f"the token for {own['name']} was used on another machine; ask for another")
