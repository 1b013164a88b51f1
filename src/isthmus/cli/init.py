"""`isthmus init`: create a run in a bucket, and the keys of its replicas."""

import argparse
import os
import sys
from pathlib import Path

from isthmus.cli.arguments import RECIPE, add_set
from isthmus.config import load_recipe
from isthmus.errors import ConfigError
from isthmus.planner.auto import resolve

EPILOG = """examples:
  isthmus init demo s3://my-runs/first
  isthmus init demo /mnt/shared/first              a folder serves where all machines see it
then, on each machine, with its key copied there:
  isthmus join s3://my-runs/first --replica rack-0 --key rack-0.key
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "init",
        help="create a run in a bucket, and the keys of its replicas",
        description="Write run.json into the bucket, only if there is none; one private key per replica, "
        "and the owner's, by which replicas can be invited and revoked later.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help=RECIPE)
    parser.add_argument("url", help="s3://bucket/prefix, or a folder")
    add_set(parser)
    parser.add_argument("--keys", metavar="DIR", help="where the private keys go (default: keys/NAME)")
    parser.add_argument(
        "--closers",
        metavar="NAMES",
        help="replicas that may close rounds, by commas (default: the first two, full ones first)",
    )
    room = "numbers of stages that replicas invited later may have, beside the recipe's, by commas: updates "
    room += "are cut for them from the start, into a few more objects"
    parser.add_argument("--room", metavar="STAGES", type=_numbers, default=(), help=room)
    parser.set_defaults(run=init)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split(",")}))


def init(args: argparse.Namespace) -> int:
    recipe, picks = resolve(load_recipe(args.recipe, args.set))
    from isthmus.protocol.access import OWNER_KEY
    from isthmus.runtime.create import create

    keys = Path(args.keys or Path("keys") / recipe.name)
    closers = list(dict.fromkeys(name.strip() for name in args.closers.split(","))) if args.closers else None
    check_keys_folder(keys)
    run = create(recipe, args.url, keys, closers, room=args.room)
    print(f'The run "{recipe.name}" ({run.run_id}) is in {args.url}; its keys are in {keys}.')
    for pick in picks:
        print(pick.reason, file=sys.stderr)
    print(f"Rounds are closed by {' or '.join(run.closers)}: run them on machines that you trust.")
    print(f"{keys / OWNER_KEY} is the owner's: keep it here, `isthmus invite` and `revoke` need it.")
    print("On each machine, with its key:")
    for member in recipe.fleet():
        stages = (
            f" [--stage 0..{member.config.stages - 1} --master HOST:PORT]" if member.config.stages > 1 else ""
        )
        print(
            f"  isthmus join {args.url} --replica {member.name} --key {keys / (member.name + '.key')}{stages}"
        )
    return 0


def check_keys_folder(keys: Path) -> None:
    """Before the run is created: a run whose keys cannot be saved is of no use, and occupies its bucket."""
    if keys.exists() and not keys.is_dir():
        raise ConfigError(f"{keys} is a file; give --keys a folder")
    there = next(path for path in (keys, *keys.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write keys below {there}; give --keys another folder")
