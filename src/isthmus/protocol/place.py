"""Resolve what a person typed for a run: its run directory or its bucket. Loads no torch.

All commands use this rule. A URL is a bucket. A folder with a recipe.toml is a run directory, whatever else
it holds; one with only a run.json is a bucket.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.runlog import REAL, RunDir
from isthmus.store.url import is_url, parse_url


@dataclass(frozen=True, slots=True)
class Place:
    """A run's directory, if it has one, and the address of its bucket, if any."""

    typed: str
    run: RunDir | None
    bucket: str  # empty for a simulation, and for a run without a bucket yet


def find_place(typed: str) -> Place:
    """The run that `typed` names; ConfigError if it names none."""
    folder = None if is_url(typed) else Path(typed).expanduser()
    if folder is None:
        _, local = parse_url(typed)
        if local and not local.is_dir():
            raise ConfigError(f"there is no folder {local}; give the URL that `isthmus init` was given")
        return Place(typed, None, typed)
    if (folder / "recipe.toml").is_file():
        run = RunDir.open(folder)
        return Place(typed, run, bucket_of(run) if has_bucket(run) else "")
    if (folder / "run.json").is_file():
        return Place(typed, None, str(folder))
    give = "give the folder of a run, such as runs/demo, or the URL of a bucket"
    if not os.path.lexists(folder):
        parse_url(typed)  # raises ConfigError for s3:/x, a URL that lacks a slash
        raise ConfigError(f"{typed} does not exist; {give}")
    if not folder.is_dir():
        raise ConfigError(f"{typed} is not a folder; {give}")
    raise ConfigError(f"{typed} is not a run: it holds no recipe.toml (nor, as a bucket, run.json); {give}")


def is_run_dir(typed: str) -> bool:
    return not is_url(typed) and (Path(typed).expanduser() / "recipe.toml").is_file()


def bucket_of(run: RunDir) -> str:
    """The bucket of a `train` run: the URL in its recipe, or the folder in the run directory."""
    return run.recipe.bucket.url or os.path.realpath(run.path / "bucket")


def has_bucket(run: RunDir) -> bool:
    """Whether the bucket exists. A simulation does not use the bucket in its recipe."""
    bucket = bucket_of(run)
    return run.about.get("mode") == REAL and (is_url(bucket) or (Path(bucket) / "run.json").is_file())
