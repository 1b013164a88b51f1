"""What must hold of a run of `struck`: one history, each change once, each sequence at one place."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from faults import kills

from isthmus.cli.main import main
from isthmus.protocol.access import open_ledger
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay


def check_run(folder: Path, url: str, num_changes: int) -> list[str]:
    """What is wrong, in words; nothing where all is well. The fleet has stopped."""
    ledger = open_ledger(url)
    listed = [int(Path(key).stem) for key in ledger.store.list("manifests")]
    if not listed or listed != list(range(1, len(listed) + 1)):
        return [f"the manifests are {listed}"]
    replay, truth, manifests = Replay(ledger), dict[int, str](), list[Manifest]()
    truth[0] = replay.digest()[:16]
    while (manifest := replay.step()) is not None:
        truth[manifest.round] = replay.digest()[:16]
        manifests.append(manifest)
    problems = [p for path in sorted((folder / "logs").glob("*.log")) for p in kills.check_log(path, truth)]
    problems += check_changes(ledger, manifests, num_changes)
    problems += check_reads(ledger, manifests, folder / "reads")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        status = main(["ledger", "verify", url])
    return problems + [f"ledger verify: {said.getvalue().strip()}"] * bool(status)


def check_changes(ledger: Ledger, manifests: list[Manifest], num_changes: int) -> list[str]:
    """One document for each change, taken up in order and for good."""
    written, named = ledger.membership.newest.number, [m.next_epoch for m in manifests]
    problems = [f"{written} documents for {num_changes} changes"] * (written != num_changes)
    if named[-1] != written or named != sorted(named):
        problems.append(f"the manifests name the epochs {named}")
    return problems


def check_reads(ledger: Ledger, manifests: list[Manifest], reads: Path) -> list[str]:
    """Every batch that was read is where the run's order puts it, by whoever trained it; no place belongs to
    two; whoever counted in a round has read all of its share."""
    places, begun = dict[tuple[str, int], range](), 0
    for manifest in [*manifests, None]:  # the last: of the round that is open
        t = manifest.round if manifest else len(manifests) + 1
        recipe = ledger.at(t).recipe
        for step in range((t - 1) * recipe.outer.inner_steps, t * recipe.outer.inner_steps):
            for member in recipe.fleet():
                places[member.name, step] = range(begun, begun := begun + recipe.batch_of(member.config))
    problems, there = list[str](), read_places(reads)
    for (replica, step), found in there.items():
        if found != {places.get((replica, step))}:
            problems.append(
                f"{replica} reads {found} in inner step {step}, not {places.get((replica, step))}"
            )
    for manifest in manifests:
        steps = ledger.at(manifest.round).recipe.outer.inner_steps
        for replica in [entry.replica for entry in manifest.entries]:
            missed = [
                s
                for s in range((manifest.round - 1) * steps, manifest.round * steps)
                if (replica, s) not in there
            ]
            problems += [f"round {manifest.round} counts {replica}, who never read {missed}"] * bool(missed)
    return problems


def read_places(reads: Path) -> Mapping[tuple[str, int], set[range]]:
    """(replica, inner step) -> every share that any start of it has read there."""
    found = defaultdict[tuple[str, int], set[range]](set)
    for line in reads.read_text().splitlines():
        replica, step, first, count = line.split()
        found[replica, int(step)].add(range(int(first), int(first) + int(count)))
    return found
