"""`isthmus doctor`: what this machine can do, before it joins a run."""

import argparse
import contextlib
import ipaddress
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import add_json
from isthmus.config import PRESETS
from isthmus.config.checks import choice
from isthmus.errors import ConfigError
from isthmus.runlog.words import duration, size

if TYPE_CHECKING:
    from isthmus.doctor.role import Fit
    from isthmus.doctor.survey import RunToJoin, Survey
    from isthmus.runtime.addresses import Address

PORT = 29510  # of `doctor --listen`

EPILOG = """examples:
  isthmus doctor                               this machine: devices, memory, disk, training rate
  isthmus doctor rack-0.isthmus.toml           can it take that place, and how long will a round take?
  isthmus doctor s3://my-runs/first            and the bucket: credentials, put-if-absent, clock, rates
  isthmus doctor --listen 192.0.2.10           wait for another machine, on this address and port 29510
  isthmus doctor 192.0.2.10                    on that other machine: rate and latency between the two
  isthmus doctor --relay 192.0.2.20:29520      the same through a relay, where the other one listens too
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
        "--relay",
        default="",
        metavar="HOST:PORT",
        help="measure the link through `isthmus relay` there; on both machines, on one with --listen",
    )
    add_json(parser)
    parser.set_defaults(run=doctor, replica="")  # the file names the replica


def doctor(args: argparse.Namespace) -> int:
    """Run all checks, report what is wrong, and end with the lines to write into a recipe."""
    if not 0.1 <= args.seconds <= 60:
        raise ConfigError(f"--seconds is {args.seconds:g}; give one between 0.1 and 60")
    if args.preset:
        choice("--preset", args.preset, tuple(PRESETS))
    if args.listen is not None:
        if args.targets:
            raise ConfigError("--listen waits for other machines; give it no target, or leave it out")
        return listen(args)
    from isthmus.doctor.survey import survey

    buckets, hosts = read_targets(args.targets)
    run = run_to_join(buckets[0], args.replica) if args.replica and buckets else None
    preset = args.preset or (run.recipe.model.preset if run and run.recipe.model.preset in PRESETS else "")
    found = survey(
        *(buckets, hosts),
        run=run,
        relay=parse_relay(args.relay),
        seconds=args.seconds,
        say=_say,
        preset=preset,
        replica=args.replica,
    )
    print(json.dumps(found.to_dict(), indent=2) if args.json else text(found))
    return 0 if found.ok else 1


def run_to_join(url: str, replica: str) -> "RunToJoin | None":
    """Return the run of a replica's file; None if its bucket does not answer, as the checks then report."""
    from isthmus.doctor.survey import RunToJoin
    from isthmus.protocol.access import find_member, open_ledger
    from isthmus.store.retry import StoreError

    try:
        ledger = open_ledger(url)
        manifest = ledger.manifest(ledger.last_round()) if ledger.last_round() else None
    except StoreError:
        return None
    find_member(ledger.run, replica)
    return RunToJoin(ledger.run.recipe, manifest.seconds if manifest else None)


def _say(words: str) -> None:
    print(f"isthmus: {words}", file=sys.stderr, flush=True)


def read_targets(targets: list[str]) -> "tuple[list[str], list[Address]]":
    """Parse buckets and machines, and check every one before trying any."""
    buckets, hosts = [], []
    for target in targets:
        if "/" in target or target.startswith("~") or Path(target).is_dir():
            from isthmus.store.url import parse_url

            parse_url(target)
            buckets.append(target)
        else:
            hosts.append(parse_host(target))
    return buckets, hosts


def parse_host(text: str) -> "Address":
    """Parse HOST, HOST:PORT or [IPV6]:PORT."""
    from isthmus.runtime.addresses import Address

    with contextlib.suppress(ValueError):
        return Address(str(ipaddress.IPv6Address(text)), PORT)
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[3] or PORT) < 65536:
        raise ConfigError(
            f'"{text}" is neither a bucket nor a machine; write s3://bucket/prefix, a folder with a slash '
            f"(./bucket), or HOST:PORT (port {PORT} if none is given)"
        )
    return Address(found[1] or found[2], int(found[3] or PORT))


def listen(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from isthmus.doctor.link_test import serve
    from isthmus.runtime.addresses import Address

    address = parse_host(args.listen) if args.listen else Address("", PORT)
    relay = parse_relay(args.relay)
    where = (
        f"at the relay {relay}" if relay else f"on {address.host or 'all interfaces'}, port {address.port}"
    )
    ask = f"--relay {relay}" if relay else str(Address(address.host or "THIS-MACHINE", address.port))
    with contextlib.suppress(KeyboardInterrupt):
        serve(
            address,
            relay,
            _say,
            lambda: _say(f"listening {where}, until Ctrl-C; on the other machine: isthmus doctor {ask}"),
        )
    print("Stopped listening.")
    return 0


def parse_relay(text: str) -> "Address | None":
    from isthmus.runtime.addresses import Address

    return Address.parse(text, "--relay", "192.0.2.10:29520") if text else None


# The text


def text(found: "Survey") -> str:
    gpus = [
        f"{gpu.device} {gpu.name}, {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}"
        for gpu in found.gpus
    ]
    place = [check for check in found.checks if check.name == "place"]
    lines = [f"{'Yes' if check.ok else 'No'}: {check.words}." for check in place]
    lines += [f"  do: {check.cure}" for check in place if not check.ok] + [""] * bool(place)
    lines += ["This machine", f"  cpu     {found.cpu.name}, {found.cpu.cores} cores"]
    lines += [f"  gpu     {line}" for line in gpus or ["none that torch can use; training runs on the CPU"]]
    lines += ["", "Checks"]
    for check in (check for check in found.checks if check not in place):
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
        f"  {'preset':<14}{'full replica':<34}{'or a stage of':<22}{'its round, full':>16}",
    ]
    for fit in found.fits:
        full = _full(fit.full_batch, fit.full_bytes)
        stage = f"{fit.stages} stages: {size(fit.stage_bytes)}"
        if not fit.stages:
            stage = f"no: needs {size(fit.stage_bytes)}"
        lines.append(f"  {fit.preset:<14}{full:<34}{stage:<22}{_round(fit):>16}")
    lines.append('  a larger batch is trained in parts of that size; recompute = "yes" makes room for more')
    return lines


def _full(batch: int, num_bytes: int) -> str:
    return f"{size(num_bytes)} with inner.batch = {batch}" if batch else f"no: needs {size(num_bytes)}"


def _round(fit: "Fit") -> str:
    return "unknown" if fit.round_seconds is None else duration(fit.round_seconds)
