"""How a long preparation shows itself on stderr: a bar on a terminal, now and then a line elsewhere."""

import sys
import time


class Progress:
    """The interface; this one shows nothing, for callers that are not a command line."""

    def phase(self, label: str, total: int) -> None:
        """Begin a part of the work, `total` bytes of input long (0: not known)."""

    def update(self, done: int, detail: str = "") -> None: ...

    def note(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines(Progress):
    """For logs: one line per phase and one every `every_seconds`."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self._label, self._total, self._next = "", 0, 0.0

    def phase(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._next = time.monotonic() + self.every_seconds
        self.note(label)

    def update(self, done: int, detail: str = "") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every_seconds
            share = f" {min(done / self._total, 1):.0%}" if self._total else ""
            self.note(f"{self._label}{share} {detail}".rstrip())

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bar(Progress):
    """For people: one bar per phase, with the time that is left."""

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
        for task in self._bars.tasks:  # a phase that did not know its total ends full
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
