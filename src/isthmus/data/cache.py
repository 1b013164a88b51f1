"""This user's cache of corpora and of facts about files. Standard library only."""

import os
import stat
from pathlib import Path

from isthmus.errors import ConfigError


def cache_folder(name: str = "corpora") -> Path:
    """Return a folder of the cache, under ISTHMUS_CACHE, else XDG_CACHE_HOME or ~/.cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"
    return private_folder(Path(os.environ.get("ISTHMUS_CACHE") or usual).expanduser() / name)


def private_folder(path: Path) -> Path:
    """Create the folder if it is missing. Nobody else may put files or links there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} for fetched corpora ({error.strerror}); set ISTHMUS_CACHE to "
            "another"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{path} is a link, or others may write to it; remove it, or set ISTHMUS_CACHE to a folder of "
            "yours"
        )
    return path
