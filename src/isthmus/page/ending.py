"""End a run: record its status, write a report, and print how to resume it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isthmus.disk import DiskFull, full_line, is_full
from isthmus.errors import ConfigError, RunError
from isthmus.page.report import write_report
from isthmus.runlog import RunDir


@dataclass(slots=True)
class Ending:
    """The run's outcome."""

    status: str = "failed"  # or "finished", "interrupted"
    resumable: bool = True
    facts: dict[str, Any] = field(default_factory=dict)  # further ones for about.json


@contextlib.contextmanager
def ending(run: RunDir, go_on: str) -> Iterator[Ending]:
    """Wrap a run. A user who interrupts it, or whose disk is full, sees `go_on`."""
    end, error = Ending(), None
    try:
        yield end
    except KeyboardInterrupt:
        end.status = "interrupted"
        raise KeyboardInterrupt(f"interrupted; {go_on}" if end.resumable else "interrupted") from None
    except BaseException as fault:
        known = isinstance(fault, ConfigError | RunError)
        error = (str(fault) if known else f"{type(fault).__name__}: {fault}").splitlines()[0]
        if not isinstance(fault, OSError) or not is_full(fault):
            raise
        raise DiskFull(f"{full_line(fault, run.path)}, then {go_on}") from None
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
            run.update_about(status=end.status, error=error, **end.facts)
        with contextlib.suppress(OSError, ConfigError):  # neither must a failing report
            write_report(run.path)
