"""`isthmus plan`: what a run will take, before anyone rents a machine. Loads no torch if rates are stated."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import add_json, add_recipe
from isthmus.cli.plan_table import table
from isthmus.config import Recipe, load_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.files import write_new

if TYPE_CHECKING:
    from isthmus.planner.plan import Prices

EPILOG = """examples:
  isthmus plan demo
  isthmus plan 512m-het-half-k192 --tflops 160 --set replicas.edge.link.mbps=100
  isthmus plan 178m-recommended --tflops 60 --set replicas.edge.link.mbps=100 \\
      --set replicas.edge.compression=auto --set replicas.edge.wire=auto  the least loss of what fits the link
  isthmus plan demo --price-per-hour rack=2.5 --price-per-hour edge=0.3 --egress-per-gb 0.09
  isthmus plan --suggest machines.toml --preset 178m             from a list of machines to a recipe
  isthmus plan --suggest machines.toml 512m-dense --set inner.batch=8 --to mine.toml

a list of machines, such as machines.toml (docs/machines.toml in the repository has more):
  [[sites]]
  name = "home"
  link = { mbps = 940, latency_ms = 0.5 }       between two machines of the site; left out: there is none
  bucket_link = { mbps = 40, latency_ms = 25 }
  [[machines]]
  name = "pc"
  site = "home"
  count = 3
  memory_gb = 11.5                              these two as `isthmus doctor` prints them there
  tflops = 20
"""
BASE = 'name = "suggested"\n[model]\npreset = "{preset}"\n[[replicas]]\nname = "none"\n'
PRICES = ("price_per_hour", "egress_per_gb", "put_per_million", "get_per_million")
TAKES = {  # the options that each kind of plan uses; others are refused
    "recipe": ("recipe", "set", "tflops", "device", *PRICES),
    "suggest": ("recipe", "set", "suggest", "preset", "to"),
}
MOST_MEASURED = 1e11  # operations of an inner step that any machine finishes in seconds


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict time, bytes, utilisation, memory and money of a recipe, without running it",
        description="Predict what a recipe's run takes on its fleet and links: seconds, utilisation, bytes "
        "per link, the price of compression in loss, requests, memory per process and money. Nothing is "
        "started. Where the recipe of a small model states no training rate, such as the demo's, it is "
        "measured here, and the plan is that of `isthmus train` on this machine.",
        epilog=EPILOG,
    )
    add_recipe(parser)
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="training rate of a machine whose own the recipe does not state, in TFLOP/s",
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="[REPLICA=]NAME",
        help="assume 40 %% of a well-known device's stated peak instead, and its memory: h100, a100, l40s, "
        "rtx-4090, ...; for the machines of one table, edge=l4; may be repeated",
    )
    parser.add_argument(
        "--price-per-hour",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="of one machine of the replicas of this name; may be repeated",
    )
    parser.add_argument("--egress-per-gb", type=float, metavar="PRICE", help="of reading from the bucket")
    parser.add_argument("--put-per-million", type=float, metavar="PRICE", help="of writing requests")
    parser.add_argument("--get-per-million", type=float, metavar="PRICE", help="of reading requests")
    parser.add_argument(
        "--suggest",
        metavar="MACHINES",
        help="a list of machines and links (TOML, see docs/machines.toml): print a recipe for them, with "
        "reasons in comments; model and optimisers from the recipe given beside it, or from --preset",
    )
    parser.add_argument("--preset", metavar="NAME", help="with --suggest: the model (default: 178m)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="with --suggest: where the recipe goes")
    add_json(parser)
    parser.set_defaults(run=plan)


def plan(args: argparse.Namespace) -> int:
    """Predict the bytes, seconds and utilisation of a recipe without running it."""
    asked = next((way for way in ("suggest", "recipe") if getattr(args, way)), None)
    if asked is None:
        raise ConfigError("give a recipe to plan, or --suggest MACHINES")
    for name in {name for names in TAKES.values() for name in names} - set(TAKES[asked]):
        if getattr(args, name) not in (None, []):
            what = "a recipe" if name == "recipe" else f"--{name.replace('_', '-')}"
            ways = [f"--{way}" if way != "recipe" else "a recipe" for way in TAKES if name in TAKES[way]]
            other = "a plan" if asked == "recipe" else f"--{asked}"
            raise ConfigError(f"{what} goes with {' or '.join(ways)}; {other} makes no use of it")
    if asked == "suggest":
        return suggested(args)
    from isthmus.planner.auto import resolve
    from isthmus.planner.plan import check_names, predict

    for name in ("egress_per_gb", "put_per_million", "get_per_million"):
        if not 0 <= (getattr(args, name) or 0) < math.inf:  # also refuses NaN
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it is 0 or more")
    if args.tflops is not None and not 0 < args.tflops < math.inf:
        raise ConfigError(f"--tflops is {args.tflops}; it is above 0")
    tflops, memory_gb, settings, assumed = assumed_machines(args)
    measured: list[str] = []
    recipe = load_recipe(args.recipe, [*args.set, *settings])
    if tflops and all(r.tflops and (r.memory_gb or not memory_gb) for r in recipe.replicas):
        raise ConfigError(
            f"every replica of {recipe.name} states its own rate; change one by --device REPLICA=NAME or "
            "--set replicas.NAME.tflops=X"
        )
    prices = read_prices(args)
    check_names(recipe, prices.per_hour if prices else {})
    if not tflops and not any(replica.tflops for replica in recipe.replicas):
        recipe, measured = measured_if_small(recipe)
    forecast = predict(recipe, tflops, prices, memory_gb=memory_gb)
    print(forecast.to_json() if args.json else table(resolve(recipe, tflops, memory_gb)[0], forecast))
    for words in [*(f"Measured: {words}" for words in measured), *(f"Assumed: {words}" for words in assumed)]:
        print(f"{words}.", file=sys.stderr if args.json else sys.stdout)
    return 0


def measured_if_small(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Measure this machine's rate for a recipe that states none, meant for `train` on this machine.

    Large models are not measured: the machine that plans is seldom the one that trains.
    """
    from isthmus.planner.cost import step_flops

    if max(step_flops(recipe, replica) for replica in recipe.replicas) > MOST_MEASURED:
        return recipe, []
    print("measuring an inner step on this machine", file=sys.stderr)
    from isthmus.replica.speed import measured_here

    here, rate = measured_here(recipe)
    processes = sum(replica.count * max(replica.stages, replica.processes) for replica in recipe.replicas)
    words = (
        f"{rate.tflops:.3g} TFLOP/s of one process alone, {rate.sample}; {processes} of them share this "
        f"machine's cores. The plan is of `isthmus train` here; for a fleet of other machines state tflops "
        "(`isthmus doctor` there measures it), or give --tflops or --device"
    )
    return here, [words, *([rate.warning] if rate.warning else [])]


