"""A real fleet on this machine against plain training: whole rounds, in turns, on a GPU when there is one.

    python bench/fleet.py --sizes 178m --batch 32 --inner-steps 50 --rounds 5 [--mps] [--out FILE.json]
    python bench/fleet.py --parts startup
    python bench/fleet.py                                 without a GPU: a tiny model, to try the bench itself

Parts: (a) plain training, compiled, bf16, fused AdamW, measured before and after the others; (b) one full
replica under `isthmus join`; (c) a pipelined replica of four stages on the one device, at `none` and at 1/8;
(d) two full replicas that share the device. A round of (b) to (d) counts whole: its tokens over the seconds
between its manifest and the one before; the first round, which holds the start, is left out. "Standing
still" is the share of a round outside its inner steps. A further part, startup: the seconds from `join` to
the first inner step. All is made in a temporary folder, and removed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fleet_table import Result, line, table
from joined import Failed, JoinedRun, mps_server, random_corpus, rounds_of, speed

from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.model import presets

RECIPE = """
name = "bench"
[model]
preset = "{size}"
context = {context}
[data]
corpus = "{corpus}"
eval_batches = 1
[inner]
batch = {batch}
micro_batches = {micro_batches}
lr = 1e-3
[outer]
inner_steps = {inner_steps}
rounds = {rounds}
values = "2bit"
[bucket]
deadline_seconds = 3600
heartbeat_seconds = {heartbeat_seconds}
"""
FULL = '[[replicas]]\nname = "full"\ncount = {count}\n'
STAGES = '[[replicas]]\nname = "stages"\nkind = "pipelined"\nstages = 4\ncompression = "{compression}"\n'
PARTS = ("a", "b", "c", "d", "startup")
START_STEPS = 4  # H of a run that only starts


def say(text: str) -> None:
    print(text, flush=True)


class Bench:
    """One size: its recipes, its folder, and the parts that are measured with them."""

    def __init__(self, args: argparse.Namespace, size: str, folder: Path, mps: dict[str, str]) -> None:
        self.args, self.size, self.folder, self.mps = args, size, folder, mps
        self.context = args.context or presets[size].context
        tokens = max(2**20, 16 * args.batch * self.context)
        self.corpus = args.corpus or random_corpus(folder / "corpus", presets[size].vocab, tokens)
        self.num_runs = 0
        self.results: list[Result] = []

    def recipe(self, fleet: str, **changed: object) -> Recipe:
        args = self.args
        stated = {name: getattr(args, name) for name in ("batch", "micro_batches", "inner_steps", "rounds")}
        stated |= {"size": self.size, "context": self.context, "corpus": self.corpus}
        stated |= {"heartbeat_seconds": 3.0} | changed
        return parse_recipe(RECIPE.format(**stated) + fleet, args.set)

    def full(self, count: int = 1, **changed: object) -> Recipe:
        return self.recipe(FULL.format(count=count), **changed)

    def caches(self, name: str = "caches") -> dict[str, str]:
        folder = self.folder / name
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }

    def options(self) -> list[str]:
        """Of `join`: what was asked for."""
        args, cuda = self.args, self.args.device.startswith("cuda")
        found = ["--device", args.device, *([] if cuda else ["--threads", "1"])]
        if args.save_every is not None:
            found += ["--save-every", str(args.save_every)]
        return [*found, "--no-compile"] if args.no_compile else found

    def run(self, recipe: Recipe, env: dict[str, str]) -> JoinedRun:
        self.num_runs += 1
        folder = self.folder / f"run-{self.num_runs}"
        return JoinedRun(recipe, folder, self.caches() | env, self.options())

    def end(self, run: JoinedRun) -> None:
        """Keep its logs where they are wanted, and remove gigabytes of states at once."""
        run.stop()
        if self.args.logs:
            self.args.logs.mkdir(parents=True, exist_ok=True)
            for log in run.folder.glob("*.log"):
                shutil.copy(log, self.args.logs / f"{self.size}-{run.folder.name}-{log.name}")
        shutil.rmtree(run.folder, ignore_errors=True)

    # The parts

    def plain(self, when: str) -> Iterator[Result]:
        """(a), in a process of its own, so that it holds no memory of the device afterwards."""
        order = {"device": self.args.device, "rounds": self.args.plain_rounds}
        order |= {"recipe": dump_recipe(self.full()), "compiled": not self.args.no_compile}
        words = [sys.executable, __file__, "plain", json.dumps(order)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env=dict(os.environ) | self.caches())
        try:
            out, _ = process.communicate(timeout=self.args.limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"plain training was not done within {self.args.limit:g} s") from None
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise Failed(f"plain training ended with status {process.returncode}")
        yield {"label": f"plain training, {when}"} | json.loads(out.splitlines()[-1])

    def joined(self, label: str, recipe: Recipe, env: dict[str, str]) -> Iterator[Result]:
        """(b) to (d): every replica under a `join` of its own, to the end of the run."""
        run, deadline = self.run(recipe, env), time.time() + self.args.limit
        try:
            run.join_all()
            for t in range(1, recipe.outer.rounds + 1):
                run.wait(lambda t=t: run.settled(t) is not None, deadline, f"round {t}")
                say(f"  round {t} settled after {(run.settled(t) or 0) - (run.settled(t - 1) or 0):.2f} s")
            run.wait_for_end(deadline)
            starts = {name: run.first_step(name) for name in run.running}
            yield {"label": label, "first_step": starts} | speed(run, rounds_of(run))
        finally:
            self.end(run)

    def startup(self) -> Iterator[Result]:
        """From `join` to the first inner step: cold caches, the same warm, and with a state to restore."""
        recipe = self.full(inner_steps=START_STEPS, rounds=100_000, heartbeat_seconds=0.25)
        for label in ("cold", "warm"):
            run = self.run(recipe, self.caches("cold"))
            try:
                yield {"label": f"start, {label} caches"} | self.one_start(run)
                if label == "warm":
                    limit = time.time() + self.args.limit
                    run.wait(lambda run=run: bool(run.saved("full")), limit, "saved state")
                    run.stop()
                    yield {"label": "start, warm caches, with a state"} | self.one_start(run)
            finally:
                self.end(run)

    def one_start(self, run: JoinedRun) -> Result:
        """What was reached when, as seen from outside; the worker's own line says more."""
        reached: dict[str, Any] = {}
        run.join("full")
        began = run.began["full"]

        def look() -> bool:
            if found := run.find("full", r"\] joining ", began):
                reached.setdefault("supervisor ready", found[0].at - began)
            reached.update(run.first_step("full", by_heartbeat=True) or {})
            return "seconds" in reached

        run.wait(look, time.time() + self.args.limit, "first inner step")
        return {"seconds": reached.pop("seconds"), "told": reached.pop("told"), "reached": reached}

    def measure(self) -> None:
        """All parts, in turns; one that fails is told, and the next begins."""
        under = " under MPS" if self.mps else ""
        turns: list[tuple[str, Callable[[], Iterator[Result]]]] = [
            ("a", lambda: self.plain("before")),
            ("b", lambda: self.joined("one full replica", self.full(), {})),
            ("c", lambda: self.joined(f"four stages, none{under}", self.stages("none"), self.mps)),
            ("c", lambda: self.joined(f"four stages, 1/8{under}", self.stages("1/8"), self.mps)),
            ("d", lambda: self.joined(f"two full replicas{under}", self.full(2), self.mps)),
            ("a", lambda: self.plain("after")),
            ("startup", self.startup),
        ]
        for part, turn in turns:
            if part not in self.args.parts:
                continue
            began = time.time()
            say(f"{self.size}, part {part}")
            try:
                for result in turn():
                    self.results.append({"part": part} | result)
                    say(f"  {line(self.results[-1], 0.0)}")
            except Failed as fault:
                self.results.append({"part": part, "label": f"part {part}", "failed": str(fault)})
                say(f"  FAILED: {fault}")
            say(f"  ({time.time() - began:.0f} s)")

    def stages(self, compression: str) -> Recipe:
        return self.recipe(STAGES.format(compression=compression))


