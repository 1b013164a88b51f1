"""`isthmus invite`, `isthmus revoke` and `isthmus rotate`: who belongs to a run."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.bundles import SUFFIX, add_credentials, bundle_of, what_else
from isthmus.config.checks import object_name
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.config import ReplicaConfig
    from isthmus.protocol.ledger import Ledger

DAY_SECONDS = 86_400
MOST_DAYS = 3650.0
INVITE_EPILOG = """examples:
  isthmus invite s3://my-runs/first --replica edge-7 --like edge
  isthmus invite s3://my-runs/first --replica attic --stages 2 --compression 1/16 --mbps 40 --latency-ms 15
the friend, on the machine that will train, with credentials for the bucket, and the file or the token:
  isthmus join edge-7.isthmus.toml
  isthmus join s3://my-runs/first --token isthmus1.edge-7...
What to send a friend: docs/first-evening.md
"""


REVOKE_EXAMPLES = """examples:
  isthmus revoke s3://my-runs/first edge-1
  isthmus members s3://my-runs/first            who is left
"""
ROTATE_EXAMPLES = """examples:
  isthmus rotate s3://my-runs/first edge-1 --key keys/first/edge-1.key
  isthmus members s3://my-runs/first            since which round the new key counts
"""


def register(commands: argparse._SubParsersAction) -> None:
    _register_invite(commands)
    revoked = commands.add_parser(
        "revoke",
        help="end a replica's rights, from the next round on",
        description="End a replica's rights from the next round on: its updates count no more, and its "
        "process ends with one line. Of somebody who was invited and has not come, it ends the invitation. "
        "Needs the owner's key. Credentials for the bucket are the store's: take those back too.",
        epilog=REVOKE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    revoked.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    revoked.add_argument("replica", help="whose rights end")
    add_owner(revoked)
    revoked.set_defaults(run=revoke)
    rotated = commands.add_parser(
        "rotate",
        help="replace a replica's key by a new one",
        description="Make a new key for a replica beside its old one, and ask for it with the old one. A "
        "closer takes it up when it settles the open round; from then on the old key is refused. A replica "
        "that runs goes on by itself: the machine of a stage gives the new key to the others. To one that "
        "was away, copy it. If the old key may be stolen, `revoke` and `invite` again.",
        epilog=ROTATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rotated.add_argument("url", help="the run's bucket: s3://bucket/prefix, or a folder; or a replica's file")
    rotated.add_argument("replica", nargs="?", default="", help="whose key is replaced (that of its file)")
    rotated.add_argument("--key", default="", metavar="FILE", help="its key (default: keys/RUN/NAME.key)")
    rotated.set_defaults(run=rotate)


def _register_invite(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "invite",
        help="let one more replica into a run, by a token for whoever runs it",
        description="Print a token with which one machine can join the run as a new replica, and write it to "
        "a file, NAME.isthmus.toml, with the run's URL and where its text is. That machine makes its "
        "own key there, asks with the token, and is admitted at the end of a round, by whichever closer "
        "settles it. A token is used once. Needs the owner's key, which `isthmus init` wrote.",
        epilog=INVITE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="the run's bucket, or the run directory of `isthmus train`")
    add("--replica", required=True, metavar="NAME", help="the newcomer's name: letters, digits, - and _")
    add("--like", metavar="NAME", help="a replica or a [[replicas]] table of the run, of which it is a copy")
    add("--stages", type=int, help="more than 1: a pipelined replica (default: full, or as --like)")
    add("--compression", metavar="K/D", help="between its stages, as in a recipe")
    add("--wire", help="what crosses its links, as in a recipe")
    add("--mbps", type=float, help="its links, each way")
    add("--latency-ms", type=float, help="its links, one way")
    add("--processes", type=int, help="of a full replica: GPUs of one machine that share every batch")
    add("--batch", type=int, help="sequences of its inner step, by which its updates are weighed (the run's)")
    add("--closer", action="store_true", help="it may close rounds: only for a machine that you trust")
    days = "how long the token is good for (7)"
    add("--days", type=float, default=7.0, help=days)
    add("--to", metavar="FILE", help=f"the file to send (default: NAME{SUFFIX} beside the owner's key)")
    add_credentials(parser)
    add_owner(parser)
    parser.set_defaults(run=invite)


def add_owner(parser: argparse.ArgumentParser) -> None:
    owner = "the owner's key (default: keys/RUN/run.owner.key, or that of the run directory)"
    parser.add_argument("--key", default="", metavar="FILE", help=owner)


def invite(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_as_owner
    from isthmus.protocol.bundle import store_settings
    from isthmus.protocol.invitations import Token, invitation_key
    from isthmus.protocol.membership import check_fits, table_of
    from isthmus.protocol.trust import INVITED, Refused, Signer, new_secret

    if not 0 < args.days <= MOST_DAYS:
        raise ConfigError(f"--days is {args.days:g}; more than 0 and at most {MOST_DAYS:g}")
    object_name("--replica", args.replica)
    if args.to and not args.to.endswith(SUFFIX):
        raise ConfigError(f"--to is {args.to}; by its end, {SUFFIX}, the other commands know such a file")
    ledger, owner = open_as_owner(args.url, args.key)
    run, seed, url = ledger.run, new_secret(), ledger.store.url
    store = store_settings(url, args.with_credentials)
    if args.replica in run.keys:
        raise ConfigError(
            f"there is a replica {args.replica} in this run; give another name, or revoke it first"
        )
    config = newcomer(ledger, args)
    try:
        check_fits(run, config)
    except Refused as reason:
        raise ConfigError(str(reason)) from None
    expires = int(time.time() + args.days * DAY_SECONDS)
    body = {
        "name": args.replica,
        "table": table_of(config),
        "key": Signer(INVITED, seed).public_key,
        "expires": expires,
        "after": ledger.membership.newest.number,
        "closes": int(args.closer),
    }
    token = Token(args.replica, config.kind, expires, seed, run.digest)
    file = Path(args.to) if args.to else owners_folder(args, run.recipe.name) / f"{args.replica}{SUFFIX}"
    try:
        bundle_of(run, url, store, args.replica, token=str(token)).write(file, config.stages)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; give another by --to FILE") from None
    ledger.store.create(invitation_key(body["key"]), owner.seal("invitation", run.run_id, body))
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
    print(token)
    said = (
        f"send that line to whoever runs {args.replica}, by a way that nobody else reads; it is good once, "
    )
    said += f"until {until}: isthmus join {args.url} --token ..."
    for line in (said, f"or send the file {file}: isthmus join {file.name}", *what_else(url, store)):
        print(f"isthmus: {line}", file=sys.stderr)
    return 0


def owners_folder(args: argparse.Namespace, run: str) -> Path:
    from isthmus.protocol.access import is_run_dir

    if args.key:
        return Path(args.key).parent
    return Path(args.url, "keys") if is_run_dir(args.url) else Path("keys") / run


def newcomer(ledger: "Ledger", args: argparse.Namespace) -> "ReplicaConfig":
    """The newcomer's [[replicas]] table: that of --like, with what else was typed."""
    from dataclasses import replace

    from isthmus.config import LinkConfig, ReplicaConfig
    from isthmus.planner.auto import resolve

    recipe = ledger.run.recipe
    config = ReplicaConfig(name=args.replica)
    if args.like:
        alike = {member.name: member.config for member in recipe.fleet()}
        alike |= {config.name: config for config in (ledger.run.first or ledger.run).recipe.replicas}
        if args.like not in alike:
            raise ConfigError(f'there is no replica "{args.like}" in this run; there is {", ".join(alike)}')
        config = replace(alike[args.like], name=args.replica, count=1)
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
    from isthmus.protocol.access import open_as_owner
    from isthmus.protocol.changes import Changes, order

    ledger, owner = open_as_owner(args.url, args.key)
    run = ledger.run
    if run.closers == (args.replica,):
        words = f"name another first: isthmus members {args.url} --closers NAMES"
        raise ConfigError(f"{args.replica} is the only closer of this run; {words}")
    member, ended = args.replica in run.keys, ledger.membership.newest.ended.get(args.replica)
    if not member and ended is None:
        _check_invited(ledger, args.replica)
    epoch = order(ledger.membership, owner, time.time(), Changes(revoked=[args.replica]))
    if member:
        print(f"{args.replica} is revoked (epoch {epoch.number}): from the end of the open round on.")
    else:
        before = f"{args.replica} was revoked before (epoch {ended}); " if ended else ""
        print(f"{before}no invitation of {args.replica} counts any more (epoch {epoch.number}).")
    return 0


