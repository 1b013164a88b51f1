"""Check a bucket from this machine: reach, rights, put-if-absent, clock, rates. It deletes what it puts."""

import os
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from isthmus.doctor.checks import WRONG_CLOCK_SECONDS, Check, LinkRate, Say, mbps, ramp
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
    with _as_it_was(folder, prefix):
        try:
            store = _open(url)
            key = f"{prefix}/{secrets.token_hex(8)}"
            store.put(key, b"doctor", deadline=time.monotonic() + TIMEOUT_SECONDS)
        except StoreError as error:
            return [Check(name=shown, ok=False, words=_bare(error, shown), cure=cure(error))], None
        except ConfigError as error:  # no credentials, or an invalid folder
            advice = "give a folder that this user may write to" if folder else CURES["config"]
            if "credentials" in str(error):
                advice = "set them for this shell or service, see docs/operate.md, section 2"
            return [Check(name=shown, ok=False, words=_bare(error, shown), cure=advice)], None
        checks = [Check(name=shown, ok=True, words="reached; these credentials may read and write")]
        rate = None
        try:
            checks.append(_put_if_absent(store, prefix))
            checks.append(_clock(store, prefix, bool(folder)))
            say(f"measuring the link to {shown}")
            rate = _rate(store, key, seconds)
            checks.append(Check(name="bucket link", ok=True, words=rate.describe(), facts=asdict(rate)))
        except StoreError as error:
            words = _bare(error, shown)
            checks.append(Check(name="bucket link", ok=False, words=words, cure=cure(error)))
        finally:
            checks += _tidy(store, key, f"{prefix}/clock")
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
        return Check(
            name="put-if-absent",
            ok=False,
            words=_bare(error, store.url),
            cure="use another store, or a newer version of this one; a proxy in front of it may also drop "
            "the header",
        )
    return Check(name="put-if-absent", ok=True, words="honoured: a round has one winner")


def _clock(store: Store, prefix: str, is_folder: bool) -> Check:
    began = time.monotonic()
    there = store.now(f"{prefix}/clock")
    ahead = time.time() - there
    # The store read its clock during the request, and an HTTP date is in whole seconds.
    unsure = (time.monotonic() - began) / 2 + (0.0 if is_folder else 0.5)
    facts = {"ahead_seconds": ahead, "unsure_seconds": unsure}
    way = "ahead of" if ahead > 0 else "behind"
    if abs(ahead) - unsure > WRONG_CLOCK_SECONDS:
        return Check(
            name="clock",
            ok=False,
            words=f"this machine is {abs(ahead):.0f} s {way} the bucket; a store refuses requests that are "
            "some minutes off (S3: 15), and TLS fails further out",
            cure="set the clock by NTP (timedatectl set-ntp true)",
            facts=facts,
        )
    words = f"within {max(abs(ahead), unsure):.1f} s of the bucket's; rounds go by the bucket's"
    if is_folder:
        words += " (here, its file system's)"
    return Check(name="clock", ok=True, words=words, facts=facts)


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
        ok, stay = error.kind == "denied", f"could not delete {' and '.join(keys)}: {_bare(error, store.url)}"
        return [Check(name="bucket tidy", ok=ok, words=stay, cure="delete them by hand; they do no harm")]
    return []


@contextmanager
def _as_it_was(folder: Path | None, prefix: str) -> Iterator[None]:
    """Remove the folders that the test of a folder created."""
    below = [folder / prefix, *(folder / prefix).parents] if folder else []
    made = [path for path in below if not path.exists()]
    try:
        yield
    finally:
        for path in made:  # the deepest first; non-empty ones stay
            with suppress(OSError):
                path.rmdir()
