"""Log lines that strangers cause: few are written, however many strangers come."""

import threading
import time
from collections.abc import Callable

LOG_SECONDS = 60.0  # between lines about strangers

Log = Callable[[str], None]
Clock = Callable[[], float]


class RareNotes:
    """Log lines about strangers: the first at once, then one in LOG_SECONDS that counts the others."""

    def __init__(self, log: Log, clock: Clock = time.monotonic) -> None:
        self.log, self.clock = log, clock
        self.next, self.unsaid = 0.0, 0
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        with self.lock:
            now = self.clock()
            if now < self.next:
                self.unsaid += 1
                return
            more = f" (and {self.unsaid} more since the last such line)" if self.unsaid else ""
            self.next, self.unsaid = now + LOG_SECONDS, 0
        self.log(text + more)
