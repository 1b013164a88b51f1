"""Why a worker ended, and whether a restart can help.

A worker that fails tells its supervisor why, which otherwise goes by the exit status. The supervisor waits
out faults that can pass. Any other fault is final when it occurs a second time without a settled round in
between. Standard library only.
"""

import signal
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from isthmus.disk import full_line, is_full
from isthmus.errors import ConfigError, RunError, RunStopped, passes
from isthmus.runtime.versions import torch_range

PASSING_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the fault can pass
LONGEST_PAUSE_SECONDS = 30.0
QUICK_SECONDS = 20.0  # the restart did not help a process that ends sooner than this
MOST_KILLS = 10  # without a settled round, after which a worker is not started again
KILLED = "killed"

# A crash of native code. Other signals come from outside, and their sender may not repeat them.
CRASHES = {getattr(signal, name) for name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE", "SIGSYS")}
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
SMALLER = (
    "use a larger device, or a recipe with a smaller inner.batch, more inner.micro_batches, "
    "inner.recompute = true or a pipelined replica"
)
OUR_FAULT = (ImportError, AttributeError, TypeError, NameError, NotImplementedError)


class Final(RunError):
    """A fault that cannot pass, in one line with its cure: a restart would not help."""

    passes = False


@dataclass(frozen=True, slots=True)
class Failure:
    """One fault in one line, with its cure; `kind` is equal for repeated faults."""

    kind: str
    text: str
    passes: bool
    trace: str = ""
    status: int = 0  # the command's exit status if even a first restart would not help

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        error = _no_memory_behind(error) or error
        kind, why = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:400].rstrip(".")
        if isinstance(error, ConfigError | RunError):
            final = isinstance(error, ConfigError | RunStopped) and not error.passes
            status = (2 if isinstance(error, ConfigError) else 1) if final else 0
            return cls(kind, str(error), passes(error), status=status)
        if isinstance(error, OSError) and is_full(error):
            return cls("no room", full_line(error), False)  # a person has to free some
        text = f"{kind}: {why}" if why else kind
        if kind.startswith("Rendezvous"):  # in our words
            text = why
        if _no_memory_behind(error):
            kind, text = "no memory", f"out of memory ({text}); {SMALLER}"
        elif isinstance(error, ModuleNotFoundError):
            text += f"; install it: pip install {(error.name or 'isthmus').partition('.')[0]}"
        elif isinstance(error, OUR_FAULT):
            text += f"; packages that do not fit? Install them again: pip install isthmus '{torch_range()}'"
        elif "CUDA" in why:
            text += "; look at the device and its driver: nvidia-smi"
        return cls(kind, text, passes(error), "".join(traceback.format_exception(error))[-8000:])

    @classmethod
    def of_exit(cls, status: int) -> "Failure":
        """The failure of a process that could not say why it ended."""
        if status == PASSING_STATUS:
            return cls("status", "it could not say why; the lines before this one may", True)
        if status >= 0:
            text = f"it ended with status {status} before it could say why; the lines before this one may"
            return cls(f"status {status}", text, False)
        if -status in CRASHES:
            name = signal.Signals(-status).name
            return cls(
                name,
                f"a library crashed ({name}); PYTHONFAULTHANDLER=1 shows where. Look at the driver and at "
                f"torch: pip install --force-reinstall '{torch_range()}'",
                False,
            )
        return cls(KILLED, f"killed by signal {-status}", True)


def _no_memory_behind(error: BaseException) -> BaseException | None:
    """The out-of-memory error that an error is or that it was raised from."""
    found: BaseException | None = error
    for _ in range(8):
        if found is None:
            return None
        full = isinstance(found, MemoryError) or type(found).__name__ == "OutOfMemoryError"
        if full or (isinstance(found, RuntimeError) and any(words in str(found) for words in NO_MEMORY)):
            return found
        found = found.__cause__ or found.__context__
    return None


class Failures:
    """The failures since the last settled round, and the pause before the next start."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.in_a_row, self.num_killed = 0, 0

    def progress(self) -> None:
        self.kinds.clear()
        self.in_a_row, self.num_killed = 0, 0

    def final(self, found: Collection[Failure]) -> Failure | None:
        """Count the failures of one start; return one that occurred too often, if any."""
        self.in_a_row += 1
        lasting = {failure.kind: failure for failure in found if not failure.passes}
        again = [failure for kind, failure in lasting.items() if kind in self.kinds]
        self.kinds |= lasting.keys()
        if killed := [failure for failure in found if failure.kind == KILLED]:
            self.num_killed += 1
            again += killed if self.num_killed >= MOST_KILLS else []
        return again[0] if again else None

    def pause_seconds(self) -> float:
        """0 after the first failure, which is most often a kill; then 1, 2, 4 ... 30 s."""
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.in_a_row - 2)) if self.in_a_row > 1 else 0.0


@contextmanager
def told_in_one_line(who: str = "") -> Iterator[None]:
    """Report an error, such as a missing module or an unsuitable torch, in one line with its cure."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        failure = Failure.of(error)
        raise (RunError if failure.passes else Final)(who + failure.text) from error
