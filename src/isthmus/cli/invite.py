"""`isthmus invite`, `isthmus revoke` and `isthmus closers`: change who takes part in a run."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.arguments import add_owner, names_in
from isthmus.cli.bundles import add_credentials, what_else
from isthmus.config.checks import object_name
from isthmus.errors import ConfigError
from isthmus.store.url import SUFFIX

if TYPE_CHECKING:
    from isthmus.config import ReplicaConfig
    from isthmus.protocol.ledger import Ledger

INVITE_EPILOG = """examples:
  isthmus invite s3://my-runs/first edge-7 --like edge
  isthmus invite s3://my-runs/first attic --stages 2 --compression 1/16 --mbps 40 --latency-ms 15
the friend, on the machine that will train:
  isthmus join edge-7.isthmus.toml
What to send a friend: docs/first-evening.md
"""
REVOKE_EXAMPLES = """examples:
  isthmus revoke s3://my-runs/first edge-1
  isthmus status s3://my-runs/first             who is left
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "invite",
        help="let one more replica into a run, by a file for whoever runs it",
        description="Add a replica to a run, and write the one file that its machine needs, "
        f"NAME{SUFFIX}: the run's URL, a new key, where the text is. It is a member from the end of the open "
        "round on, and costs the run nothing until its machine comes. Needs the owner's key, which `isthmus "
        "init` wrote. To replace a lost or stolen key: revoke NAME, then invite NAME.",
        epilog=INVITE_EPILOG,
    )
    add = parser.add_argument
    add("url", help="the run's bucket, or the run directory of `isthmus train`")
    add("name", help="the new replica's name: letters, digits, - and _")
    add("--like", metavar="NAME", help="the replica or [[replicas]] table of the run that it copies")
    add("--stages", type=int, help="more than 1: a pipelined replica (default: full, or as --like)")
    add("--compression", metavar="K/D", help="between its stages, as in a recipe")
    add("--wire", help="what crosses its links, as in a recipe")
    add("--mbps", type=float, help="its links, each way")
    add("--latency-ms", type=float, help="its links, one way")
    add("--processes", type=int, help="of a full replica: GPUs of one machine that share every batch")
    add("--batch", type=int, help="sequences of its inner step, which weigh its updates (default: the run's)")
    add("--closer", action="store_true", help="it may close rounds: only for a machine that you trust")
    add("--to", metavar="FILE", help=f"the file to send (default: NAME{SUFFIX} beside the owner's key)")
    add_credentials(parser)
    add_owner(parser)
    parser.set_defaults(run=invite)
    revoked = commands.add_parser(
        "revoke",
        help="end a replica's rights, from the next round on",
        description="End a replica's rights from the next round on: its updates count no more, and its "
        "process ends with one line. Needs the owner's key. If you gave its owner credentials for the "
        "bucket, take those back too.",
        epilog=REVOKE_EXAMPLES,
    )
    revoked.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    revoked.add_argument("replica", help="whose rights end")
    add_owner(revoked)
    revoked.set_defaults(run=revoke)
    closing = commands.add_parser(
        "closers",
        help="name all replicas that may close rounds",
        description="Name all replicas that may close rounds from the next round on. Needs the owner's key.",
        epilog="examples:\n  isthmus closers s3://my-runs/first rack-0,rack-1\n",
    )
    closing.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    closing.add_argument("names", help="their names, by commas")
    add_owner(closing)
    closing.set_defaults(run=closers)


