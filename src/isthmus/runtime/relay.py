"""A relay between stages that cannot reach each other: it pairs connections, and cannot read their data.

An end greets it with its replica's key (`runtime.relay_place`), and waits until the other end has come. Then
the two ends use TLS with each other. One thread serves all.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.crowd import Crowd, Visit
from isthmus.runtime.addresses import keep_alive, listen
from isthmus.runtime.rare_notes import Log, RareNotes
from isthmus.runtime.relay_place import GREETING_BYTES, GUEST, HOST, MAGIC, NONCE_BYTES, PAIRED, understood

PORT = 29520
BUFFER_BYTES = 2**17  # asyncio reads on until it holds twice as much
MOST_WAITING, MOST_WAITING_OF_ONE = 1024, 64  # unpaired connections; from one address
MOST_PAIRS, MOST_PAIRS_OF_ONE = 512, 64
MOST_FILES = MOST_WAITING + 2 * MOST_PAIRS + 64  # files that all this needs, with a margin
GUEST_SECONDS = 5.0  # a guest's wait for its host
HOST_SECONDS = 24 * 3600.0
IDLE_SECONDS = 120.0  # of a pair: a link sends a heartbeat every second
CLOSE_SECONDS = 10.0  # to take what was sent before the end
SWEEP_SECONDS = 0.5


@dataclass(eq=False, slots=True)
class End:
    """A connection whose greeting has been understood."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    visit: Visit
    role: bytes  # HOST waits for GUEST
    meeting: bytes
    # Its partner, and the pair's place.
    paired: "asyncio.Future[tuple[End, Visit]]" = field(default_factory=asyncio.Future)
    told: asyncio.Event = field(default_factory=asyncio.Event)  # that it is paired


class Relay:
    """Serves at one port until the caller is interrupted."""

    def __init__(
        self,
        host: str,
        port: int,
        log: Log = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        files: int = MOST_FILES,
    ) -> None:
        """`files` is how many files this process may open. With fewer, all limits shrink: if the system
        refuses a connection, the relay cannot make room for it."""
        scale = min(1.0, files / MOST_FILES)

        def crowd(most: int, most_each: int) -> Crowd:
            return Crowd(max(2, int(most * scale)), max(2, int(most_each * scale)), clock)

        self.notes = RareNotes(log, clock)
        self.listener = listen(host, port, "give an address of this machine and a free port")
        self.port = self.listener.getsockname()[1]
        self.unpaired = crowd(MOST_WAITING, MOST_WAITING_OF_ONE)
        self.pairs = crowd(MOST_PAIRS, MOST_PAIRS_OF_ONE)  # counted by the guest's address
        self.waiting: dict[tuple[bytes, bytes], deque[End]] = {}  # (meeting, role) -> those waiting
        self.carried = 0
        self.stopped = False

    def serve(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._greet, sock=self.listener, limit=BUFFER_BYTES)
        while not self.stopped:
            self.unpaired.sweep()
            self.pairs.sweep()
            await asyncio.sleep(SWEEP_SECONDS)
        server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = writer.get_extra_info("socket")
        try:
            keep_alive(link)
            if visit := self.unpaired.enter(link, str(writer.get_extra_info("peername")[0])):
                visit.request()
                nonce = os.urandom(NONCE_BYTES)
                writer.write(nonce)
                said = await reader.readexactly(len(MAGIC))
                if said == MAGIC:
                    said += await reader.readexactly(GREETING_BYTES - len(MAGIC))
                    if found := understood(said, nonce):
                        await self._meet(End(reader, writer, visit, *found))
        except (OSError, EOFError):  # it hung up, or made room for others
            pass
        finally:
            self.unpaired.leave(link)
            writer.close()
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), CLOSE_SECONDS)
            writer.transport.abort()

    async def _meet(self, end: End) -> None:
        """Pair this end with one that waits, or wait; then carry what it sends."""
        others = self.waiting.get((end.meeting, GUEST if end.role == HOST else HOST))
        if others:
            guest = end if end.role == GUEST else others[0]
            if visit := self._room_for(guest):
                other = others.popleft()
                other.paired.set_result((end, visit))
                end.paired.set_result((other, visit))
            elif end is guest:
                return
        if not end.paired.done():
            await self._wait(end)
        if end.paired.done():
            other, visit = end.paired.result()
            end.writer.write(PAIRED)
            end.told.set()
            self.unpaired.leave(end.visit.link)
            await other.told.wait()
            await self._carry(end.reader, other.writer, visit)

    async def _wait(self, end: End) -> None:
        """Wait for a partner, until the end hangs up, or says anything before one has come."""
        place = end.meeting, end.role
        self.waiting.setdefault(place, deque()).append(end)
        end.visit.keep(GUEST_SECONDS if end.role == GUEST else HOST_SECONDS)
        said = asyncio.ensure_future(end.reader.read(1))
        await asyncio.wait({said, end.paired}, return_when=asyncio.FIRST_COMPLETED)
        if not said.cancel():
            said.exception()  # marks it as seen
        await asyncio.wait({said})  # two cannot read at once
        others = self.waiting.get(place, deque())
        with suppress(ValueError):  # its partner has taken it
            others.remove(end)
        if not others:
            self.waiting.pop(place, None)

    def _room_for(self, guest: End) -> Visit | None:
        """A place for a guest's pair. If all are taken, a pair of the address with the most is dropped, if
        that has at least two more than the newcomer's."""
        address, there = guest.visit.party, self.pairs.by_party()
        most = max(there.values(), default=0)
        full = there.total() >= self.pairs.most and most <= there[address] + 1
        if full or there[address] >= self.pairs.most_each:
            self.notes.say(f"no room for one more pair, of {address}")
            return None
        visit = self.pairs.enter(guest.visit.link, address)
        if visit:
            visit.keep(IDLE_SECONDS)
        return visit

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, visit: Visit) -> None:
        """Carry one direction to its end; then the other ends too: a stage hangs up once it has seen it."""
        try:
            while data := await source.read(BUFFER_BYTES):
                self.carried += len(data)
                visit.keep(IDLE_SECONDS)
                sink.write(data)
                await sink.drain()
        finally:
            self.pairs.leave(visit.link)
            sink.close()
