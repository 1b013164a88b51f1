"""`isthmus doctor`: what this machine can do, before it joins a run."""

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.config import PRESETS
from isthmus.config.checks import choice
from isthmus.errors import ConfigError
from isthmus.runlog.words import duration, size

if TYPE_CHECKING:
    from isthmus.doctor.role import Fit
    from isthmus.doctor.survey import Survey

EPILOG = """examples:
  isthmus doctor                               this machine: devices, memory, disk, training rate
  isthmus doctor s3://my-runs/first            and the bucket: credentials, put-if-absent, clock, rates
  isthmus doctor --listen 192.0.2.10           wait for another machine, on this address and port 29510
  isthmus doctor 192.0.2.10                    on that other machine: rate and latency between the two
  isthmus doctor ./bucket 192.0.2.10:29510 --json

A target with :// or a slash, or an existing folder, is a bucket; anything else is HOST or HOST:PORT. What is
put into a bucket is deleted again. Exit status: 0 all is well, 1 a check failed (each says what to do), 2 bad
input.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do: measured training rate, memory, disk, clock, bucket and links",
        description="Measure what this machine can do and check what it needs: devices, memory, training "
        "FLOP/s (counted as `isthmus plan` counts them), disk, and for each target the bucket or the link to "
        "another machine. Ends with the role it can play and the lines to paste into a recipe.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="URL|HOST",
        help="a bucket, or a machine that runs `isthmus doctor --listen`",
    )
    parser.add_argument(
        "--listen",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="answer other machines that measure their link to this one, until Ctrl-C; without an address "
        "on all interfaces. It authenticates nobody, so end it when you are done",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        metavar="X",
        help="duration of each measurement (default: 4); one of "
        "training goes on to five inner steps, and three times as long at most",
    )
    parser.add_argument(
        "--preset",
        default="",
        metavar="NAME",
        help="the model to train with (default: 10m on a CPU, 178m on a GPU); rates differ between sizes, so "
        "take the one you will train",
    )
    parser.add_argument(
        "--replica",
        default="",
        metavar="NAME",
        help="try the bucket with the rights of this replica, which may write below its own name only",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the text")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Check everything, say what is wrong, and end with what to write into a recipe."""
    if not 0.1 <= args.seconds <= 60:
        raise ConfigError(f"--seconds is {args.seconds:g}; it lies between 0.1 and 60")
    if args.preset:
        choice("--preset", args.preset, tuple(PRESETS))
    if args.replica and not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", args.replica):
        raise ConfigError(f'--replica is "{args.replica}"; use letters, digits, "-" and "_"')
    if args.listen is not None:
        if args.targets:
            raise ConfigError("--listen waits for other machines; give it no target, or leave it out")
        return listen(args)
    from isthmus.doctor.survey import survey

    buckets, hosts = read_targets(args.targets)
    if args.replica and not buckets:
        raise ConfigError("--replica is about a bucket's rights; give the bucket's URL too")
    found = survey(buckets, hosts, seconds=args.seconds, say=_say, preset=args.preset, replica=args.replica)
    print(json.dumps(found.to_dict(), indent=2) if args.json else text(found))
    return 0 if found.ok else 1


def _say(words: str) -> None:
    print(f"isthmus: {words}", file=sys.stderr, flush=True)


def read_targets(targets: list[str]) -> tuple[list[str], list[tuple[str, int]]]:
    """Buckets and machines, every one checked before anything is tried."""
    from isthmus.doctor.peer import parse_host

    buckets, hosts = [], []
    for target in targets:
        if "/" in target or target.startswith("~") or Path(target).is_dir():
            with contextlib.suppress(ImportError):  # without obstore the check will fail, and say why
                from isthmus.store.url import parse_url

                parse_url(target)
            buckets.append(target)
        else:
            hosts.append(parse_host(target))
    return buckets, hosts


