"""The bucket: whole objects under keys, in a folder or in an object store, by way of `obstore`.

Three promises are made here and nowhere else: an object is whole or absent, `create` has one winner, and a
bad network is waited out until the caller's deadline. What the objects mean is the ledger's business.
"""

import asyncio
import copy
import errno
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import LocalStore, from_url

from isthmus.comm.retry import (
    DEFAULT_SECONDS,
    Fault,
    Patience,
    Rate,
    StoreError,
    StoreRefused,
    classify,
    drain,
    wait,
)
from isthmus.errors import ConfigError

Allow = Callable[[int], float]  # how many seconds a transfer of so many bytes may take

CONTROL_BYTES = (
    1 << 18
)  # up to here a request travels apart from bulk, so that a heartbeat never queues behind it
DURABLE_BYTES = 1 << 20
STALE_SECONDS = 3600.0  # a temporary file this old belongs to nobody
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
_TEMPORARY = re.compile(r"#\d+$")  # obstore leaves such names out of a listing
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_ID", "AZURE_STORAGE_TOKEN"),
}
_AWS_KEY = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, slots=True)
class Info:
    """What a HEAD tells."""

    size: int
    modified_unix_seconds: float


class Store:
    """Objects under keys. Any thread may call; `deadline` is a value of `time.monotonic()`."""

    def __init__(self, url: str, folder: Path | None) -> None:
        self.url = self._root = url
        self._folder = folder
        self._prefix = ""
        # Shared by every view that `under` makes.
        self._clients: dict[str, Any] = {}
        self._up, self._down = Rate(), Rate()
        self._tally: Counter[str] = Counter()
        self._clock: dict[str, float] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def under(self, prefix: str) -> "Store":
        """The same store seen from `prefix`, with the same connections and counters."""
        view = copy.copy(self)
        view._prefix = self._key(prefix) + "/"
        view.url = f"{self.url}/{prefix}"
        return view

    @property
    def bytes_sent(self) -> int:
        """Bytes of objects in writes that the store answered; headers are not counted."""
        return self._tally["bytes sent"]

    @property
    def bytes_received(self) -> int:
        return self._tally["bytes received"]

    @property
    def requests(self) -> dict[str, int]:
        """Requests by verb, each try counted."""
        with self._lock:
            return {verb: self._tally[verb] for verb in ("get", "put", "create", "head", "list", "delete")}

    def get(self, key: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        """The object, or None. One larger than `max_bytes` is refused by its size, before any download."""
        path = self._key(key)

        async def read(client: Any, allow: Allow) -> bytes:
            began = time.monotonic()
            result = await asyncio.wait_for(obstore.get_async(client, path), allow(0))
            if (size := result.meta["size"]) > max_bytes:
                raise StoreRefused(f"{self.url}: {key} holds {size} bytes; at most {max_bytes} are accepted")
            data = await asyncio.wait_for(drain(result, allow(0)), allow(size))
            if len(data) != size:
                raise ConnectionError("cut short")
            self._down.saw(size, time.monotonic() - began)
            return data

        try:
            data = self._persist("get", key, max_bytes, read, deadline)
        except FileNotFoundError:
            return None
        self._count("bytes received", len(data))
        return data

    def put(
        self, key: str, data: bytes, *, deadline: float | None = None, durable: bool | None = None
    ) -> None:
        """Write the object, replacing what was there; readers see the old or the new one, whole."""
        self._persist("put", key, len(data), self._writer(key, data, "overwrite", durable), deadline)
        self._count("bytes sent", len(data))

    def create(
        self, key: str, data: bytes, *, deadline: float | None = None, durable: bool | None = None
    ) -> bool:
        """Write the object only if there is none; True if and only if these bytes are the object now.

        A failed create proves nothing: "already exists" may be about our own write whose reply was lost,
        and a 409 may come without any object. Whatever is no clean success is settled by reading the key.
        A StoreError leaves open whether the object was written.
        """
        write = self._writer(key, data, "create", durable)
        patience = self._patience(len(data), deadline)
        while True:
            try:
                self._once("create", len(data), write, patience)
                self._count("bytes sent", len(data))
                return True
            except Exception as error:
                if not (fault := self._fault(error)).retry:
                    raise self._error("create", key, fault, patience) from None
                self._count("bytes sent", len(data) if fault.kind == "exists" else 0)
            try:
                there = self.get(key, max_bytes=len(data), deadline=patience.deadline)
            except StoreRefused:
                return False  # larger than ours
            if there is not None:
                return there == data
            if not patience.again(fault):
                raise self._error("create", key, fault, patience) from None

    def head(self, key: str, *, deadline: float | None = None) -> Info | None:
        path = self._key(key)

        async def look(client: Any, allow: Allow) -> Info:
            meta = await asyncio.wait_for(obstore.head_async(client, path), allow(0))
            return Info(meta["size"], meta["last_modified"].timestamp())

        try:
            return self._persist("head", key, 0, look, deadline)
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "", *, deadline: float | None = None) -> list[str]:
        """Every key below `prefix`, which is a whole path segment ("payloads/rack-0"), in order.

        Always from the start: a listing from an offset misses keys on SeaweedFS.
        """
        path = self._key(prefix.rstrip("/")) if prefix else self._prefix.rstrip("/")

        async def names(client: Any, allow: Allow) -> list[str]:
            batches, found = obstore.list(client, path or None, chunk_size=1000), []
            while batch := await asyncio.wait_for(anext(batches, None), allow(0)):
                found += [meta["path"] for meta in batch]
            return found

        found = self._persist("list", prefix, 0, names, deadline)
        return sorted(name.removeprefix(self._prefix) for name in found)

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        """Remove the object; one that is absent already is no error."""
        path = self._key(key)

        async def remove(client: Any, allow: Allow) -> None:
            await asyncio.wait_for(obstore.delete_async(client, path), allow(0))

        try:
            self._persist("delete", key, 0, remove, deadline)
        except FileNotFoundError:
            return

    def now(self, key: str = "probe/clock", *, max_age_seconds: float = 300.0) -> float:
        """The store's clock in Unix seconds: what all replicas share, whatever their own clocks say.

        Taken from the Last-Modified of a small object written under `key`, carried on by the monotonic clock:
        right to about a second. An unreachable store leaves the older reading in use.
        """
        asked = time.monotonic()
        with self._lock:
            offset, read_at = self._clock.get("offset"), self._clock.get("read at", 0.0)
        if offset is None or asked - read_at > max_age_seconds:
            try:
                self.put(key, b"clock", durable=False)
                written = time.monotonic()
                info = self.head(key)
            except StoreError:
                if offset is None:
                    raise
                return time.monotonic() + offset
            if info is not None:
                # HTTP dates are cut to whole seconds, so half a second is added back; a folder's are not.
                whole = info.modified_unix_seconds + (0.0 if self._folder else 0.5)
                offset = whole - (asked + written) / 2
                with self._lock:
                    self._clock.update({"offset": offset, "read at": written})
        if offset is None:
            raise StoreError(f"{self.url}: {key} was deleted while its time was read", "absent")
        return time.monotonic() + offset

    def probe(self, prefix: str = "probe") -> None:
        """Refuse a store that ignores put-if-absent: on such a one two closers could both close a round."""
        key = f"{prefix}/{secrets.token_hex(16)}"
        try:
            if not self.create(key, b"first") or self.create(key, b"second"):
                raise ConfigError(
                    f"{self.url} ignores put-if-absent (If-None-Match), so rounds could be closed twice; "
                    "use a store that honours it"
                )
        except StoreError as error:
            raise ConfigError(str(error)) from None
        finally:
            with suppress(StoreError):  # a contributor may be allowed to write and not to delete
                self.delete(key, deadline=time.monotonic() + 5)

    def sweep(self, older_than_seconds: float = STALE_SECONDS) -> int:
        """Remove temporary files that a killed writer left in a folder; how many there were."""
        stale = 0
        for base, _, names in os.walk(self._folder) if self._folder else ():
            for path in (Path(base, name) for name in names if _TEMPORARY.search(name)):
                try:
                    if time.time() - path.lstat().st_mtime > older_than_seconds:
                        path.unlink()
                        stale += 1
                except OSError:
                    continue  # its writer was faster
        return stale

    def _key(self, key: str) -> str:
        segments = key.split("/")
        if len(key) > 700 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise StoreRefused(
                f"{key[:80]!r} is no key: segments of letters, digits and ._=+- between slashes"
            )
        return self._prefix + key

    def _count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._tally[what] += amount

    def _client(self, num_bytes: int) -> Any:
        lane = "control" if num_bytes <= CONTROL_BYTES else "bulk"
        with self._lock:
            if lane not in self._clients:
                self._clients[lane] = connect(self._root, self._folder)
            return self._clients[lane]

    def _patience(self, num_bytes: int, deadline: float | None) -> Patience:
        default = max(DEFAULT_SECONDS, 2 * self._up.limit(num_bytes))
        return Patience(time.monotonic() + default if deadline is None else deadline)

    def _writer(self, key: str, data: bytes, mode: str, durable: bool | None) -> Callable[..., Any]:
        path = self._key(key)
        safe = len(data) < DURABLE_BYTES if durable is None else durable

        async def write(client: Any, allow: Allow) -> None:
            began = time.monotonic()
            # In one request: a multipart upload cannot be conditional, and leaves parts behind when cut off.
            request = obstore.put_async(client, path, data, mode=mode, use_multipart=False)
            await asyncio.wait_for(request, allow(len(data)))
            self._up.saw(len(data), time.monotonic() - began)

        def write_here(client: Any, allow: Allow) -> None:
            write_file(self._folder, path, data, create=mode == "create", durable=safe)

        return write_here if self._folder else write

    def _once(self, verb: str, num_bytes: int, work: Callable[..., Any], patience: Patience) -> Any:
        self._count(verb)
        rate = self._down if verb == "get" else self._up
        try:
            result = work(self._client(num_bytes), lambda size: patience.allow(rate.limit(size)))
            return wait(result) if asyncio.iscoroutine(result) else result
        except TimeoutError:
            rate.too_slow()
            raise

    def _fault(self, error: Exception) -> Fault:
        if isinstance(error, StoreRefused | StoreError | ConfigError):
            raise error
        fault = classify(error)
        if fault.kind == "expired":
            with self._lock:
                self._clients.clear()  # the next client reads the environment and the files again
        return fault

    def _persist(
        self, verb: str, key: str, size: int, work: Callable[..., Any], deadline: float | None
    ) -> Any:
        patience = self._patience(size, deadline)
        while True:
            try:
                return self._once(verb, size, work, patience)
            except Exception as error:
                fault = self._fault(error)
                if fault.kind == "absent" and verb != "put":
                    raise FileNotFoundError(key) from None
                if not patience.again(fault):
                    raise self._error(verb, key, fault, patience) from None

    def _error(self, verb: str, key: str, fault: Fault, patience: Patience) -> StoreError:
        if fault.kind == "slow" and patience.fault:
            fault = patience.fault  # an earlier try said more
        if fault.kind == "absent":
            fault = Fault("config", "a write is answered by 404: is there such a bucket, is it S3?", False)
        tail = f" ({patience.spent()})" if fault.retry else ""
        return StoreError(f"{self.url}: {verb} {key}: {fault.words}{tail}", fault.kind)


