"""`bucket.keep_rounds`: what nobody needs any more is deleted as the run goes, by whoever wrote it.

The horizon is the newest anchor that can be believed, is older than so many rounds, and is not the newest.
Of rounds up to it each replica deletes its own payloads, its commit, and its copies of others' payloads; the
closers delete the anchors before it. So whatever comes after it can be replayed. Manifests stay. Once for
every anchor, in a thread: no round waits for it.
"""

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from isthmus.errors import RunError
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.repairs import has_files
from isthmus.protocol.trust import Refused
from isthmus.store import StoreError, StoreRefused


class Retention:
    """One replica's part of it."""

    def __init__(self, ledger: Ledger, log: Callable[[str], None], background: bool = True) -> None:
        # A ledger of its own: the thread reads manifests while the round reads others.
        self.ledger, self.log, self.background = (
            Ledger(ledger.store, ledger.run, ledger.signer),
            log,
            background,
        )
        self.own, recipe = ledger.signer.replica, ledger.run.recipe
        self.keep, self.every = recipe.bucket.keep_rounds, recipe.bucket.anchor_every
        names = [member.name for member in recipe.fleet()]
        self.offset = names.index(self.own) if self.own in names else 0  # not all at the same time
        self.worker: threading.Thread | None = None
        self.began, self.said = False, ""

    def after(self, round_number: int) -> None:
        """A round was applied. At a start, and then once for every anchor, sweep what is old; never fails."""
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
        except (RunError, Refused, StoreRefused) as error:  # of another's document
            self._say(f"old rounds stay for now: {error}")

    def _say(self, words: str) -> None:
        if words != self.said:
            self.said = words
            self.log(words)

    def sweep(self, round_number: int) -> int:
        """Delete what is old by now; up to which round, of which the anchor stays."""
        horizon = self._horizon(round_number)
        if horizon:
            sweep_payloads(self.ledger, self.own, horizon)
            if self.own in self.ledger.run.closers:
                self._sweep_anchors(horizon)
        return horizon

    def _horizon(self, round_number: int) -> int:
        """The newest anchor that is old enough: all that comes after it can be replayed from it. 0: none."""
        newest = [t for t in self.ledger.believed_anchors(2) if has_files(self.ledger, t)]
        if len(newest) < 2:
            return 0
        older = self.ledger.anchors_down(min(newest[1], round_number - self.keep))
        return next((t for t in older if t and self._is_good(t)), 0)

    def _is_good(self, anchor: int) -> bool:
        with suppress(Refused):
            writer, body = self.ledger.anchor_header(anchor)
            self.ledger.check_witnessed(anchor, body["digest"], writer)
            return has_files(self.ledger, anchor)
        return False

    def _sweep_anchors(self, before: int) -> None:
        """Older ones, but theta^(0). First what makes them whole, so that nobody finds half of one."""
        keys = [key for key in self.ledger.store.list("anchors") if 0 < _round_of(key, 1) < before]
        delete(self.ledger, [key for key in keys if key.endswith("/complete.json")])
        delete(self.ledger, [key for key in keys if not key.endswith("/complete.json")])


def sweep_payloads(ledger: Ledger, replica: str, horizon: int) -> int:
    """Delete what a replica has below its own prefixes of rounds up to `horizon`; how many objects."""
    keys = [key for key in ledger.store.list(f"payloads/{replica}") if 0 < _round_of(key, 2) <= horizon]
    rounds = {_round_of(key, 2) for key in keys}
    delete(ledger, [ledger.commit_key(replica, t) for t in sorted(rounds)])
    delete(ledger, keys)  # after what says that they are there
    return len(keys) + (len(rounds) if ledger.run.commits_by_round else 0)


def delete(ledger: Ledger, keys: Iterable[str]) -> None:
    keys = list(keys)
    ledger.store.together([partial(ledger.store.delete, key) for key in keys])
    ledger.store.tidy({key.rpartition("/")[0] for key in keys})


def _round_of(key: str, place: int) -> int:
    """The round in a key; 0 where there is none."""
    parts = key.split("/")
    return int(parts[place]) if len(parts) > place and re.fullmatch("[0-9]{6,7}", parts[place]) else 0
