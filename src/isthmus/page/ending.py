"""However a run ends, its folder says how, has a report, and its last line says what to type to go on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isthmus.disk import DiskFull, full_line, is_full
from isthmus.errors import ConfigError
from isthmus.page.report import write_report
from isthmus.runlog import RunDir


@dataclass(slots=True)
class Ending:
    """What the run says of itself before it ends."""

    status: str = "failed"  # or "finished", "interrupted"
    resumable: bool = True
    facts: dict[str, Any] = field(default_factory=dict)  # further ones for its about.json


@contextlib.contextmanager
def ending(run: RunDir, go_on: str) -> Iterator[Ending]:
    """Around all of a run. `go_on` is told to a user who stopped it, or whose disk is full."""
    end, error = Ending(), None
    try:
        yield end
    except KeyboardInterrupt:
        end.status = "interrupted"
        raise KeyboardInterrupt(f"interrupted; {go_on}" if end.resumable else "interrupted") from None
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}".splitlines()[0]
        if not isinstance(fault, OSError) or not is_full(fault):
            raise
        raise DiskFull(f"{full_line(fault)}, then {go_on}") from None
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
            run.update_about(status=end.status, error=error, **end.facts)
        with contextlib.suppress(OSError, ConfigError):  # nor must a report that fails
            write_report(run.path)