def open_store(url: str, *, patience_seconds: float = 15.0) -> Store:
    """The store at `url`, reached once: a wrong URL, right or clock is known before anything is started."""
    root, folder = parse_url(url)
    store = Store(root, folder)
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder, f"probe/{secrets.token_hex(8)}", b"", create=False, durable=False, keep=False)
        except FileExistsError:
            raise ConfigError(f"{root} is a file; the store needs a folder") from None
        except OSError as error:
            raise ConfigError(f"cannot write to the folder {root}: {error.strerror or error}") from None
        store.sweep()
        return store
    try:
        store.get("run.json", max_bytes=0, deadline=time.monotonic() + patience_seconds)
    except StoreRefused:
        pass  # there is a run already
    except StoreError as error:
        raise ConfigError(str(error)) from None
    return store


def parse_url(url: str) -> tuple[str, Path | None]:
    """The URL as it may be shown, and the folder if it is one."""
    shown = re.sub(r"//[^/]*@", "//***@", re.sub(r"[?#].*", "", url))
    schemes = "a folder, file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    if not url.strip() or not url.isprintable():
        raise ConfigError(f"the store's URL is empty or not printable; write {schemes}")
    scheme, _, rest = url.partition(":") if re.match(r"[A-Za-z][A-Za-z0-9+]*:", url) else ("", "", url)
    if not scheme or (scheme == "file" and rest.startswith(("///", "//localhost/"))):
        folder = Path(unquote(urlsplit(url).path) if scheme else url).expanduser().absolute()
        return str(folder), folder
    if scheme not in _CREDENTIALS or not rest.startswith("//"):
        raise ConfigError(f"{shown!r} is no store; write {schemes}")
    if "@" in rest:
        raise ConfigError(
            f"{shown!r} holds credentials; they belong in the environment or the credentials file"
        )
    bucket, *prefix = rest[2:].rstrip("/").split("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket) or not all(
        map(_SEGMENT.fullmatch, prefix)
    ):
        raise ConfigError(
            f"{shown!r} is malformed; write {scheme}://bucket/prefix in letters, digits and ._=+-"
        )
    return "/".join([f"{scheme}://{bucket}", *prefix]), None


