"""Why a process of the fleet ended, and whether a restart can help.

A worker that fails leaves a note in its work folder. The launcher reads it or, if there is none, the exit
status. It waits out faults that can pass. Any other fault ends the launcher when it occurs a second time
without a settled round in between. Standard library only.
"""

import json
import signal
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.disk import full_line, is_full
from isthmus.errors import ConfigError, RunError, passes
from isthmus.files import overwrite_own, replace_file
from isthmus.reading import read_json
from isthmus.runtime.versions import torch_range

PASSING_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the fault can pass
LONGEST_PAUSE_SECONDS = 30.0
QUICK_SECONDS = 20.0  # the restart did not help a process that ends sooner than this
MAX_NOTE_BYTES = 2**16

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

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        error = _no_memory_behind(error) or error
        kind, why = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:400].rstrip(".")
        if isinstance(error, ConfigError | RunError):
            return cls(kind, str(error), passes(error))
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
    def of_exit(cls, status: int, note: Path | None = None) -> "Failure":
        """The failure of an ended process, from its note or its exit status."""
        if note and (found := cls.read(note)):
            return found
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
        return cls("killed", f"killed by signal {-status}", True)

    def write(self, note: Path) -> None:
        with suppress(OSError):  # a full disk: the exit status gives the main fact
            replace_file(note, json.dumps(asdict(self)), sync=False)

    @classmethod
    def read(cls, note: Path) -> "Failure | None":
        try:
            body = read_json(note, MAX_NOTE_BYTES)
            return cls(str(body["kind"]), str(body["text"]), bool(body["passes"]), str(body["trace"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


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
        self.in_a_row = 0

    def progress(self) -> None:
        self.kinds.clear()
        self.in_a_row = 0

    def final(self, found: Collection[Failure]) -> Failure | None:
        """Count the failures of one start; return a repeated one that cannot pass, if any."""
        self.in_a_row += 1
        lasting = {failure.kind: failure for failure in found if not failure.passes}
        again = [failure for kind, failure in lasting.items() if kind in self.kinds]
        self.kinds |= lasting.keys()
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


def failure_note(work: Path, rank: int) -> Path:
    return work / f"failed-{rank}.json"


class Settled:
    """A worker's mark that it has trained a round to its end; replayed rounds do not count."""

    def __init__(self, work: Path, rank: int) -> None:
        self.path, self.trained = settled_note(work, rank), False

    def step(self) -> None:
        self.trained = True

    def round(self) -> None:
        if self.trained:
            with suppress(OSError, ConfigError):
                overwrite_own(self.path)
        self.trained = False


def settled_note(work: Path, rank: int) -> Path:
    return work / f"settled-{rank}"
