"""One try of each request to an object store, using `obstore`.

The last two arguments are obstore's client and how long a transfer of a given size may take; each returns a
coroutine. `folder` has the same for a folder, without them. The store retries: faults pass through unchanged,
even that of an absent object.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import obstore

from isthmus.store.retry import StoreRefused, drain
from isthmus.store.timing import Rate

Allow = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Info:
    """An object's properties from a HEAD or a listing."""

    size: int
    modified_unix_seconds: float
    tag: str = ""  # differs whenever the bytes differ, even if size and time do not


class BucketRequests:
    """`up` and `down` measure transfer rates. `next_page` is called for each further page of a listing, which
    is a request of its own."""

    def __init__(self, url: str, up: Rate, down: Rate, next_page: Callable[[], None]) -> None:
        self.url, self.up, self.down, self.next_page = url, up, down, next_page

    async def get(self, key: str, max_bytes: int, client: Any, allow: Allow) -> tuple[bytes, Info]:
        began = time.monotonic()
        result = await asyncio.wait_for(obstore.get_async(client, key), allow(0))
        if (size := result.meta["size"]) > max_bytes:
            raise StoreRefused(f"{self.url}: {key} holds {size} bytes; at most {max_bytes} are accepted")
        data = await asyncio.wait_for(drain(result, allow(0)), allow(size))
        if len(data) != size:
            raise ConnectionError("cut short")
        self.down.saw(size, time.monotonic() - began)
        return data, _info(result.meta)

    async def put(
        self, key: str, data: bytes, create: bool, durable: bool, client: Any, allow: Allow
    ) -> None:
        """Put an object. A bucket keeps what it has confirmed, so all of it is `durable`."""
        began, mode = time.monotonic(), "create" if create else "overwrite"
        # In one request: a multipart upload cannot be conditional, and leaves parts if interrupted.
        request = obstore.put_async(client, key, data, mode=mode, use_multipart=False)
        await asyncio.wait_for(request, allow(len(data)))
        self.up.saw(len(data), time.monotonic() - began)

    async def head(self, key: str, client: Any, allow: Allow) -> Info | None:
        return _info(await asyncio.wait_for(obstore.head_async(client, key), allow(0)))

    async def scan(self, prefix: str | None, most: int, client: Any, allow: Allow) -> dict[str, Info]:
        """All objects below a prefix; a few more than `most` if there are more."""
        batches, found = obstore.list(client, prefix, chunk_size=1000), dict[str, Info]()
        while batch := await asyncio.wait_for(anext(batches, None), allow(0)):
            if found:
                self.next_page()
            found |= {meta["path"]: _info(meta) for meta in batch}
            if len(found) > most:
                break
        return found


async def delete(key: str, client: Any, allow: Allow) -> None:
    """Delete an object of a bucket or a folder."""
    await asyncio.wait_for(obstore.delete_async(client, key), allow(0))


def _info(meta: Any) -> Info:
    return Info(meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")
