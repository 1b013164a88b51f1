"""One file for one replica: what a friend needs to join a run. It holds the replica's key: a secret.

Credentials belong to the store. The file holds them only if the owner asked for that. The file arrives by
mail or on a stick, so the reader checks every value here, once.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from isthmus import reading
from isthmus.config.toml import toml_line
from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.protocol.access import check_not_revoked
from isthmus.protocol.documents import Hash, HashOrNone, Name
from isthmus.protocol.ledger import Ledger, RunInfo, read_run
from isthmus.protocol.trust import Signer, load_signer, save_secret
from isthmus.store import open_store
from isthmus.store.url import ENDPOINT, ENDPOINT_NAMES, REGION_NAMES, SUFFIX, aws_options, parse_url

FORMAT = 1
MOST_BYTES = 1 << 14
CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")
Words = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,1000}\Z")]
Setting = Annotated[str, Meta(pattern=r"^(endpoint|region|access_key_id|secret_access_key|session_token)\Z")]
Visible = Annotated[str, Meta(pattern=r"^[!-~]{1,4096}\Z")]  # ASCII


class Bundle(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal[1] = FORMAT
    url: Words
    run: Annotated[str, Meta(pattern=r"^[\w.-]{1,100}\Z")]  # the run's name
    run_sha256: Hash  # of run.json, so that the reader cannot be led to another run
    replica: Name
    key: Hash  # the replica's private key
    corpus: Words | Literal[""] = ""  # where the text is
    corpus_sha256: HashOrNone = ""  # of its tokens; run.json has it too
    store: Mapping[Setting, Visible] = {}  # settings to reach the bucket

    @property
    def has_credentials(self) -> bool:
        return "access_key_id" in self.store

    def write(self, path: Path, stages: int = 1) -> None:
        """Write the file so that only its owner can read it."""
        replace_file(path, self.to_text(path.name, stages), mode=0o600)

    def to_text(self, file: str, stages: int = 1) -> str:
        apart = f"; or on {stages} machines, with --stage N on each" if stages > 1 else ""
        head = [
            f'Isthmus: the replica {self.replica} of the run "{self.run}". Keep it to yourself: whoever has',
            f"this file can train as {self.replica}. With Isthmus installed, in a folder of its own:",
            f"  isthmus join {file}{apart}",
        ]
        if "://" in self.url and not self.has_credentials:
            head.append("Credentials for the bucket are not in it: set what the sender tells you, for s3://")
            head.append("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment.")
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "store"}
        lines = [f"# {line}" for line in head]
        lines += [toml_line(name, value) for name, value in values.items() if value]
        if self.store:
            lines += ["", "[store]", *(toml_line(*item) for item in self.store.items())]
        return "\n".join(lines) + "\n"

    def use_store(self) -> str:
        """Set up access to the bucket for this process and its children, as the file says; existing
        environment variables win. Return whose credentials are in use, in words."""
        if "endpoint" in self.store and not any(map(os.environ.get, ENDPOINT_NAMES)):
            os.environ["AWS_ENDPOINT_URL"] = self.store["endpoint"]
        if "region" in self.store and not any(map(os.environ.get, REGION_NAMES)):
            os.environ["AWS_REGION"] = self.store["region"]
        if os.environ.get("AWS_ACCESS_KEY_ID") or not self.has_credentials:
            return "your own credentials"
        for name in CREDENTIALS:
            if name in self.store:
                os.environ[f"AWS_{name.upper()}"] = self.store[name]
        return "the credentials of the file"

    def save_key(self, path: str = "") -> Path:
        """Write the replica's key to its own file unless that exists. Only for the run that this file
        names."""
        signer = Signer(self.replica, bytes.fromhex(self.key), self.run_sha256)
        store = open_store(self.url, create=False)
        ledger = Ledger(store, read_run(store, signer))
        run = ledger.look().run
        check_not_revoked(ledger, signer)
        if signer.public_key != run.keys.get(self.replica):  # checked before the key is written
            raise ConfigError(
                f"this file does not hold the key of replica {self.replica} in this run; ask the run's owner "
                "for it again"
            )
        file = Path(path) if path else Path("keys") / run.recipe.name / f"{self.replica}.key"
        if file.exists() and load_signer(file, self.replica).public_key != signer.public_key:
            os.replace(file, file.with_name(f"{file.name}.old"))  # we were revoked and invited again
        if not file.exists():
            save_secret(file, bytes.fromhex(self.key), self.run_sha256)
        return file


def bundle_of(run: RunInfo, url: str, store: Mapping[str, str], replica: str, key: str) -> Bundle:
    return Bundle(
        url=parse_url(url)[0],  # for a folder: the absolute path, as others must find it
        run=run.recipe.name,
        run_sha256=run.digest,
        replica=replica,
        key=key,
        corpus=run.recipe.data.corpus,
        corpus_sha256=run.corpus,
        store=store,
    )


def hand_out(
    run: RunInfo, url: str, store: Mapping[str, str], folder: Path, keys: Mapping[str, bytes]
) -> None:
    """Write one file per replica, with its key."""
    for member in run.recipe.fleet():
        bundle = bundle_of(run, url, store, member.name, keys[member.name].hex())
        bundle.write(folder / f"{member.name}{SUFFIX}", member.config.stages)


def read_bundle(path: Path) -> Bundle:
    try:
        text = reading.read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; give the one that the run's owner sent you") from None
    try:
        return parse_bundle(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a file of `isthmus init` or `invite`: {error!s:.200}") from None


def parse_bundle(text: str) -> Bundle:
    """Parse a bundle; ValueError or MsgspecError, with the field's name, if it is not one."""
    bundle = msgspec.convert({"format": 0} | tomllib.loads(text), Bundle)
    parse_url(bundle.url)
    if not ENDPOINT.fullmatch(bundle.store.get("endpoint", "http://none")):
        raise ValueError("its endpoint is malformed")
    if bundle.has_credentials != ("secret_access_key" in bundle.store):
        raise ValueError("it holds only half of the credentials")
    return bundle


def store_settings(url: str, with_credentials: str | None) -> dict[str, str]:
    """The settings with which others reach this bucket, without credentials unless asked for.

    `with_credentials`: a profile of the AWS credentials file, or "" for those that this machine uses.
    """
    if not url.startswith("s3://"):
        if with_credentials is not None and "://" in url:
            raise ConfigError("--with-credentials is for s3:// only; hand out those of other stores yourself")
        return {}
    found = aws_options(with_credentials or None)
    if with_credentials is not None and "access_key_id" not in found:
        named = f"the profile {with_credentials!r:.60}" if with_credentials else "the environment"
        raise ConfigError(f"--with-credentials: {named} has no AWS key; set one, or name another profile")
    wanted = ("endpoint", "region", *(CREDENTIALS if with_credentials is not None else ()))
    return {name: found[name] for name in wanted if name in found}