def listen(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from isthmus.doctor.peer import PORT, Listener, parse_host, shown

    host, port = parse_host(args.listen) if args.listen else ("", PORT)
    listener = Listener(host, port, _say)
    where = f"on {host}" if host else "on all interfaces"
    ask = shown(host or "THIS-MACHINE", listener.port)
    _say(f"listening {where}, port {listener.port}, until Ctrl-C; on the other machine: isthmus doctor {ask}")
    with contextlib.suppress(KeyboardInterrupt):
        listener.serve()
    counts = {name: listener.counts[name] for name in ("served", "sent away", "refused", "lost")}
    said = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    print(json.dumps(counts) if args.json else f"Stopped listening; {said or 'nobody came'}.")
    return 0


# The text


def text(found: "Survey") -> str:
    gpus = [
        f"{gpu.device} {gpu.name}, {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}"
        for gpu in found.gpus
    ]
    lines = ["This machine", f"  cpu     {found.cpu.name}, {found.cpu.cores} cores"]
    lines += [f"  gpu     {line}" for line in gpus or ["none that torch can use; training runs on the CPU"]]
    lines += ["", "Checks"]
    for check in found.checks:
        lines.append(f"  {'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.words}")
        if not check.ok:
            lines.append(f"        do: {check.cure}")
        if check.warning:
            lines.append(f"        warning: {check.warning}")
    if not any(check.name == "clock" for check in found.checks):
        lines.append("  -     clock: compared with a bucket's where its URL is given")
    lines += ["", *roles(found), "", f"Role: {found.role}."]
    if pasted := found.recipe_lines():
        lines += ["", "For its [[replicas]] table in a recipe:", *(f"  {line}" for line in pasted)]
    if found.best:
        lines.append("  # Rates differ between model sizes: --preset measures with the one you will train.")
    if len(found.gpus) > 1:
        lines.append(
            f"  (tflops of one GPU; a full replica with processes = {len(found.gpus)} has as many times, and "
            'with sharding = "full" a model as many times as large)'
        )
    failed = sum(not check.ok for check in found.checks)
    if failed:
        lines += ["", f"{failed} check{'s' * (failed > 1)} failed; do what is said above, then ask again."]
    return "\n".join(lines)


def roles(found: "Survey") -> list[str]:
    from isthmus.doctor.role import BATCH, ROUND_STEPS

    lines = [
        "What fits, by the planner's memory model; a round is "
        f"{ROUND_STEPS} inner steps of {BATCH} sequences",
        f"  {'preset':<8}{'full replica':<34}{'or a stage of':<34}{'its round, full':>16}",
    ]
    for fit in found.fits:
        full = _full(fit.full_batch, fit.full_bytes)
        stage = _stage(fit.stages, fit.micro_batches, fit.stage_bytes)
        lines.append(f"  {fit.preset:<8}{full:<34}{stage:<34}{_round(fit):>16}")
        again = _full(fit.full_batch_recomputed, fit.full_bytes_recomputed)
        stage = _stage(fit.stages_recomputed, fit.micro_batches_recomputed, fit.stage_bytes_recomputed)
        lines.append(f"  {'':<8}{again:<34}{stage:<34}{'recomputed':>16}")
    lines.append(
        '  recomputed: with inner.recompute = true, or recompute = "yes" in its table; a third more compute'
    )
    lines.append(
        "  a larger batch is trained in parts of that size: micro_batches in its table, chosen by itself"
    )
    return lines


def _full(batch: int, num_bytes: int) -> str:
    return f"{size(num_bytes)} with inner.batch = {batch}" if batch else f"no: needs {size(num_bytes)}"


def _stage(stages: int, micro_batches: int, num_bytes: int) -> str:
    if not stages:
        return f"no: needs {size(num_bytes)}"
    return f"{stages} stages, {micro_batches} micro-batches: {size(num_bytes)}"


def _round(fit: "Fit") -> str:
    return "unknown" if fit.round_seconds is None else duration(fit.round_seconds)
