"""Invitations to a run: a token for a friend, the owner's word in the bucket, the request that takes it up.

The token holds the seed of a one-time key, and travels outside of the bucket. The bucket has the owner's
signature over that key's public half: whoever signs with the one-time key may name one public key for one
replica, until the invitation expires. So the newcomer makes its key itself, no private key travels, and
nobody needs the owner to be there.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.errors import ConfigError
from isthmus.protocol.documents import INVITATION, REQUEST, ROTATION, RunInfo
from isthmus.protocol.schema import check
from isthmus.protocol.trust import INVITED, OWNER, Refused, Signer, open_document

MOST_BYTES = 2**14  # of an invitation or a request
TOKEN = re.compile(r"isthmus1\.([\w-]{1,100})\.([\w-]{1,100})\.([0-9]{1,12})\.([A-Za-z0-9_-]{86})")


@dataclass(frozen=True, slots=True)
class Token:
    """What the owner sends to a friend: which run, which replica of which kind, until when, and a secret."""

    name: str
    kind: str  # for the reader's eye; the invitation in the bucket says what it is
    expires: int
    seed: bytes
    run_digest: str  # of run.json: nobody can lead the newcomer to another run

    def __str__(self) -> str:
        secret = base64.urlsafe_b64encode(self.seed + bytes.fromhex(self.run_digest)).decode().rstrip("=")
        return f"isthmus1.{self.name}.{self.kind}.{self.expires}.{secret}"

    @classmethod
    def parse(cls, text: str) -> "Token":
        found = TOKEN.fullmatch(text.strip())
        if not found:
            raise ConfigError("that is no token of `isthmus invite`; copy the whole line, from isthmus1. on")
        secret = base64.urlsafe_b64decode(found[4] + "==")
        return cls(found[1], found[2], int(found[3]), secret[:32], secret[32:].hex())

    @property
    def signer(self) -> Signer:
        return Signer(INVITED, self.seed, self.run_digest)


def invitation_key(public_key: str) -> str:
    return f"invitations/{public_key}.json"


def request_key(public_key: str) -> str:
    """By the key that signs it."""
    return f"requests/{public_key}.json"


def check_invitation(document: Any, run: RunInfo) -> Mapping[str, Any]:
    """The body of an invitation that the owner signed for this run."""
    _, body = open_document(document, "invitation", run.run_id, {OWNER: run.owner})
    check(body, INVITATION)
    return body


def check_request(document: Any, run: RunInfo, invitation: Mapping[str, Any]) -> str:
    """The public key that the newcomer names, if it holds the invitation's one-time key."""
    _, body = open_document(document, "request", run.run_id, {INVITED: invitation["key"]})
    check(body, REQUEST)
    if body["name"] != invitation["name"]:
        raise Refused(f"the request is for {body['name']}, and the invitation for {invitation['name']}")
    return body["key"]


def check_rotation(document: Any, run: RunInfo) -> tuple[str, str]:
    """(replica, its new public key), if its present key has signed that."""
    signer, body = open_document(document, "rotation", run.run_id, run.keys)
    check(body, ROTATION)
    if body["name"] != signer or body["old"] != run.keys[signer]:
        raise Refused(f"{signer} speaks of the key of {body['name']}")
    return signer, body["key"]