def assumed_machines(args: argparse.Namespace) -> tuple[float, float, list[str], list[str]]:
    """Read --tflops and --device: rate and GB of all machines without them, settings of tables, notes."""
    from isthmus.planner.devices import assume

    rate, memory_gb, settings, words = assume(args.device)
    if rate and args.tflops:
        raise ConfigError("--tflops and --device both give a rate to all machines; give one of them")
    return rate or args.tflops or 0.0, memory_gb, settings, words


def suggested(args: argparse.Namespace) -> int:
    """Print a recipe for a list of machines, or write it to a new file."""
    from isthmus.planner.machines import load_machines
    from isthmus.planner.suggest import suggest
    from isthmus.planner.suggest_text import recipe_text

    if args.recipe and args.preset:
        raise ConfigError("--preset and a recipe both give the model; drop one of them")
    if args.to and args.to.exists():
        raise ConfigError(f"{args.to} exists; give --to another name")
    if args.to and not args.to.absolute().parent.is_dir():
        raise ConfigError(f"--to is {args.to}, but there is no folder {args.to.parent}; make it first")
    machines = load_machines(args.suggest)
    if args.recipe:
        base = load_recipe(args.recipe, args.set)
    else:
        base = parse_recipe(BASE.format(preset=args.preset or "178m"), args.set)
    found = suggest(base, machines, {key.partition("=")[0].strip() for key in args.set})
    text = recipe_text(found, args.suggest)
    if args.to:
        try:
            write_new(args.to, text)
        except OSError as error:
            raise ConfigError(f"cannot write {args.to}: {error.strerror}; give --to another name") from None
    if args.json:
        body = {"recipe": text, "why": found.why, "left_out": found.left_out}
        print(json.dumps(body | {"forecast": asdict(found.forecast)}, indent=2))
    else:
        print(f"Recipe: {args.to}" if args.to else text, end="\n" if args.to else "")
    return 0


def read_prices(args: argparse.Namespace) -> "Prices | None":
    from isthmus.planner.plan import Prices

    per_hour = {}
    for given in args.price_per_hour:
        name, _, price = given.partition("=")
        try:
            per_hour[name] = float(price)
        except ValueError:
            raise ConfigError(f'--price-per-hour is "{given}"; write it as rack=2.5') from None
        if not 0 <= per_hour[name] < float("inf"):
            raise ConfigError(f'--price-per-hour is "{given}"; a price is 0 or more')
    prices = Prices(
        per_hour=per_hour,
        egress_per_gb=args.egress_per_gb,
        put_per_million=args.put_per_million,
        get_per_million=args.get_per_million,
    )
    return prices if prices != Prices() else None
