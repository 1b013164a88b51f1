"""Text at a web address: downloaded once into this user's cache, then read like a file."""

import hashlib
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from isthmus import __version__
from isthmus.data.cache import cache_folder, made_folder
from isthmus.data.progress import Progress
from isthmus.data.readers import FORMATS, format_of
from isthmus.disk import check_room, is_full
from isthmus.errors import ConfigError, RunError
from isthmus.files import own_size, replacing

BLOCK_BYTES = 1 << 20
SILENCE_SECONDS = 60.0


def is_web(given: str) -> bool:
    return given.startswith(("https://", "http://"))


def downloaded(url: str, progress: Progress) -> Path:
    """Download the whole file into the cache, unless it is already there."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if not name or format_of(Path(name)) is None:
        raise ConfigError(f"{url} does not end in the name of a text file; expected {' '.join(FORMATS)}")
    path = made_folder(cache_folder("downloads") / hashlib.sha256(url.encode()).hexdigest()[:16]) / name
    if own_size(path) is None:
        try:
            _download(url, path, progress)
        except HTTPError as error:
            raise ConfigError(f"{url}: the server answers {error.code} {error.reason}") from None
        except (OSError, HTTPException) as error:  # URLErrors and timeouts are OSErrors, too
            if is_full(error):
                raise
            reason = getattr(error, "reason", None) or error
            raise RunError(f"{url} cannot be read ({reason}); the same command tries again") from None
    return path


def _download(url: str, path: Path, progress: Progress) -> None:
    request = Request(url, headers={"User-Agent": f"isthmus/{__version__}"})
    with urlopen(request, timeout=SILENCE_SECONDS) as answer:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        check_room(path.parent, total, f"the copy of {url}")
        progress.phase(f"downloading {url} to {path.parent}", total)
        with replacing(path) as file:
            while block := answer.read(BLOCK_BYTES):
                file.write(block)
                done += len(block)
                progress.update(done, f"{done / 1e6:,.0f} MB")
            if done < total:
                raise HTTPException(f"it broke off after {done:,} of {total:,} bytes")
