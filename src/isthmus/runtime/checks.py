"""Checks on a machine before it takes part in a run."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.config import Recipe
from isthmus.config.model import NamedTensors
from isthmus.data.fingerprint import check_text
from isthmus.data.manifest import MANIFEST
from isthmus.errors import ConfigError
from isthmus.protocol.heartbeat import silent_after
from isthmus.protocol.ledger import Ledger, RunInfo
from isthmus.reading import read_note
from isthmus.replica.picks import checked_corpus
from isthmus.runtime.process import is_running
from isthmus.store.url import is_url


def check_trainable(recipe: Recipe) -> None:
    if isinstance(recipe.model, NamedTensors):
        raise ConfigError(
            "this run trains a model of its users' own programs: start yours with isthmus.OuterSync(model, "
            "key=...), docs/use.md"
        )
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages every step; a fleet needs sparseloco or diloco')
    if recipe.subspace.grassmann_every:
        raise ConfigError("subspace.grassmann_every is for the simulator only; set 0")
    if recipe.model.start and not recipe.subspace.adaptation:
        raise ConfigError("model.start with subspace.adaptation = false is for the simulator only")


def check_start(ledger: Ledger) -> None:
    """Check that theta^(0) is there if the run starts from a folder: `init` may have been cut short."""
    if ledger.run.start and not ledger.has_anchor(0):
        raise ConfigError(
            "theta^(0) of this run is not in its bucket: its `isthmus init` was cut short; init again at "
            "another URL"
        )


def check_corpus(run: RunInfo, elsewhere: str = "") -> None:
    """Check that this machine's text fits the model and is the run's text. Fetch one at a URL."""
    spec = elsewhere or run.recipe.data.corpus
    known = f" of fingerprint {run.corpus}" if run.corpus else ""
    if not is_url(spec) and not spec.startswith("builtin:") and not Path(spec, MANIFEST).exists():
        raise ConfigError(
            f"there is no corpus in {spec} on this machine; this run's is the one{known}: copy its folder "
            "here, or give --corpus the folder or URL where it is"
        )
    corpus = checked_corpus(run.recipe, elsewhere)
    if run.corpus:
        check_text(corpus, spec, run.corpus)


class Taken(ConfigError):
    """Another start of this replica seems to be alive."""


def check_not_taken(ledger: Ledger, replica: str, work: Path | None = None) -> None:
    """Check that no other machine uses this replica's name; ages are by the store's clock.

    After a crash the same command may be typed at once. Then the last heartbeat is that of the incarnation
    recorded in `work`, and the lock there shows whether it still runs.
    """
    found = ledger.heartbeat(replica)
    if found is None or found[0].gone:
        return
    heartbeat, written_at = found
    with contextlib.suppress(OSError):
        if work and not is_running(work) and read_note(work / "incarnation") == heartbeat.incarnation:
            return
    # Not the replica's own clock object: its age tells the closer how long the replica was away.
    age = ledger.store.now(f"members/{replica}/probe/clock") - written_at
    if age < silent_after(ledger.run.recipe, heartbeat):
        raise Taken(
            f"replica {replica} is live in this run (heartbeat {max(age, 0):.0f} s ago); stop it first, or "
            "join as another replica"
        )


LOOK_SECONDS, MOST_WAIT_SECONDS = 5.0, 900.0


def wait_until_free(
    ledger: Ledger,
    replica: str,
    work: Path,
    log: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the name is free, for jobs started by a scheduler: a job killed on another machine may still
    look alive, and no person is there to type the command again."""
    until, told = clock() + MOST_WAIT_SECONDS, False
    while True:
        try:
            return check_not_taken(ledger, replica, work)
        except Taken as taken:
            if clock() >= until:
                raise
            if not told:
                log(f"{taken}. Waiting for it to fall silent: it may be the job before this one")
            told = True
        sleep(LOOK_SECONDS)
