"""Who is invited to a run and has not come: for whoever looks. Reads only."""

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

from isthmus.errors import ConfigError
from isthmus.protocol.invitations import MOST_BYTES, check_invitation, request_key
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.membership import replica_config
from isthmus.protocol.trust import Refused
from isthmus.reading import parse_json
from isthmus.store import StoreError, StoreRefused
from isthmus.store.together import together

MOST_LISTED = 2000  # objects below invitations/ and requests/, whoever wrote them
MOST_READ = 50  # invitations, the newest


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation that can still be taken up."""

    replica: str
    kind: str
    stages: int
    expires: int  # Unix seconds
    asked: bool  # it is ready, and a closer admits it when it settles the open round


def open_invitations(ledger: Ledger, now: float) -> list[Invited]:
    """In the order in which they expire. What is no invitation of the owner's is none."""
    epoch = ledger.membership.newest
    if not epoch.run.owner:
        return []
    try:
        listed = ledger.store.scan("invitations", most=MOST_LISTED)
        requests = ledger.store.scan("requests", most=MOST_LISTED)
    except (StoreRefused, StoreError):
        return []
    keys = [key for key in listed if re.fullmatch(r"invitations/[0-9a-f]{64}\.json", key)]
    keys = [key for key in keys if key[12:76] not in epoch.used]
    newest = sorted(keys, key=lambda key: -listed[key].modified_unix_seconds)[:MOST_READ]
    found = together([partial(_read, ledger, key, requests, now) for key in newest])
    return sorted((each for each in found if each), key=lambda each: each.expires)


def _read(ledger: Ledger, key: str, requests: Container[str], now: float) -> Invited | None:
    epoch = ledger.membership.newest
    try:
        data = ledger.get_document(key, MOST_BYTES)
        body = check_invitation(parse_json(data or b"", key), epoch.run)
        name, config = body["name"], replica_config(body["name"], body["table"])
    except (Refused, StoreRefused, StoreError, ConfigError):
        return None
    taken_back = epoch.ended.get(name, -1) > body["after"]
    if body["key"] != key[12:76] or now > body["expires"] or name in epoch.run.keys or taken_back:
        return None
    return Invited(name, config.kind, config.stages, body["expires"], request_key(body["key"]) in requests)
