"""Progress of a long preparation on stderr: a bar on a terminal, occasional lines elsewhere."""

import sys
import time

from isthmus.runlog.words import duration

FIRST_SECONDS = 2.0  # a rate is known after this


class Progress:
    """The interface; this class shows nothing, for callers other than a command line."""

    def phase(self, label: str, total: int) -> None:
        """Begin a part of the work, `total` bytes of input long (0: unknown)."""

    def update(self, done: int, detail: str = "") -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines(Progress):
    """For logs: one line per phase, one soon after with the time left, then one every `every_seconds`."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self._label, self._total, self._began, self._next = "", 0, 0.0, 0.0

    def phase(self, label: str, total: int) -> None:
        self._label, self._total, self._began = label, total, time.monotonic()
        self._next = self._began + min(FIRST_SECONDS, self.every_seconds)
        self.note(label)

    def update(self, done: int, detail: str = "") -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.every_seconds
        share = ""
        if self._total and done:
            left = (now - self._began) * max(0.0, self._total / done - 1)
            share = f" {min(done / self._total, 1):.0%}, about {duration(left)} left"
        self.note(f"{self._label}{share} {detail}".rstrip())

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bar(Progress):
    """For terminals: one bar per phase, with the time left."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            progress.TextColumn("{task.fields[detail]}"),
            console=Console(stderr=True),
        )
        self._bars.start()

    def phase(self, label: str, total: int) -> None:
        for task in self._bars.tasks:  # a phase of unknown length ends with a full bar
            self._bars.update(task.id, total=task.completed or 1, completed=task.completed or 1)
        self._bars.add_task(label, total=total or None, detail="")

    def update(self, done: int, detail: str = "") -> None:
        self._bars.update(self._bars.task_ids[-1], completed=done, detail=detail)

    def note(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._bars.stop()


def on_stderr() -> Progress:
    return Bar() if sys.stderr.isatty() else Lines()
