"""Spoilt documents, payloads and folders against every reader, bounded and from a seed.

    .venv/bin/python bench/fuzz.py --documents 20000 --members 20000 --payloads 10000 --folders 2000 --seed 0

A small world is made by real code: corpus, run directory, bucket with keys, exported folders, machines. Each
case spoils one file (four in five of the signed ones are signed again, as by a member gone bad), one payload
(its checksum made to fit) or a folder, and lets readers loose on it: `status`, `ledger`, `report`, `export`,
`generate`, `eval`, `plan`, `compare`, `members`, `logs`, the page, the closer's judgement. A reader may read
or say no; a closer that takes up requests must come through. Whatever else happens is a fault: a traceback, a
hang, more than 1 GiB of memory, a signal, a write where nobody asked for one, a control character on the
terminal. --members: only what members, newcomers and the owner sign for each other. Faults are written to
--keep, one case a line, and --again FILE runs them.
"""

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HARD_SECONDS = 60.0  # after which a case is ended from outside: no alarm reaches a loop in C
PARTS = ("documents", "members", "payloads", "folders")


class Worker:
    """Runs every `step`-th case of one part, and starts again after one that ended its process."""

    def __init__(self, world: Path, part: str, seed: int, start: int, stop: int, step: int) -> None:
        self.world, self.part, self.seed, self.step = world, part, seed, step
        self.next, self.stop = start, stop
        self.results: list[dict[str, Any]] = []

    def run(self) -> None:
        while self.next < self.stop:
            began = self.next
            words = self._once()
            if self.next == began:
                print(f"a worker does not start:\n{words}", file=sys.stderr, flush=True)
                os._exit(1)

    def _once(self) -> str:
        """One process, to the last case or to the one that ended it; its last words."""
        numbers = map(str, (self.seed, self.next, self.stop, self.step))
        command = [sys.executable, SUPPORT / "fuzz_worker.py", self.world, self.part, *numbers]
        with tempfile.TemporaryFile("w+") as errors:
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, env=ENVIRONMENT)
            case, why = self._listen(child)
            child.kill()
            code = child.wait()
            errors.seek(0)
            words = errors.read()[-3000:]
        if case is not None:
            why = why or (f"signal {-code}" if code < 0 else f"ended: {words.strip().splitlines()[-1:]}")
            fault = f"the process: {why}"
            self.results.append({"case": case, "fault": fault, "seconds": 0.0, "outcomes": {}})
        return words

    def _listen(self, child: subprocess.Popen[str]) -> tuple[dict[str, Any] | None, str]:
        """(the case that was begun and not ended, why it is given up) when there is no more to hear."""
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in child.stdout or ():
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        case = None
        while True:
            try:
                line = lines.get(timeout=HARD_SECONDS)
            except queue.Empty:
                return case, f"not done after {HARD_SECONDS:.0f} s, in C"
            if not line:
                return case, ""
            told = json.loads(line)
            if "begin" in told:
                case, self.next = told["case"], told["begin"] + self.step
            else:
                self.results.append(told | {"case": case})
                case = None


def run_part(world: Path, part: str, seed: int, count: int, workers: int) -> list[dict[str, Any]]:
    crew = [Worker(world, part, seed, i, count, workers) for i in range(workers)]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in crew]
    began, told = time.monotonic(), set[str]()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(10.0) if threads[0].is_alive() else time.sleep(1.0)
        done = sum(len(worker.results) for worker in crew)
        found = [result["fault"] for worker in crew for result in list(worker.results) if result["fault"]]
        for fault in found:
            if same(fault) not in told:  # at once: a long run need not come to its end
                print(f"{part}: {fault}", file=sys.stderr, flush=True)
                told.add(same(fault))
        rate = done / (time.monotonic() - began)
        words = f"{part}: {done:,} of {count:,}, {rate:.0f} a second, {len(found)} faults"
        print(words, file=sys.stderr, flush=True)
    return [result for worker in crew for result in worker.results]


def same(fault: str) -> str:
    """Faults that differ only in what was drawn are one."""
    return re.sub(r"'.*'|\".*\"", "...", re.sub(r"\d{3,}", "N", fault))[:160]


def table(found: dict[str, list[dict[str, Any]]], seconds: dict[str, float]) -> str:
    heads = ("cases", "read", "refused", "faults", "slowest", "memory", "in all")
    widths = (8, 9, 9, 8, 10, 10, 9)
    lines = [" " * 12 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for part, results in found.items():
        outcomes = Counter[str]()
        for result in results:
            outcomes.update(result["outcomes"])
        faults = sum(bool(result["fault"]) for result in results)
        slowest = max((result["seconds"] for result in results), default=0.0)
        grown = max((result.get("grown_mib", 0) for result in results), default=0)
        lines.append(
            f"{part:<12}{len(results):>8,}{outcomes['read']:>9,}{outcomes['refused']:>9,}{faults:>8,}"
            f"{slowest:>8.1f} s{grown:>6} MiB{seconds[part]:>7.0f} s"
        )
    return "\n".join(lines)


def again(path: Path, world: Path) -> int:
    """Cases that were kept, here in this process."""
    from fuzz_cases import Fault, run_case
    from fuzz_worker import copy_of

    failed = 0
    with copy_of(world):
        for line in path.read_text().splitlines():
            try:
                run_case(json.loads(line)["case"], world)
            except Fault as fault:
                failed += 1
                print(f"{fault}\n    {line[:300]}")
    print(f"{failed} of the kept cases fail")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for part, count in zip(PARTS, (20_000, 20_000, 10_000, 2_000), strict=True):
        parser.add_argument(f"--{part}", type=int, default=count, metavar="N", help=f"{count}; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the cases that failed there")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run the cases of such a file only")
    args = parser.parse_args()
    from fuzz_world import make_world

    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        world = make_world(Path(folder, "world"))
        if args.again:
            return again(args.again.resolve(), world)
        found: dict[str, list[dict[str, Any]]] = {}
        seconds: dict[str, float] = {}
        for part in PARTS:
            if count := getattr(args, part):
                began = time.monotonic()
                found[part] = run_part(world, part, args.seed, count, args.workers)
                seconds[part] = time.monotonic() - began
    faults = [result for results in found.values() for result in results if result["fault"]]
    if args.keep:
        args.keep.write_text("".join(json.dumps(result) + "\n" for result in faults))
    kinds = Counter(same(result["fault"]) for result in faults)
    for words, number in kinds.most_common():
        print(f"{number:>6}  {words}")
    print(table(found, seconds))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
