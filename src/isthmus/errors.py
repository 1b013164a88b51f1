"""The two error classes, bad input and a run that cannot go on, and which faults are worth a retry."""

import errno

# Disk and mount errors that can pass: somebody makes room, or a share comes back.
PASSING_ERRNO = {errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.EIO}
PASSING_ERRNO |= {errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE, errno.ENETUNREACH, errno.EHOSTUNREACH}
# torch's messages for a lost neighbour. Classes are matched by name, because torch is not imported here.
_NETWORK = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_NETWORK |= {"RendezvousConnectionError", "RendezvousTimeoutError", "RendezvousClosedError"}
_LOST = ("gloo", "by peer", "imed out", "pair closure", "Broken pipe", "ocket closed")


class ConfigError(ValueError):
    """Bad input: one line that says what is wrong and what would be right; exit status 2."""

    passes = False


class Unreachable(ConfigError):
    """What the user named does not answer. A process that reached it before waits instead."""

    passes = True


class RunError(RuntimeError):
    """A fault at run time: one line that names the replica, stage, link or file; exit status 1.

    `passes`: the cause is the network, a store or a neighbour, so a retry may succeed.
    """

    passes = True


class RunStopped(RunError):
    """The run itself cannot be trusted or cannot go on: no restart would help."""

    passes = False


class Diverged(RunError):
    """This replica's anchor differs from the others': it must join again from the bucket."""


def passes(error: BaseException) -> bool:
    """Return whether this fault can pass. If so, we wait; if not, the second one ends the process."""
    if isinstance(error, ConfigError | RunError):
        return error.passes
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _NETWORK:
        return True
    if isinstance(error, OSError):
        return error.errno in PASSING_ERRNO
    return type(error) is RuntimeError and any(words in str(error) for words in _LOST)
