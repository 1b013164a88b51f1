"""A closer is killed at every single write of an admission, a revocation, a rotation and an extension.

    python bench/each_write.py

Three full replicas on a real S3 server (SeaweedFS), two of them closers; proxies on the way see every write.
Each change is made once undisturbed, which gives its steps: what the closer in turn writes in the round that
takes the change up (R) and in the first one after it (R+1), and what the command or the newcomer writes. Then
the change is made again for each step, and the writer gets SIGKILL: before the write reaches the store, or
after the store has it and before the writer knows. The next case begins when all give again. At the end every
change must be in the chain once, with one history; what was read must be as it was dealt. Exit status 1 when
anything fails. tests/fleet/test_killed_writers.py is its short form.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import servers
from struck import LIMIT_SECONDS, Step, Strike
from struck_checks import check_run
from struck_fleet import StruckFleet

CHANGES = ("admission", "rotation", "rotation of the closer's own key", "extension", "revocation")
FIRST = (
    "membership",
    "manifest",
    "request",
    "invitation",
    "commit",
    "update",
    "copy",
    "end of anchor",
    "anchor",
)
HEADER = f"{'change':32} {'killed at':26} {'the write':9} {'who':8} round settled by all again"


@dataclass
class Table:
    fleet: StruckFleet
    num_documents: int = 0
    guests: int = 0
    steps: dict[str, list[Step]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    not_reached: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def make(self, change: str, strike: Strike | None = None) -> None:
        """One change, and all that must be so before the next."""
        fleet, before = self.fleet, self.fleet.epoch().number
        if change == "admission":
            self.guests += 1
            fleet.admit(f"guest-{self.guests}", strike)
        elif change == "revocation":
            fleet.revoke(fleet.guest, strike)
            if fleet.running[fleet.guest].wait(LIMIT_SECONDS) != 1:
                self.problems.append(f"{fleet.guest} was revoked and ended otherwise")
        elif change == "extension":
            fleet.extend(strike)
        elif change == "rotation":
            fleet.rotate("rack-2", strike)
        else:
            fleet.rotate("rack-0", strike, in_line="rack-0")
        # An owner who types `revoke` again says so again: that one changes nobody.
        twice = strike and strike.after and strike.step.by == "revoke"
        self.num_documents += 2 if twice else 1
        if (written := fleet.epoch().number) != before + (2 if twice else 1):
            self.problems.append(f"the {change} made {written - before} documents ({strike})")

    def record(self, change: str) -> None:
        self.make(change)
        first = self.fleet.watch.first or 0
        self.fleet.all_give(first + 3)  # by then the anchor of R+1 is whole
        steps = [step for step in self.fleet.watch.steps if step.later < 2]
        steps += [Step(0, "invitation", 1, "invite")] * (change == "admission")  # before it begins
        self.steps[change] = sorted(steps, key=lambda s: (s.number, s.later, FIRST.index(s.kind)))
        print(f"{change}: {', '.join(map(str, steps))}", flush=True)

    def strike(self, change: str, step: Step, after: bool) -> None:
        fleet, strike = self.fleet, Strike(step, after)
        self.make(change, strike)
        at = (fleet.watch.first or fleet.ledger.last_round()) + step.later
        fleet.until(lambda: strike.fired or fleet.ledger.last_round() > at + 3, f"{step} in the {change}")
        fleet.all_give(max(at, strike.round))  # an anchor comes later than its round
        seconds, manifest = time.monotonic() - strike.at, fleet.ledger.manifest(at)
        if after and step.by == "rotate":  # typed again when the first is taken up, it is one more rotation
            fleet.all_give(fleet.ledger.last_round() + 1)
            self.num_documents = fleet.epoch().number
        by = manifest.closer if manifest and step.by == "closer" else "-"
        name = f"{change:32} {step!s:26} {'after' if after else 'before':9}"
        if strike.fired:
            self.seconds[change].append(seconds)
            print(f"{name} {strike.victim:8} {at:5} {by:10} {seconds:7.1f} s", flush=True)
        else:
            self.not_reached.append(name)
            print(f"{name} did not come", flush=True)

    def cases(self) -> Iterator[tuple[str, Step | None, bool]]:
        """Changes in turn: who was admitted is revoked. None: undisturbed, since another has cases left."""
        listed = {
            c: [(s, after) for s in steps for after in (False, True)] for c, steps in self.steps.items()
        }
        for i in range(max(map(len, listed.values()))):
            for change, cases in listed.items():
                yield (change, *cases[i]) if i < len(cases) else (change, None, False)


def strike_all(table: Table, changes: Sequence[str], until: float) -> None:
    table.fleet.all_give()
    for change in changes:
        table.record(change)
    print(HEADER, flush=True)
    for change, step, after in table.cases():
        if time.monotonic() > until and change == changes[0]:
            print("the time is over; cases are left", flush=True)
            return
        if step:
            table.strike(change, step, after)
        elif change in ("admission", "revocation"):
            table.make(change)
            table.fleet.all_give(table.fleet.watch.first or 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inner-steps", type=int, default=3)
    parser.add_argument("--one-closer", action="store_true", help="nobody can step in")
    parser.add_argument("--minutes", type=float, default=1e6, help="then no case is begun")
    some = "of these only, by commas; admission and revocation go together"
    parser.add_argument("--changes", default=",".join(CHANGES), help=some)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="isthmus-each-write-")).resolve()
    (folder / "server").mkdir()
    server = servers.start_seaweed(folder / "server")
    if isinstance(server, str):
        print(server, file=sys.stderr)
        return 1
    os.environ |= servers.admins_environment(server.endpoint)
    url, run = f"s3://{servers.BUCKET}/each-write", folder / "run"
    closers = ["rack-0"] if args.one_closer else None
    table = Table(StruckFleet(run, server, url, inner_steps=args.inner_steps, closers=closers))
    began = time.monotonic()
    try:
        strike_all(table, args.changes.split(","), began + 60 * args.minutes)
        ended = table.fleet.stop()
        problems = table.problems + [f"{n} ended with {s}" for n, s in ended.items() if s]
        problems += check_run(run, url, table.num_documents)
    except RuntimeError as error:
        problems = [*table.problems, str(error)]
    finally:
        table.fleet.close()
        server.kill()
    for change, seconds in table.seconds.items():
        median, most = sorted(seconds)[len(seconds) // 2], max(seconds)
        print(f"{change}: {len(seconds)} kills; all give again after {median:.1f} s, at most {most:.1f} s")
    num_kills, rounds = sum(map(len, table.seconds.values())), table.fleet.watch.newest
    print(f"{num_kills} kills; {len(table.not_reached)} writes did not come; {table.num_documents} documents")
    print(f"{rounds} rounds in {time.monotonic() - began:.0f} s")
    print("\n".join(f"FAILED: {p}" for p in problems) or "one history; each change once, each sequence once")
    if problems:
        print(f"logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
