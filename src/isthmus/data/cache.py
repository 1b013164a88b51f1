"""This user's cache of corpora and of facts about files. Standard library only."""

import os
from pathlib import Path

from isthmus.errors import ConfigError


def cache_folder(name: str = "corpora") -> Path:
    """Return a folder of the cache, under ISTHMUS_CACHE, else XDG_CACHE_HOME or ~/.cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"
    return made_folder(Path(os.environ.get("ISTHMUS_CACHE") or usual).expanduser() / name)


def made_folder(path: Path) -> Path:
    """Create a folder of the cache if it is missing, for this user alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} for fetched corpora ({error.strerror}); set ISTHMUS_CACHE to "
            "another"
        ) from None
    return path
