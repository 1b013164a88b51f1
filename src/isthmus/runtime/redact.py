"""Remove keys and credentials from a machine's last error before a heartbeat carries it.

It finds the values of secret variables literally, and keys and secret parts of URLs by their form.
"""

import os
import re
from collections.abc import Iterable, Mapping

from isthmus.printing import visible
from isthmus.runlog.facts import MAX_WORD

HIDDEN = "[hidden]"
MOST_CHARACTERS = 2000  # of a line that are checked
LEAST_SECRET = 8  # characters: shorter values are ordinary words
SECRET_NAMES = re.compile(
    r"(SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SAS)", re.I
)
_SHAPES = (
    # user:password@ in a URL, and the query of a signed one
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.I), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*\?)[^\s'\"]+", re.I), rf"\1{HIDDEN}"),
    (re.compile(r"\bisthmus\d\.[^\s'\"]+"), f"isthmus-token {HIDDEN}"),  # from `isthmus invite`
    (re.compile(r"\b[0-9a-fA-F]{64,}\b"), HIDDEN),  # a key, or a digest, which log lines shorten to 16 digits
)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of variables with secret names, longest first."""
    found = {
        value
        for name, value in environment.items()
        if SECRET_NAMES.search(name) and len(value) >= LEAST_SECRET and not os.path.exists(value)
    }
    return sorted(found, key=len, reverse=True)


def redacted(line: str, secrets: Iterable[str] | None = None) -> str:
    """The line with its secrets hidden."""
    line = line[:MOST_CHARACTERS]
    for secret in secrets_of(os.environ) if secrets is None else secrets:
        line = line.replace(secret, HIDDEN)
    for shape, instead in _SHAPES:
        line = shape.sub(instead, line)
    return line


def one_line(error: str) -> str:
    """Shorten an error for a heartbeat: one visible line without secrets."""
    line = visible(redacted((error.strip().splitlines() or [""])[0]))
    return line if len(line) <= MAX_WORD else line[: MAX_WORD - 3] + "..."
