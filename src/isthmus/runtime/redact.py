"""Lines that leave this machine: without keys, tokens and credentials, and within bounds.

What is known to be secret (the environment's credentials) is looked for as it is; the rest by its shape. It
is better to hide too much: the machine's own log has all of it.
"""

import os
import re
from collections.abc import Iterable, Mapping

HIDDEN = "[hidden]"
MOST_CHARACTERS = 2000  # of a line that are looked at: some shapes take the square of its length
LEAST_SECRET = 8  # characters: shorter values of a variable are words that occur anyway
SECRET_NAMES = re.compile(
    r"(SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SAS)", re.I
)
_SHAPES = (
    # user:password@ of a URL, and the query of a signed one
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.I), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*\?)[^\s'\"]+", re.I), rf"\1{HIDDEN}"),
    # name=value, "name": "value", of a name that says it is secret; a header
    (
        re.compile(
            r"((?:secret|token|passw(?:or)?d|credential|api[-_]?key|access[-_]?key(?:[-_]?id)?|private[-_]?key|"
            r"signature|session|authorization|sig)[\w-]*['\"]?\s*[:=]\s*)(?:bearer\s+|basic\s+)?['\"]?[^\s'\",;&]+",
            re.I,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.I), rf"\1 {HIDDEN}"),
    (re.compile(r"\bisthmus\d\.[^\s'\"]+"), f"isthmus-token {HIDDEN}"),  # of `isthmus invite`
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b"), HIDDEN),  # AWS
    (re.compile(r"\b(hf_|ghp_|github_pat_|sk-|xox[a-z]-)[A-Za-z0-9_-]{8,}"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*"), HIDDEN),
    # 64 hex digits are a key, or a digest, of which a line says the first 16; long base64 is most often a key
    (re.compile(r"\b[0-9a-fA-F]{64,}\b"), HIDDEN),
    (
        re.compile(
            r"(?<![\w/.+-])(?=[A-Za-z0-9+/]*[0-9])(?=[A-Za-z0-9+/]*[A-Za-z])[A-Za-z0-9+/]{40,}={0,2}(?![\w/.-])"
        ),
        HIDDEN,
    ),
)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of variables whose names say that they are secret, longest first."""
    found = {
        value
        for name, value in environment.items()
        if SECRET_NAMES.search(name) and len(value) >= LEAST_SECRET and not os.path.exists(value)
    }
    return sorted(found, key=len, reverse=True)


def redacted(line: str, secrets: Iterable[str] | None = None) -> str:
    """The line without what nobody else may know."""
    for secret in secrets_of(os.environ) if secrets is None else secrets:
        line = line.replace(secret, HIDDEN)
    if len(line) > MOST_CHARACTERS:
        line = line[:MOST_CHARACTERS].rpartition(" ")[0] + " ..."  # half a word may be half a secret
    for shape, instead in _SHAPES:
        line = shape.sub(instead, line)
    return line