def connect(root: str, folder: Path | None) -> Any:
    """An obstore client without retries and with a time-out out of the way: both are ours, per request.

    Credentials are checked first, because obstore would go on to ask the cloud's metadata service: who writes
    to the bucket is said, not discovered.
    """
    if folder:
        return LocalStore(folder)
    scheme = root.partition(":")[0]
    options = aws_options() if scheme == "s3" else {}
    said = "access_key_id" in options or any(map(os.environ.get, _CREDENTIALS[scheme]))
    usual = Path.home() / ".config/gcloud/application_default_credentials.json"
    if not said and not (scheme == "gs" and usual.exists()):
        names = " or ".join(_CREDENTIALS[scheme])
        raise ConfigError(f"no credentials for {root}: set {names}, or fill the usual credentials file")
    client = {"timeout": timedelta(days=1), "connect_timeout": timedelta(seconds=5)}
    client["allow_http"] = str(options.get("endpoint", "")).startswith("http://")
    try:
        return from_url(root, client_options=client, retry_config={"max_retries": 0}, **options)
    except Exception:  # whose text may hold what it read
        raise ConfigError(f"cannot use {root}: the environment's settings for it do not fit") from None


def aws_options() -> dict[str, str]:
    """Endpoint, key and region where the AWS tools find them: the environment first, then the usual files."""
    home, profile = Path.home() / ".aws", os.environ.get("AWS_PROFILE", "default")
    keys, config = ConfigParser(interpolation=None), ConfigParser(interpolation=None)
    try:
        keys.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
        config.read(os.environ.get("AWS_CONFIG_FILE", home / "config"))
    except (ParserError, UnicodeDecodeError, OSError):
        raise ConfigError("the AWS credentials or config file is malformed") from None
    section = profile if profile == "default" else f"profile {profile}"
    said = dict(config[section]) if config.has_section(section) else {}
    said |= dict(keys[profile]) if keys.has_section(profile) else {}
    env = {name: value for name, value in os.environ.items() if value}
    if "AWS_ACCESS_KEY_ID" in env:
        said |= {f"aws_{name}": env.get(f"AWS_{name.upper()}", "") for name in _AWS_KEY}
    options = {name: said[f"aws_{name}"] for name in _AWS_KEY if said.get(f"aws_{name}")}
    if ("access_key_id" in options) != ("secret_access_key" in options):
        raise ConfigError("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both")
    if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or said.get("region"):
        options["region"] = region
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint := next((env[name] for name in names if name in env), said.get("endpoint_url")):
        if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", endpoint):
            raise ConfigError("AWS_ENDPOINT_URL is malformed; write https://host or https://host:port")
        options["endpoint"] = endpoint
    return options


def link(aside: Path, path: Path) -> None:
    """Give a file its second name, unless that is taken."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            words = "its file system has no hard links, without which no object can be created only if absent"
            raise ConfigError(f"{path.parent} cannot be a store: {words}") from None
        raise


def write_file(root: Path, key: str, data: bytes, *, create: bool, durable: bool, keep: bool = True) -> None:
    """Write below `root`: aside, then under its name by rename or (to create) by link, which has one winner.

    Not by obstore, which gives a file its name before its bytes are on the disk: after a power cut an empty
    manifest could then hold its key for ever.
    """
    path = root / key
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise StoreRefused(f"{key} leads out of {root} by a symbolic link")
    fresh = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreRefused(f"{key} cannot be written below an object") from None
    aside = path.with_name(f"{path.name}#{os.getpid()}{secrets.randbits(48)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        if create:
            link(aside, path)
        elif keep:
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    if durable:
        for above in [
            path.parent,
            *(parent for parent in path.parents[1:] if fresh and parent.is_relative_to(root)),
        ]:
            handle = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