def _check_invited(ledger: "Ledger", name: str) -> None:
    """A name that was mistyped ends nobody's rights, and must not look as if it did."""
    from isthmus.protocol.invited import MOST_READ, open_invitations

    invited = [each.replica for each in open_invitations(ledger, time.time())]
    if name in invited or len(invited) >= MOST_READ:
        return
    there = ", ".join(ledger.run.keys)
    there += f"; invited: {', '.join(invited)}" if invited else ""
    raise ConfigError(f'nobody is called "{name}" in this run; there is {there}')


def rotate(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import next_key, open_as, open_ledger
    from isthmus.protocol.invitations import MOST_BYTES, request_key
    from isthmus.protocol.trust import load_signer, new_secret, save_secret

    if not args.replica:
        raise ConfigError(f"whose key? isthmus rotate {args.url} NAME")
    ledger, path = open_as(open_ledger(args.url).store, args.replica, args.key)
    run, old, beside = ledger.run, ledger.signer, next_key(Path(path))
    if not run.owner:
        raise ConfigError("this run has no owner, as runs up to 0.2: its keys cannot be replaced")
    if not beside.exists():  # typed again, it asks for the same key
        save_secret(beside, new_secret(), run.digest)
    body = {"name": args.replica, "key": load_signer(beside, args.replica).public_key, "old": old.public_key}
    sealed = old.seal("rotation", run.run_id, body)
    key = request_key(old.public_key)
    asked = ledger.store.create(key, sealed) or ledger.get_document(key, MOST_BYTES) == sealed
    if not asked:  # typed again it is the same, to the bit
        raise ConfigError(f"{args.replica} has asked for another key before; wait until that one counts")
    print(f"{args.replica} has asked for the key in {beside}; it counts from the end of the open round on.")
    return 0
