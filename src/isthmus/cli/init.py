"""`isthmus init`: create a run in a bucket, and the keys of its replicas."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import RECIPE, add_set, names_in
from isthmus.cli.bundles import add_credentials, what_else
from isthmus.config import load_recipe
from isthmus.data.manifest import MANIFEST
from isthmus.errors import ConfigError
from isthmus.planner.auto import resolve
from isthmus.store.url import SUFFIX, is_url

if TYPE_CHECKING:
    from torch import nn

    from isthmus.protocol.documents import RunInfo

EPILOG = """examples:
  isthmus init demo s3://my-runs/first
  isthmus init demo /mnt/shared/first              a folder serves where all machines see it
  isthmus init mine.toml s3://my-runs/first --set data.corpus=s3://my-runs/corpus
  isthmus init --from-module train.py:make_model s3://my-runs/own --replicas a,b --set outer.rounds=200
then send each machine its file (a secret), and there, with credentials for the bucket:
  isthmus join rack-0.isthmus.toml
How to get a bucket, and what to send a friend: docs/first-evening.md
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "init",
        help="create a run in a bucket, and the keys of its replicas",
        description="Write run.json into the bucket, only if there is none; one private key per replica, "
        "and the owner's, which `invite` and `revoke` need later. Next to each key is a file to "
        "hand out, NAME.isthmus.toml, with all that its machine needs but credentials for the bucket.",
        epilog=EPILOG,
    )
    parser.add_argument("recipe", nargs="?", default="", help=RECIPE)
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
    module = "in place of a recipe: a function that returns your own torch module, for loops with "
    module += "isthmus.OuterSync (docs/use.md); --set takes outer.* and bucket.*"
    parser.add_argument("--from-module", metavar="FILE:FUNCTION", help=module)
    parser.add_argument("--replicas", metavar="NAMES", help="with --from-module: its replicas, by commas")
    parser.add_argument("--name", help="with --from-module: the run's name (default: run)")
    add_credentials(parser)
    parser.set_defaults(run=init)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a list of numbers, such as 2,4') from None


def init(args: argparse.Namespace) -> int:
    if args.from_module:
        return _init_named(args)
    if not args.recipe:
        raise ConfigError("give a recipe and a URL, or --from-module FILE:FUNCTION and a URL")
    for option in ("replicas", "name"):
        if getattr(args, option):
            raise ConfigError(f"--{option} belongs to --from-module; a recipe states its own")
    recipe, picks = resolve(load_recipe(args.recipe, args.set), room=args.room)
    from isthmus.protocol.access import OWNER_KEY
    from isthmus.protocol.bundle import hand_out, store_settings
    from isthmus.runtime.create import create

    store = store_settings(args.url, args.with_credentials)
    keys = Path(args.keys or Path("keys") / recipe.name)
    closers = names_in(args.closers) if args.closers else None
    check_keys_folder(keys)
    check_text_here(recipe.data.corpus)
    run = create(
        *(recipe, args.url, keys, closers),
        room=args.room,
        hand_out=lambda run, folder, secrets: hand_out(run, args.url, store, folder, secrets),
    )
    print(f'The run "{recipe.name}" ({run.run_id}) is in {args.url}; its keys are in {keys}.')
    for pick in picks:
        print(pick.reason, file=sys.stderr)
    print(f"Rounds are closed by {' or '.join(run.closers)}: run them on machines that you trust.")
    print(f"{keys / OWNER_KEY} is the owner's: keep it here, `isthmus invite` and `revoke` need it.")
    print(f"Send each machine its file from {keys}, by a way that nobody else reads. Where the file is:")
    for member in recipe.fleet():
        stages = f" [--stage 0..{member.config.stages - 1}]" if member.config.stages > 1 else ""
        print(f"  isthmus join {member.name}{SUFFIX}{stages}")
    for line in (*what_else(args.url, store), *about_text(run)):
        print(f"isthmus: {line}", file=sys.stderr)
    return 0


def _init_named(args: argparse.Namespace) -> int:
    """Create a run of named tensors from a function that returns a model."""
    for option in ("recipe", "closers", "room", "with_credentials"):
        if getattr(args, option) not in (None, "", ()):
            raise ConfigError(f"--from-module takes no {option.replace('_', '-')}")
    if not args.replicas:
        raise ConfigError("--from-module needs --replicas, for example --replicas a,b")
    from isthmus.config import OuterConfig
    from isthmus.loop.create import create

    outer = OuterConfig()
    files = create(
        _model_of(args.from_module),
        args.url,
        inner_steps=outer.inner_steps,
        rounds=outer.rounds,
        replicas=[name.strip() for name in args.replicas.split(",")],
        name=args.name or "run",
        keys=args.keys,
        overrides=args.set,
    )
    print(f"The run is in {args.url}. Give each loop its file, by a way that nobody else reads:")
    for path in files.values():
        print(f'  isthmus.OuterSync(model, key="{path}")')
    return 0


def _model_of(spec: str) -> "nn.Module":
    """Call FUNCTION of FILE."""
    import runpy

    from torch import nn

    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise ConfigError(f"--from-module {spec}: there is no file {path or spec}; write FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(path).parent))
    make = runpy.run_path(path).get(name)
    model = make() if callable(make) else None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--from-module {spec}: {name} is not a function that returns a torch.nn.Module")
    return model


def about_text(run: "RunInfo") -> list[str]:
    """Say how the other machines get the text."""
    spec = run.recipe.data.corpus
    if is_url(spec) or spec.startswith("builtin:"):
        return []
    return [
        f"every machine that reads text needs a copy of {spec}, of fingerprint {run.corpus[:12]}...; in a "
        f"bucket (`isthmus data push {spec} URL`, data.corpus=URL) they would fetch it themselves"
    ]


def check_text_here(spec: str) -> None:
    """Check that the text is here: a run states its fingerprint, so that no member trains on another."""
    if not is_url(spec) and not spec.startswith("builtin:") and not Path(spec, MANIFEST).exists():
        raise ConfigError(
            f"there is no corpus in {spec} on this machine, and `init` writes its fingerprint into the run: "
            "copy its folder here; or `isthmus data push` it from where it is, and set data.corpus to its URL"
        )


def check_keys_folder(keys: Path) -> None:
    """Check the keys folder first: a run whose keys cannot be saved is useless and blocks its bucket."""
    if keys.exists() and not keys.is_dir():
        raise ConfigError(f"{keys} is a file; give --keys a folder")
    there = next(path for path in (keys, *keys.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write keys below {there}; give --keys another folder")
