"""A fleet in one process: real trainers and closers over one folder, in virtual time.

Each replica has a launcher, which starts it again after a kill and tells the bucket that its worker ended.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from returning import Seat
from virtual_time import BEGIN, Actor, Killed, Strike, VirtualStore, VirtualTime, date_all

from isthmus.config import Recipe
from isthmus.data.tokens import Batches
from isthmus.errors import RunError
from isthmus.layout.deal import Deal
from isthmus.outer.rounds import run_rounds
from isthmus.protocol.access import OWNER_KEY, check_owner, open_ledger
from isthmus.protocol.heartbeat import WAITING, Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.membership import Admitted, Changes, table_of
from isthmus.protocol.patience import Patience
from isthmus.protocol.replay import Replay
from isthmus.protocol.trust import Signer, load_signer, new_secret, save_secret
from isthmus.runtime.create import create
from isthmus.runtime.heartbeat import HeartbeatThread
from isthmus.runtime.trainer import Trainer

WRITES = ("put", "create", "copy")
LAUNCHER_SECONDS = 0.25  # between two looks of a launcher at its worker


class Process(Seat):
    """One start after the other of a replica, each with an incarnation of its own."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        super().__init__(fleet.recipe, fleet.folder, name)
        self.fleet, self.num_starts = fleet, 0
        self.signer = load_signer(fleet.folder / "keys" / f"{name}.key", name)
        self.restart_seconds: float | None = 1.0  # None: a kill is for good
        self.step_seconds = fleet.step_seconds
        self.shares: dict[int, Deal] = {}  # round -> its share of the data
        self.strikes: dict[str, Strike] = {}  # "before" or "after" a request to the store
        self.wrong_by = 0.0  # seconds by which its machine's clock is wrong
        self.prepare: Callable[[Trainer], None] = lambda trainer: None  # each start, before it restores

    def open(self) -> VirtualStore:
        self.store = VirtualStore(self.fleet.url, self.fleet.time, self.clock)
        for when, strike in self.strikes.items():
            setattr(self.store.strikes, when, strike)
        return self.store

    def clock(self) -> float:
        return self.fleet.time.clock() + self.wrong_by

    def patience(self) -> Patience:
        return Patience(self.said.append, clock=self.clock, sleep=self.fleet.time.sleep)

    def deal(self, batches: Batches, share: Deal) -> None:
        super().deal(batches, share)
        self.shares[share.first_step // share.num_steps + 1] = share

    def launch(self) -> None:
        """What a launcher does: start the worker, and when it was killed say so and start the next."""
        time = self.fleet.time
        while True:
            self.num_starts += 1
            self.incarnation = f"{self.num_starts:016x}"
            worker = time.start(self.name, self.work)
            while not worker.over:
                time.sleep(LAUNCHER_SECONDS)
            if not isinstance(worker.fault, Killed):
                return
            self.say_ended()
            if self.restart_seconds is None:
                return
            time.sleep(self.restart_seconds)

    def say_ended(self) -> None:
        store = VirtualStore(self.fleet.url, self.fleet.time, self.clock)
        Ledger(store, self.fleet.run, self.signer).beat(
            Heartbeat(incarnation=self.incarnation, state=WAITING, awaiting="the next start")
        )

    def work(self) -> None:
        trainer = self.come()
        self.prepare(trainer)
        heart = trainer.session.heart
        time = self.fleet.time
        time.start(self.name, partial(self._beat, heart))

        def progress(h: int) -> None:
            time.sleep(self.step_seconds)

        try:
            rounds = range(trainer.resume() + 1, self.recipe.outer.rounds + 1)
            run_rounds(trainer, rounds, progress, lambda t, seconds: None)
        finally:
            heart.ended.set()
        trainer.finish()
        trainer.status.state = "finished"
        heart.beat()
        self.fleet.seconds = time.now - BEGIN

    def _beat(self, heart: HeartbeatThread) -> None:
        while not heart.ended.is_set():
            with suppress(RunError):  # the next one may get through
                heart.beat()
            self.fleet.time.sleep(heart.every)


class Fleet:
    """The full replicas of a recipe."""

    def __init__(
        self, recipe: Recipe, folder: Path, step_seconds: float = 1.0, closers: Sequence[str] | None = None
    ) -> None:
        self.recipe, self.folder, self.url = recipe, folder, str(folder / "bucket")
        self.step_seconds, self.time = step_seconds, VirtualTime()
        self.seconds = 0.0  # until the last replica had done all rounds
        self.run = create(recipe, self.url, folder / "keys", closers)
        date_all(self.url, self.time)
        self.processes = {m.name: Process(self, m.name) for m in recipe.fleet() if m.config.kind == "full"}

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def at(self, seconds: float, what: Callable[[], object]) -> Actor:
        """So long after the fleet began."""

        def later() -> None:
            self.time.sleep(seconds)
            what()

        return self.time.start(f"at {seconds:g}", later)

    def kill(self, name: str, at: float) -> None:
        self.at(at, lambda: self.time.kill(name))

    def go(self, late: dict[str, float] | None = None) -> None:
        """Start the replicas, some of them later, and go on until all have ended."""
        for name, process in self.processes.items():
            begin = (late or {}).get(name)
            if begin is None:
                self.time.start(f"launcher of {name}", process.launch)
            else:
                self.at(begin, process.launch)
        self.time.run()

    def order(self, **changes: Any) -> None:
        """The owner's word: `revoked=["rack-1"]`, `rounds=6`."""
        ledger = self.ledger
        owner = check_owner(ledger.run, self.folder / "keys" / OWNER_KEY)
        ledger.membership.order(owner, Changes(**changes))

    def invite(self, *names: str, closes: bool = False) -> None:
        """Replicas like the first one. Nobody starts them: `fleet[name].launch()` does."""
        table = table_of(self.recipe.replicas[0])
        secrets = {name: new_secret() for name in names}
        keys = {name: Signer(name, secret).public_key for name, secret in secrets.items()}
        self.order(admitted=[Admitted(name, key, table, closes) for name, key in keys.items()])
        for name, secret in secrets.items():
            save_secret(self.folder / "keys" / f"{name}.key", secret, self.run.digest)
            self.processes[name] = Process(self, name)
            self.processes[name].recipe = self.ledger.run.recipe

    # What it came to

    def check_no_batch_is_dealt_twice(self) -> None:
        places = [
            share.place(step) + i
            for process in self.processes.values()
            for share in process.shares.values()
            for step in range(share.first_step, share.first_step + share.num_steps)
            for i in range(share.batch)
        ]
        assert len(set(places)) == len(places) > 0

    @property
    def ledger(self) -> Ledger:
        return open_ledger(self.url)

    def counted(self) -> dict[int, list[str]]:
        """Round -> who counted in it."""
        ledger = self.ledger
        return {
            t: [entry.replica for entry in ledger.manifest(t).entries]
            for t in range(1, ledger.last_round() + 1)
        }

    def anchors(self) -> dict[int, set[str]]:
        """Round -> every digest that any start of any replica ever said of it."""
        said: dict[int, set[str]] = {}
        for process in self.processes.values():
            for t, digests in process.anchors().items():
                said.setdefault(t, set()).update(digests)
        return said

    def check_one_history(self) -> None:
        """All rounds are settled, and every digest that was ever said is what the bucket gives."""
        replay, said = Replay(self.ledger), self.anchors()
        while replay.step() is not None:
            assert said.get(replay.round, set()) <= {replay.digest()[:16]}, f"round {replay.round}"
        assert replay.round == self.recipe.outer.rounds
        assert said.keys() >= set(range(1, replay.round + 1))


def kill_at_write(process: Process, number: int, when: str) -> None:
    """Let it be killed at its `number`-th write, "before" the object is there or "after" it."""
    left = [number]

    def strike(verb: str, key: str) -> None:
        if verb in WRITES:
            left[0] -= 1
            if left[0] == 0:
                process.fleet.time.kill(process.name)

    process.strikes[when] = strike


def strike_once(process: Process, when: str, verb: str, key: str, what: Callable[[], object]) -> None:
    """Let something happen "before" or "after" the first such request of any of its starts."""
    left = [1]

    def strike(done: str, at: str) -> None:
        if left[0] and (done, at) == (verb, key):
            left[0] = 0
            what()

    process.strikes[when] = strike


def kill_at_commit(process: Process, round_number: int, when: str) -> None:
    """Kill it when all shards of an update are there, "before" its commit is or "after" it."""
    key = f"commits/{round_number:06d}/{process.name}.json"
    strike_once(process, when, "create", key, lambda: process.fleet.time.kill(process.name))


def storm(fleet: Fleet, seed: int, num_kills: int, seconds: float) -> None:
    """SIGKILLs at random times."""
    chance, names = random.Random(seed), sorted(fleet.processes)
    for _ in range(num_kills):
        fleet.kill(chance.choice(names), chance.uniform(0.0, seconds))
