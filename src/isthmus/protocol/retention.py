"""`bucket.keep_rounds`: each writer deletes what is no longer needed while the run goes on.

The horizon is the newest confirmed anchor that is older than `keep_rounds` rounds and is not the newest. Of
rounds up to it, each replica deletes its own payloads and commit; the closers delete the anchors before it.
So everything after it can be replayed. Manifests stay. A thread sweeps once per anchor; no round waits for
it.
"""

import re
import threading
from collections.abc import Callable, Iterable
from functools import partial

from isthmus.errors import RunError
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.payloads import commit_key
from isthmus.protocol.trust import Refused
from isthmus.store import StoreError, StoreRefused
from isthmus.store.together import together


class Retention:
    """One replica's part of retention."""

    def __init__(self, ledger: Ledger, log: Callable[[str], None], background: bool = True) -> None:
        # A separate ledger: the thread reads manifests while the round reads others.
        self.ledger, self.log, self.background = (
            Ledger(ledger.store, ledger.run, ledger.signer),
            log,
            background,
        )
        self.own, recipe = ledger.signer.replica, ledger.run.recipe
        self.keep, self.every = recipe.bucket.keep_rounds, recipe.bucket.anchor_every
        names = [member.name for member in recipe.fleet()]
        self.offset = names.index(self.own) if self.own in names else 0  # replicas sweep at different times
        self.worker: threading.Thread | None = None
        self.began, self.said = False, ""

    def after(self, round_number: int) -> None:
        """Sweep at the start, and then once per anchor, after a round was applied; never fails."""
        due = not self.began or (round_number + self.offset) % self.every == 0
        if not self.keep or not due or (self.worker is not None and self.worker.is_alive()):
            return
        self.began = True
        if self.background:
            self.worker = threading.Thread(
                target=self._try, args=(round_number,), daemon=True, name="retention"
            )
            self.worker.start()
        else:
            self._try(round_number)

    def _try(self, round_number: int) -> None:
        try:
            self.sweep(round_number)
        except StoreError as error:
            if error.kind == "denied":
                self.keep = 0
                self._say(f"old rounds stay, though bucket.keep_rounds is set: {error}")
            else:
                self._say(f"old rounds stay for now: {error}")
        except (RunError, Refused, StoreRefused) as error:  # about another replica's document
            self._say(f"old rounds stay for now: {error}")

    def _say(self, words: str) -> None:
        if words != self.said:
            self.said = words
            self.log(words)

    def sweep(self, round_number: int) -> int:
        """Delete old objects; return the last round swept, whose anchor stays."""
        horizon = self._horizon(round_number)
        if horizon:
            sweep_payloads(self.ledger, self.own, horizon)
            if self.own in self.ledger.run.closers:
                self._sweep_anchors(horizon)
        return horizon

    def _horizon(self, round_number: int) -> int:
        """The newest anchor that is old enough: all later rounds can be replayed from it. 0: none."""
        newest = [t for t in self.ledger.believed_anchors(2) if self.ledger.is_whole(t)]
        if len(newest) < 2:
            return 0
        older = self.ledger.anchors_down(min(newest[1], round_number - self.keep))
        good = (t for t in older if self.ledger.is_believed(t) and self.ledger.is_whole(t))
        return next(good, 0)

    def _sweep_anchors(self, before: int) -> None:
        """Delete older anchors except theta^(0); `complete.json` first, so that nobody finds half of one."""
        keys = [key for key in self.ledger.store.list("anchors") if 0 < _round_of(key, 1) < before]
        delete(self.ledger, [key for key in keys if key.endswith("/complete.json")])
        delete(self.ledger, [key for key in keys if not key.endswith("/complete.json")])


def sweep_payloads(ledger: Ledger, replica: str, horizon: int) -> int:
    """Delete a replica's objects of rounds up to `horizon`; return how many."""
    keys = [key for key in ledger.store.list(f"payloads/{replica}") if 0 < _round_of(key, 2) <= horizon]
    rounds = {_round_of(key, 2) for key in keys}
    delete(ledger, [commit_key(replica, t) for t in sorted(rounds)])
    delete(ledger, keys)  # after the commits, which list them
    return len(keys) + len(rounds)


def delete(ledger: Ledger, keys: Iterable[str]) -> None:
    keys = list(keys)
    together([partial(ledger.store.delete, key) for key in keys])
    ledger.store.tidy({key.rpartition("/")[0] for key in keys})


def _round_of(key: str, place: int) -> int:
    """The round in a key; 0 if there is none."""
    parts = key.split("/")
    return int(parts[place]) if len(parts) > place and re.fullmatch("[0-9]{6,7}", parts[place]) else 0