def invite(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_as_owner
    from isthmus.protocol.bundle import bundle_of, store_settings
    from isthmus.protocol.membership import Admitted, Changes, document, table_of
    from isthmus.protocol.trust import Refused, Signer, new_secret

    name, secret = args.name, new_secret()
    object_name("NAME", name)
    if args.to and not args.to.endswith(SUFFIX):
        raise ConfigError(f"--to is {args.to}; by its end, {SUFFIX}, the other commands know such a file")
    ledger, owner = open_as_owner(args.url, args.key)
    run, url, membership = ledger.run, ledger.store.url, ledger.membership
    file = Path(args.to) if args.to else owners_folder(args, run.recipe.name) / f"{name}{SUFFIX}"
    if name in run.keys:
        raise ConfigError(f"{name} is in this run already; if its key is lost, revoke it and invite it again")
    store, config = store_settings(url, args.with_credentials), newcomer(ledger, args)
    admitted = Admitted(name, Signer(name, secret).public_key, table_of(config), args.closer)
    try:
        document(membership.newest, owner, Changes(admitted=[admitted]))
    except Refused as reason:
        raise ConfigError(str(reason)) from None
    # Write the file first: a kill in between leaves an unused key, which does no harm.
    try:
        bundle_of(run, url, store, name, secret.hex()).write(file, config.stages)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; give another by --to FILE") from None
    epoch = membership.order(owner, Changes(admitted=[admitted]))
    print(f"{name} is a member from the end of the open round on (epoch {epoch.number}). Its file: {file}")
    send = f"send it by a way that nobody else reads; on the machine of {name}: isthmus join {file.name}"
    for line in (send, *what_else(url, store)):
        print(f"isthmus: {line}", file=sys.stderr)
    return 0


def owners_folder(args: argparse.Namespace, run: str) -> Path:
    from isthmus.protocol.access import is_run_dir

    if args.key:
        return Path(args.key).parent
    return Path(args.url, "keys") if is_run_dir(args.url) else Path("keys") / run


def newcomer(ledger: "Ledger", args: argparse.Namespace) -> "ReplicaConfig":
    """Build the newcomer's [[replicas]] table: that of --like, with the other options applied."""
    from dataclasses import replace

    from isthmus.config import LinkConfig, ReplicaConfig
    from isthmus.planner.auto import resolve

    recipe = ledger.run.recipe
    config = ReplicaConfig(name=args.name)
    if args.like:
        alike = {member.name: member.config for member in recipe.fleet()}
        alike |= {config.name: config for config in (ledger.run.first or ledger.run).recipe.replicas}
        if args.like not in alike:
            raise ConfigError(f'there is no replica "{args.like}" in this run; there is {", ".join(alike)}')
        config = replace(alike[args.like], name=args.name, count=1)
    changed: dict[str, Any] = {
        name: value
        for name in ("stages", "compression", "wire", "processes", "batch")
        if (value := getattr(args, name)) is not None
    }
    if args.stages is not None:
        changed["kind"] = "pipelined" if args.stages > 1 else "full"
    link = {"mbps": args.mbps, "latency_ms": args.latency_ms}
    if link := {name: value for name, value in link.items() if value is not None}:
        changed["link"] = replace(config.link, **link) if args.like else LinkConfig(**link)
    config = replace(config, **changed)
    resolved, _ = resolve(replace(recipe, replicas=(*recipe.replicas, config)))
    return resolved.replicas[-1]


def revoke(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import find_member, open_as_owner
    from isthmus.protocol.membership import Changes

    ledger, owner = open_as_owner(args.url, args.key)
    if ended := args.replica not in ledger.run.keys and ledger.epoch.ended.get(args.replica):
        print(f"{args.replica} was revoked before (epoch {ended}).")
        return 0
    find_member(ledger.run, args.replica)
    if ledger.run.closers == (args.replica,):
        words = f"name another first: isthmus closers {args.url} NAMES"
        raise ConfigError(f"{args.replica} is the only closer of this run; {words}")
    epoch = ledger.order(owner, Changes(revoked=[args.replica]))
    print(f"{args.replica} is revoked (epoch {epoch.number}): from the end of the open round on.")
    return 0


def closers(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import find_member, open_as_owner
    from isthmus.protocol.membership import Changes

    names = names_in(args.names)
    ledger, owner = open_as_owner(args.url, args.key)
    for name in names:
        find_member(ledger.run, name)
    epoch = ledger.order(owner, Changes(closers=names))
    print(f"rounds are closed by {', '.join(names)} (epoch {epoch.number}), after the open one.")
    return 0
