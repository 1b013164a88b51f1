"""Check a bucket from this machine: reach, rights, put-if-absent, clock, rates. It deletes what it puts."""

import os
import secrets
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from isthmus.doctor.checks import WRONG_CLOCK_SECONDS, Check, LinkRate, Say, failed, mbps, passed, ramp
from isthmus.errors import ConfigError
from isthmus.store.objects import CONTROL_BYTES, Store, open_store
from isthmus.store.retry import StoreError, StoreRefused
from isthmus.store.url import parse_url

TIMEOUT_SECONDS = 15.0  # the timeout of `join`
PINGS = 7
FIRST_BYTES = CONTROL_BYTES + 1  # bulk uses a connection of its own
MOST_BYTES = 64 << 20
CURES = {
    "network": "check the URL, AWS_ENDPOINT_URL, DNS, proxy and firewall; only outbound HTTPS is needed",
    "slow": "check AWS_ENDPOINT_URL, proxy and firewall: something takes the connection and does not answer",
    "busy": "try again in a minute; if it lasts, ask whoever runs the store",
    "denied": "check the key, and that its rights cover this prefix (docs/operate.md, section 2); --replica "
    "NAME tries what a contributor may write",
    "expired": "renew the credentials in the environment or the credentials file",
    "clock": "set this machine's clock by NTP",
    "disk": "free space in the folder, or choose another one",
    "config": "correct the URL and AWS_REGION, or create the bucket",
}


def cure(error: Exception) -> str:
    return CURES.get(getattr(error, "kind", "config"), CURES["config"])


def check_bucket(
    url: str, seconds: float, say: Say, replica: str = ""
) -> tuple[list[Check], LinkRate | None]:
    """Check the bucket; with `replica`, with its rights: a contributor may write only below its own name."""
    shown, folder = parse_url(url)
    say(f"trying {shown}")
    prefix = f"members/{replica}/probe" if replica else "probe"
    try:
        store = _open(url)
        key = f"{prefix}/{secrets.token_hex(8)}"
        store.put(key, b"doctor", deadline=time.monotonic() + TIMEOUT_SECONDS)
    except StoreError as error:
        return [failed(shown, _bare(error, shown), cure(error))], None
    except ConfigError as error:  # no credentials, or an invalid folder
        advice = "give a folder that this user may write to" if folder else CURES["config"]
        if "credentials" in str(error):
            advice = "set them for this shell or service, see docs/operate.md, section 2"
        return [failed(shown, _bare(error, shown), advice)], None
    checks = [passed(shown, "reached; these credentials may read and write")]
    rate = None
    try:
        checks.append(_put_if_absent(store, prefix))
        checks.append(_clock(store, prefix, bool(folder)))
        say(f"measuring the link to {shown}")
        rate = _rate(store, key, seconds)
        checks.append(passed("bucket link", rate.describe(), **asdict(rate)))
    except StoreError as error:
        checks.append(failed("bucket link", _bare(error, shown), cure(error)))
    finally:
        checks += _tidy(store, key, f"{prefix}/clock")
        with suppress(OSError):
            (folder / prefix).rmdir() if folder else None
    return checks, rate


def _open(url: str) -> Store:
    root, folder = parse_url(url)
    if folder:
        return open_store(url)
    store = Store(root, None)
    with suppress(StoreRefused):  # a run is there already, and its run.json is longer than 0 bytes
        store.get("run.json", max_bytes=0, deadline=time.monotonic() + TIMEOUT_SECONDS)
    return store


def _bare(error: Exception, url: str) -> str:
    return str(error).removeprefix(f"{url}: ")


def _put_if_absent(store: Store, prefix: str) -> Check:
    try:
        store.probe(prefix)
    except ConfigError as error:
        advice = "use another store or a newer version; a proxy in front of it may drop the header"
        return failed("put-if-absent", _bare(error, store.url), advice)
    return passed("put-if-absent", "honoured: a round has one winner")


def _clock(store: Store, prefix: str, is_folder: bool) -> Check:
    began = time.monotonic()
    ahead = time.time() - store.now(f"{prefix}/clock")
    # The store read its clock during the request, and an HTTP date is in whole seconds.
    unsure = (time.monotonic() - began) / 2 + (0.0 if is_folder else 0.5)
    facts: dict[str, Any] = {"ahead_seconds": ahead, "unsure_seconds": unsure}
    if abs(ahead) - unsure > WRONG_CLOCK_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        words = (
            f"this machine is {abs(ahead):.0f} s {way} the bucket; a store refuses requests that are some "
            "minutes off (S3: 15), and TLS fails further out"
        )
        return failed("clock", words, "set the clock by NTP (timedatectl set-ntp true)", **facts)
    words = f"within {max(abs(ahead), unsure):.1f} s of the bucket's; rounds go by the bucket's"
    return passed("clock", words + " (here, its file system's)" * is_folder, **facts)


def _rate(store: Store, key: str, seconds: float) -> LinkRate:
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        store.head(key)
        trips.append(time.perf_counter() - began)
    trip = statistics.median(trips)
    noise = os.urandom(1 << 20)
    noise *= MOST_BYTES // len(noise)

    def up(num_bytes: int) -> None:
        store.put(key, noise[:num_bytes])

    up(FIRST_BYTES)  # opens the connection
    size, spent = ramp(up, seconds, FIRST_BYTES, MOST_BYTES)
    began, read = time.perf_counter(), 0
    while not read or time.perf_counter() - began < seconds / 2:
        read += len(store.get(key, max_bytes=size) or b"")
    down = time.perf_counter() - began
    return LinkRate(
        up_mbps=mbps(size, spent, trip),
        down_mbps=mbps(read, down, read // size * trip),
        round_trip_ms=trip * 1e3,
    )


def _tidy(store: Store, *keys: str) -> list[Check]:
    try:
        for key in keys:
            store.delete(key, deadline=time.monotonic() + 5)
    except StoreError as error:
        # Contributors need no right to delete; leftovers are harmless.
        words = f"could not delete {' and '.join(keys)}: {_bare(error, store.url)}"
        if error.kind == "denied":
            return [passed("bucket tidy", words)]
        return [failed("bucket tidy", words, "delete them by hand")]
    return []
