"""A fault of the bucket while a run goes on is waited out where it comes; the worker stays up."""

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest
from clocks import Clock
from little import Little, at_once, beating

from isthmus.errors import RunError
from isthmus.protocol import closer, patience
from isthmus.protocol.patience import LeftWaiting, Patience
from isthmus.store import Store, StoreError, folder
from isthmus.store.retry import Backoff

DENIED = StoreError("s3://b: put x: permission denied", "denied", brief="cannot write to the bucket: denied")


class Waiting(Patience):
    """By a clock that moves when it sleeps."""

    def __init__(self, **more) -> None:
        self.said: list[str] = []
        self.now, self.slept = Clock(), 0.0
        super().__init__(self.said.append, clock=self.now, sleep=self._sleep, **more)

    def _sleep(self, seconds: float) -> None:
        self.now.now += seconds
        self.slept += seconds


class Asked:
    """Somebody asks to leave: in the bucket, or on this machine after some looks."""

    def __init__(self, in_bucket: bool = False, after: int = 1_000_000) -> None:
        self.in_bucket, self.looks = in_bucket, after

    def asked(self) -> int:
        return self.in_bucket

    def here(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def failing(times: int, error: StoreError = DENIED) -> Callable[..., str]:
    left = [times]

    def work(*args: object) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return work


def test_a_wait_has_one_line_at_its_start_and_one_at_its_end_and_pauses_grow_to_30_s():
    wait = Waiting()
    assert wait(failing(9)) == "done"
    assert wait.slept == 1 + 2 + 4 + 8 + 16 + 30 * 4
    assert wait.said == [
        "s3://b: put x: permission denied; waiting for that to pass",
        "the bucket can be used again, after 151 s",
    ]
    assert (wait.awaiting, wait.waited_seconds) == ("", None)
    wait.said.clear()
    wait(failing(1))
    assert wait.slept == 152  # the next wait begins with a short pause again
    assert len(wait.said) == 2


@pytest.mark.parametrize("kind", ["network", "busy", "slow", "disk", "expired", "denied", "clock"])
def test_every_fault_that_can_pass_is_waited_out(kind):
    assert Waiting()(failing(2, StoreError("x", kind, passes=False))) == "done"


def test_a_bucket_that_is_not_there_ends_it_at_once():
    wait = Waiting()
    with pytest.raises(StoreError, match="no such bucket"):
        wait(failing(1, StoreError("no such bucket", "config")))
    assert (wait.slept, wait.said) == (0, [])


def test_while_it_waits_it_says_what_for_and_for_how_long():
    told: list[str] = []
    wait = Waiting(say=told.append)
    wait.hold(DENIED)
    wait.hold(DENIED)
    assert (wait.awaiting, wait.waited_seconds) == (DENIED.brief, 3.0)
    assert told == [DENIED.brief]
    wait.hold(StoreError("x", "disk", brief="cannot write to the bucket: \x1b" + "y" * 500))
    assert len(wait.awaiting) <= 200
    assert wait.awaiting.isprintable()
    wait.passed()
    assert told[-1] == ""


@pytest.mark.parametrize("asked", [Asked(in_bucket=True), Asked(after=5)])
def test_who_is_asked_to_leave_need_not_wait_to_the_end(asked):
    wait = Waiting(leave=asked)
    with pytest.raises(LeftWaiting, match="left while it waited: cannot write to the bucket"):
        wait(failing(1_000_000))
    assert wait.slept <= 6


# A little fleet


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    monkeypatch.setattr(patience, "PAUSE_SECONDS", (0.05, 0.2))
    # The store's own tries end soon: what comes after them is looked at here.
    monkeypatch.setattr(Store, "_backoff", lambda self, size, deadline: Backoff(time.monotonic() + 0.7))


def one_round_with_faults(little: Little, begin: Callable[[], None], waits: Callable[[], bool]) -> list[str]:
    """Round 1 under a fault that ends when somebody waits for it; then a round without. What they said."""
    fleet = little.replicas()
    began = threading.Event()

    def end_when_somebody_waits() -> None:
        assert began.wait(60)
        while not any(each.exchange.patience.awaiting for each in fleet):
            assert not done.wait(0.02), "nobody waits"
        waits()

    done = threading.Event()
    with beating(fleet):
        for each in fleet:
            each.beat()
        begin()
        began.set()
        at_once(end_when_somebody_waits, *(lambda each=each: each.round(1) for each in fleet))
        at_once(*(lambda each=each: each.round(2) for each in fleet))
    assert len(little.manifest(1).entries) == len(little.manifest(2).entries) == 3
    return [line for each in fleet for line in each.said]


def check_lines(said: list[str], words: str) -> None:
    began = [line for line in said if "waiting for that to pass" in line]
    assert began
    assert all(words in line for line in began), began
    assert len([line for line in said if "can be used again" in line]) == len(began)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_is_read_only_or_full_for_a_while_ends_nobody(number, tmp_path, monkeypatch, quick):
    little = Little(str(tmp_path / "bucket"), tmp_path)
    broken, write = threading.Event(), folder.write_file

    def refuse(root, key, data, **how):
        if broken.is_set() and not key.startswith("members/"):
            raise OSError(number, os.strerror(number))
        write(root, key, data, **how)

    monkeypatch.setattr("isthmus.store.folder.write_file", refuse)
    check_lines(one_round_with_faults(little, broken.set, broken.clear), os.strerror(number))


ANSWERS = {
    "read-only": (403, "AccessDenied", "permission denied"),
    "expired": (400, "ExpiredToken", "the credentials have expired"),
    "full": (507, "XMinioStorageFull", "the store is full"),
    "failing": (520, "Odd", "the store is failing"),
    "unknown keys": (403, "InvalidAccessKeyId", "does not know these credentials"),
}


@pytest.mark.parametrize("bad_network", ["moto"], indirect=True)
@pytest.mark.parametrize("what", list(ANSWERS))
def test_a_bucket_that_takes_nothing_for_a_while_ends_nobody(what, bad_network, tmp_path, quick):
    url, proxy = bad_network
    little = Little(url, tmp_path)
    status, code, words = ANSWERS[what]

    def begin() -> None:
        for part in ("/payloads/", "/commits/", "/manifests/"):
            proxy.trouble("answer", "PUT", part, times=float("inf"), status=status, code=code)

    check_lines(one_round_with_faults(little, begin, proxy._troubles.clear), words)


@pytest.mark.parametrize("bad_network", ["moto"], indirect=True)
def test_a_bucket_that_cannot_be_read_for_a_while_ends_nobody(bad_network, tmp_path, quick):
    url, proxy = bad_network
    little = Little(url, tmp_path)

    def begin() -> None:
        for method in ("GET", "HEAD"):
            proxy.trouble("answer", method, "", times=float("inf"), status=403, code="AccessDenied")

    check_lines(one_round_with_faults(little, begin, proxy._troubles.clear), "permission denied")


def test_a_bucket_that_is_gone_ends_the_worker(tmp_path, quick, monkeypatch):
    """Waiting does not bring back a bucket that somebody has deleted."""
    little = Little(str(tmp_path / "bucket"), tmp_path)
    one = little.replica("a")
    gone = StoreError("s3://b: create x: no such bucket", "config")
    monkeypatch.setattr(one.ledger, "put_shard", failing(1, gone))
    with pytest.raises(RunError, match="no such bucket"):
        one.round(1)
