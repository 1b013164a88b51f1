"""The files that a run's owner hands out, one per replica, and how a command reads one instead of a URL."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError
from isthmus.store.url import CREDENTIALS, SUFFIX, is_url

if TYPE_CHECKING:
    from isthmus.protocol.bundle import Bundle

PLACES = ("url", "source", "target", "targets")  # arguments that name a run
LOOPBACK = ("//127.", "//localhost", "//[::1]")


def add_credentials(parser: argparse.ArgumentParser) -> None:
    words = (
        "put credentials for the bucket into the files that are handed out: those that are used here, or of "
    )
    words += "a profile of ~/.aws/credentials. Without this they hold none"
    parser.add_argument("--with-credentials", nargs="?", const="", metavar="PROFILE", help=words)


def what_else(url: str, store: Mapping[str, str]) -> list[str]:
    """Return what the owner should know about the files: how others reach the bucket, and their rights."""
    said = []
    if any(mark in store.get("endpoint", "") for mark in LOOPBACK):
        said.append(
            f"the files say that the bucket is at {store['endpoint']}, where only this machine finds it: set "
            "AWS_ENDPOINT_URL to its address in the network first"
        )
    if "access_key_id" in store:
        said.append(
            "the files hold credentials for the bucket: whoever has one can do there what these may; give "
            "each friend others (PROFILE) where you can, and take them back when somebody leaves"
        )
    elif is_url(url):
        scheme = url.partition(":")[0]
        names = f"{' or '.join(CREDENTIALS.get(scheme, ()))}"
        if scheme == "s3":
            names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or see --with-credentials"
        said.append(f"the files hold no credentials for the bucket: tell each friend which to set ({names})")
    return said


def take(args: argparse.Namespace) -> None:
    """Fill in the arguments from a file of `init` or `invite` that was typed instead of a run's URL."""
    for place in PLACES:
        typed = getattr(args, place, None)
        if isinstance(typed, str):
            setattr(args, place, _url(args, typed))
        elif isinstance(typed, list):
            setattr(args, place, [_url(args, each) for each in typed])


def _url(args: argparse.Namespace, typed: str) -> str:
    if is_url(typed) or not typed.endswith(SUFFIX):
        return typed
    from isthmus.protocol.bundle import read_bundle

    bundle = read_bundle(Path(typed))
    whose = bundle.use_store()
    if args.command in ("join", "leave"):
        _as_replica(args, bundle, typed, whose)
    elif args.command == "doctor":
        args.replica = args.replica or bundle.replica
    return bundle.url


def _as_replica(args: argparse.Namespace, bundle: "Bundle", typed: str, whose: str) -> None:
    from isthmus.store.retry import StoreError

    if args.replica not in ("", bundle.replica):
        raise ConfigError(f"{typed} is for replica {bundle.replica}; leave out --replica")
    if args.command == "join":
        at = f" at {bundle.store['endpoint']}" if "endpoint" in bundle.store else ""
        rights = f", with {whose}" if is_url(bundle.url) else ""
        line = f'{bundle.replica} of the run "{bundle.run}" in {bundle.url}{at}{rights}'
        print(f"isthmus: {line}", file=sys.stderr)
        if is_url(bundle.corpus):
            args.corpus = args.corpus or bundle.corpus
    args.replica = bundle.replica
    try:
        args.key = str(bundle.save_key(args.key))
    except StoreError as error:
        raise error.at_start() from None
