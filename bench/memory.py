"""Predicted against measured peak memory: full replicas and stages of `train`, and the simulator.

    python bench/memory.py                     the CPU cases (about four minutes on two cores)
    python bench/memory.py --case wide         one of them
    python bench/memory.py --device cuda       the simulator with preset 178m on a GPU, 8 replicas, 4 stages

Every case is a run of its own, in processes of its own, and their peaks are what they tell of themselves:
VmHWM on a CPU, torch.cuda.max_memory_allocated (and _reserved) on a GPU. None of these sizes was used to fit
the constants of planner/memory.py. "above the base" leaves out what a process holds beside tensors, so that
400 MB of interpreter and libraries do not hide an error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from fleets import EIGHT

from isthmus.config import Recipe
from isthmus.planner.memory import RUNTIME_BYTES
from isthmus.planner.plan import predict
from isthmus.runlog import RunDir

MODEL = """
name = "memory"
[data]
eval_batches = 1
[model]
width = {width}
layers = {layers}
heads = {heads}
ffn = {ffn}
vocab = {vocab}
context = {context}
[inner]
batch = {batch}
micro_batches = {micro_batches}
[outer]
inner_steps = 4
rounds = 2
keep = {keep}
method = "{method}"
[[replicas]]
name = "rack"
count = {count}
tflops = 0.05
[[replicas]]
name = "edge"
kind = "pipelined"
count = {count}
stages = {stages}
compression = "{compression}"
tflops = 0.05
link = {{ mbps = 10000 }}
"""
DEFAULTS = {
    "keep": 64,
    "method": "sparseloco",
    "count": 1,
    "micro_batches": 4,
    "stages": 2,
    "compression": "1/8",
}
GPU = """
name = "memory"
[model]
preset = "178m"
[data]
eval_batches = 1
[inner]
batch = {batch}
[outer]
inner_steps = 3
rounds = 2
"""


@dataclass(frozen=True)
class Case:
    name: str
    command: tuple[str, ...]
    text: str


def sizes(width: int, layers: int, heads: int, ffn: int, vocab: int, context: int, batch: int, **more) -> str:
    own = {"width": width, "layers": layers, "heads": heads, "ffn": ffn, "vocab": vocab, "context": context}
    return MODEL.format(**DEFAULTS | own | {"batch": batch} | more)


TRAIN, SIMULATE = ("train",), ("simulate",)
CASES = (
    Case("deep", TRAIN, sizes(384, 9, 6, 1024, 2048, 256, 8, micro_batches=8, stages=3, compression="1/4")),
    Case("vocab", TRAIN, sizes(192, 4, 4, 512, 32768, 128, 12, micro_batches=6, compression="none")),
    Case("wide", TRAIN, sizes(1024, 4, 8, 2816, 1024, 64, 4, compression="1/16", keep=32)),
    Case("diloco", TRAIN, sizes(576, 6, 9, 1536, 2048, 64, 6, method="diloco", micro_batches=3)),
    Case("mixed", SIMULATE, sizes(256, 6, 4, 688, 4096, 256, 8, count=2)),
    Case("turns", ("simulate", "--mode", "turns"), sizes(320, 4, 5, 864, 2048, 128, 12, count=2)),
    Case("heavy", SIMULATE, sizes(768, 4, 12, 2048, 8192, 64, 2, count=2, micro_batches=2, keep=128)),
    Case("logits", SIMULATE, sizes(128, 3, 4, 352, 24576, 128, 8, stages=3)),
    Case("dense", SIMULATE, sizes(512, 4, 8, 1408, 4096, 80, 6, method="diloco", micro_batches=3)),
    Case("adamw", SIMULATE, sizes(512, 6, 8, 1376, 2048, 128, 4, count=2, method="adamw")),
)


def run(case: Case, folder: Path, device: str) -> RunDir:
    recipe, where = folder / f"{case.name}.toml", folder / case.name
    recipe.write_text(case.text, encoding="utf-8")
    command, *options = case.command
    program = [sys.executable, "-m", "isthmus", command, str(recipe), "--run", str(where), *options]
    done = subprocess.run([*program, "--device", device], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{case.name}: {' '.join(program)} failed:\n{done.stderr[-2000:]}")
    return RunDir.open(where)


def as_run(recipe: Recipe, precision: str) -> Recipe:
    """`auto` is what the run made of it."""
    return replace(recipe, inner=replace(recipe.inner, precision=precision))


def of_simulator(case: Case, run: RunDir) -> list[dict]:
    about = run.about
    base = 0 if about["device_type"] == "cuda" else RUNTIME_BYTES
    line = {
        "case": case.name,
        "process": f"simulator, {about['mode']}, {about['grad_accum_steps']} pieces",
        "base": base,
    }
    line |= {"predicted": about["predicted_bytes"], "measured": about["peak_bytes"]}
    return [line | ({"reserved": about["reserved_bytes"]} if "reserved_bytes" in about else {})]


def of_processes(case: Case, run: RunDir) -> list[dict]:
    lines = []
    rows = run.rows()
    for kind in predict(as_run(run.recipe, run.about["precision"])).kinds:
        told = [row["measured"][kind.name]["peak_bytes"] for row in rows if kind.name in row["measured"]]
        for stage, memory in enumerate(kind.memory):
            name = f"stage {stage} of {kind.stages}" if kind.stages > 1 else "full replica"
            line = {
                "case": case.name,
                "process": name,
                "base": memory["runtime"],
                "predicted": memory["total"],
            }
            lines.append(line | {"measured": max(peaks[stage] for peaks in told)})
    return lines


def told(line: dict) -> str:
    predicted, measured, base = line["predicted"], line["measured"], line["base"]
    above = f"{(predicted - base) / (measured - base):6.2f}" if measured > base and base else "     -"
    reserved = f"  reserved {line['reserved'] / 2**20:9,.0f}" if "reserved" in line else ""
    return (
        f"{line['case']:8} {line['process']:34} {predicted / 2**20:9,.0f} {measured / 2**20:9,.0f} "
        f"{predicted / measured:6.2f} {above}{reserved}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the one GPU case")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--batch", type=int, default=32, help="of a replica, on the GPU (default 32)")
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.case or case.name in args.case]
    if args.device.startswith("cuda"):
        chosen = [Case("178m", SIMULATE, GPU.format(batch=args.batch) + EIGHT)]
    print(f"{'case':8} {'process':34} {'predicted':>9} {'measured':>9} {'ratio':>6} above the base (MiB)")
    lines, folder = [], tempfile.TemporaryDirectory(prefix="isthmus-memory-")
    with folder as name:
        for case in chosen:
            done = run(case, Path(name), args.device)
            found = of_simulator(case, done) if case.command[0] == "simulate" else of_processes(case, done)
            lines += found
            print("\n".join(map(told, found)), flush=True)
    worst = max(lines, key=lambda line: abs(line["predicted"] / line["measured"] - 1))
    share = abs(worst["predicted"] / worst["measured"] - 1)
    print(f"furthest off: {worst['case']}, {worst['process']}: {100 * share:.0f} % (wanted: at most 15 %)")


if __name__ == "__main__":
    main()
