"""How long a worker's start takes, by what it waits for. Standard library only."""

import os
import time
from collections.abc import Callable

BEGAN = time.time()  # before the long imports


class StartUp:
    """From `join` to the first inner step, and what took it; of a worker started again, from that start."""

    def __init__(self, started: float, log: Callable[[str], None]) -> None:
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # the launcher ran all the while
        self.started, self.log, self.told = BEGAN if again else started, log, False
        self.last, self.parts = BEGAN, {} if again else {"launcher": BEGAN - started}

    def mark(self, name: str) -> None:
        """What ends now."""
        now = time.time()
        self.parts[name], self.last = now - self.last, now

    def tell(self) -> None:
        self.mark("first step")
        self.told = True
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        self.log(f"first inner step after {self.last - self.started:.1f} s ({parts})")