def plain_training(order: dict[str, Any]) -> None:
    """The process of part (a): one line of JSON on stdout."""
    from gpu import Plain

    recipe, device = parse_recipe(order["recipe"]), torch.device(order["device"])
    text, steps = open_corpus(recipe.data.corpus).train, recipe.outer.inner_steps
    batches = Batches(text, recipe.seed, 1, recipe.inner.batch, recipe.model.context)
    plain = Plain(recipe, device, order["compiled"])
    plain.steps(batches, 0, 3)  # compiles
    rates = []
    for index in range(order["rounds"]):
        start = time.perf_counter()
        plain.steps(batches, index * steps, steps)
        rates.append(recipe.round_tokens / (time.perf_counter() - start))
    say(json.dumps({"tokens_per_second": statistics.median(rates), "rates": rates}))


def keep_bytecode(folder: Path) -> None:
    """An ordinary installation has the bytecode of its packages on disk. One without it compiles torch's
    thousands of files at every start, which takes longer than to import them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "isthmus-bytecode")
    modules = (
        "torch._dynamo, torch._inductor.compile_fx, isthmus.runtime.supervisor, isthmus.runtime.recovery"
    )
    subprocess.run([sys.executable, "-c", f"import {modules}, isthmus.simulator.run"], check=True)


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", default=list("abcd"), choices=PARTS)
    add("--sizes", nargs="+", default=["178m" if cuda else "nano"], help="presets (178m; nano on a CPU)")
    add("--batch", type=int, default=32 if cuda else 4, help="rows of a replica's batch (32; 4 on a CPU)")
    add("--context", type=int, default=0 if cuda else 64, help="tokens of a row (the preset's; 64 on a CPU)")
    add("--inner-steps", type=int, default=50 if cuda else 4, metavar="H", help="a round's (50; 4 on a CPU)")
    add("--rounds", type=int, default=5 if cuda else 3, help="of (b) to (d) (5; 3 on a CPU)")
    add("--plain-rounds", type=int, default=2, help="of (a), each time (2)")
    add("--micro-batches", type=int, default=4, help="of a pipelined replica (4)")
    add("--save-every", type=float, metavar="SECONDS", help="passed to `join` (default: its own)")
    add("--no-compile", action="store_true", help="nothing is compiled, (a) neither")
    add("--mps", action="store_true", help="(c) and (d) under NVIDIA's MPS, started and stopped here")
    add("--bytecode", action="store_true", help="Python's bytecode in a folder here, for packages without it")
    add("--device", default="cuda" if cuda else "cpu")
    add("--corpus", type=Path, metavar="DIR", help="a prepared corpus (default: random tokens)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    add("--limit", type=float, default=240.0, metavar="SECONDS", help="of each part (240)")
    add("--dir", type=Path, help="where the temporary folder is made (default: the system's)")
    add("--logs", type=Path, metavar="DIR", help="keep the logs of `join` here")
    add("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["plain"]:
        plain_training(json.loads(sys.argv[2]))
        return 0
    args = arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that children are ended too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "sizes": {}}
    found["arguments"] = {key: str(value) for key, value in vars(args).items()}
    say(f"{name}, torch {torch.__version__}, {found['arguments']}")
    if args.dir:
        args.dir.mkdir(parents=True, exist_ok=True)
    if args.bytecode:
        keep_bytecode(args.dir or Path(tempfile.gettempdir()))
    temporary = tempfile.TemporaryDirectory(prefix="isthmus-fleet-", dir=args.dir, ignore_cleanup_errors=True)
    with temporary as at, mps_server(args.mps, Path(at)) as mps:
        for size in args.sizes:
            bench = Bench(args, size, Path(at).resolve() / size, mps)
            found["sizes"][size] = bench.results
            try:
                bench.measure()
            finally:  # also after Ctrl-C: what was measured is not lost
                say(f"\n{size}, {args.batch} x {bench.context} tokens a step, H = {args.inner_steps}")
                say(table(bench.results))
                if args.out:
                    args.out.write_text(json.dumps(found, indent=1))
    return int(any("failed" in result for results in found["sizes"].values() for result in results))


if __name__ == "__main__":
    sys.exit(main())
