"""How long a worker's start takes, by phase. Standard library only."""

import os
import time
from collections.abc import Callable


class StartUp:
    """Times the phases from `join`, or from a restarted worker's start, to the first inner step."""

    def __init__(self, started: float, log: Callable[[str], None], began: float | None = None) -> None:
        """`started`: when the launcher started; `began`: when this worker did."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # the launcher ran all the while
        began = time.time() if began is None else began
        self.started, self.log, self.told = began if again else started, log, False
        self.last, self.parts = began, {} if again else {"launcher": began - started}

    def mark(self, name: str) -> None:
        """Record the end of a phase."""
        now = time.time()
        self.parts[name], self.last = now - self.last, now

    def tell(self) -> None:
        self.mark("first step")
        self.told = True
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        self.log(f"first inner step after {self.last - self.started:.1f} s ({parts})")
